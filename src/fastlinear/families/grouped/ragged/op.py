"""The public function ragged_linear: groups of one size whose numbers of rows differ."""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.deprecated import renamed
from fastlinear.dispatch.explain import Explanation
from fastlinear.families.grouped.ragged.spec import FRONT
from fastlinear.families.grouped.ragged.validation import validate
from fastlinear.op.front import public

__all__ = ["call", "explain", "ragged_linear", "validate"]

call = FRONT.call
"""(x, weight, (group_sizes, bias), activation, backend)."""


@public
def ragged_linear(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Rows sorted by group, each by its group's linear layer: ``y_t = act(x_t W_gᵀ + b_g)``.

    Group 0 owns the first ``group_sizes[0]`` rows, group 1 the next, and so on, as a mixture of
    experts has them. Sizes may sum to less than T: the rows behind the last group's belong to none.
    Their y and dx are exact zeros, whatever x, bias and activation are, and they add nothing to dW
    and db. They raise nothing: a sum that is too small by mistake shows as rows of zeros.

    Args:
        x: shape (T, K).
        weight: shape (G, N, K), any strides; dtype and device of x.
        group_sizes: shape (G,), int32 or int64, on x's device; each at least 0, T at most in all.
        bias: shape (G, N), or None.
        activation: a name ``grouped_linear`` knows.
        backend: ``"triton"``, one launch forward and at most two backward, on CUDA devices (on
            Hopper dW of large weights in bfloat16 is PyTorch's grouped product, a few more);
            ``"planes"``, float32 by tensor cores of float16 on Hopper, a few launches each;
            ``"cuda"``, bfloat16 and float16 on Hopper where K and N are multiples of 8, taken only
            where it is asked for, a few launches each;
            ``"cpp"``, one C++ call each, on CPUs, in float32 and bfloat16; ``"eager"``, a product
            of PyTorch a group, which reads the sizes on the host and so waits for the device; or
            ``"batch_invariant"``, by which rows do not depend on each other. None lets fastlinear
            choose.

    Returns:
        y (T, N), in x's dtype.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name is unknown; with "cpp" and
            "eager" also a negative size, or sizes that pass T together. "triton", "planes" and
            "cuda" do not wait to look at them: a negative size counts as 0, and what passes T is
            cut off.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and sizes. Differentiable, to any order.

    >>> import torch, fastlinear as fl
    >>> x, w = torch.ones(5, 3), torch.ones(2, 4, 3)
    >>> fl.ragged_linear(x, w, torch.tensor([3, 1]))[:, 0]
    tensor([3., 3., 3., 3., 0.])
    """
    if backend == "loop":
        backend = renamed("backend", "loop", "eager")
    return call(x, weight, (group_sizes, bias), activation, backend)  # type: ignore[no-any-return]


def explain(
    x: Tensor,
    weight: Tensor,
    group_sizes: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``ragged_linear`` takes for this call, why, and why not each other.

    Args:
        x, weight, group_sizes, bias, activation, backend: as for ``ragged_linear``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    return FRONT.explain((x, weight, (group_sizes, bias), activation, backend), needs_grad)
