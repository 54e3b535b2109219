"""The public function unequal_linear: linear layers of different sizes as one operation."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from fastlinear.core.deprecated import renamed
from fastlinear.dispatch.explain import Explanation
from fastlinear.families.grouped.unequal.autograd import Maybe
from fastlinear.families.grouped.unequal.spec import FRONT, sequence
from fastlinear.families.grouped.unequal.validation import validate
from fastlinear.op.front import public

__all__ = ["call", "explain", "unequal_linear", "validate"]

call = FRONT.call
"""(xs, weights, biases, activation, backend)."""


@public
def unequal_linear(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
) -> list[Tensor]:
    """Linear layers of different sizes: ``y_g = act(x_g W_gᵀ + b_g)`` for every g.

    Args:
        xs: one input a group, shape (..., K_g), any strides; numbers of tokens may differ too.
        weights: one weight a group, shape (N_g, K_g), of x's dtype and device.
        biases: one bias a group, shape (N_g,), or None for a group without; None for none at all.
        activation: a name ``grouped_linear`` knows.
        backend: ``"eager"``, a product of PyTorch a group; ``"together"``, one launch forward and
            at most two backward on CUDA devices, one C++ call each way on CPUs;
            ``"batch_invariant"``, a layer a group, whose rows do not depend on each other. None
            lets fastlinear choose.

    Returns:
        The y_g (..., N_g), in order. With "together" they share one allocation.

    Raises:
        InputError: lists, shapes, dtypes or devices do not fit, or a name is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shapes. Differentiable, to any order.

    >>> import torch, fastlinear as fl
    >>> xs = [torch.ones(5, 3), torch.ones(2, 7)]
    >>> ys = fl.unequal_linear(xs, [torch.ones(4, 3), torch.ones(6, 7)])
    >>> [tuple(y.shape) for y in ys]
    [(5, 4), (2, 6)]
    """
    if backend == "loop":
        backend = renamed("backend", "loop", "eager")
    xs, weights = sequence("xs", xs), sequence("weights", weights)
    biases = None if biases is None else sequence("biases", biases)
    return call(xs, weights, biases, activation, backend)  # type: ignore[no-any-return]


def explain(
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``unequal_linear`` takes for this call, why, and why not each other.

    Args:
        xs, weights, biases, activation, backend: as for ``unequal_linear``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    return FRONT.explain((xs, weights, biases, activation, backend), needs_grad)
