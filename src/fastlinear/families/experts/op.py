"""The public function experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.core.errors import InputError
from fastlinear.dispatch.explain import Explanation
from fastlinear.families.experts.gate import numbers_of
from fastlinear.families.experts.spec import FRONT
from fastlinear.op.front import public
from fastlinear.op.spec import Arguments

_MOST = 2**31 - 1


@public
def experts(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    stacked: str = "gate_up",
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    first_expert: int = 0,
    recompute: int = 0,
    backend: str | None = None,
) -> Tensor:
    """The experts of a mixture of experts, for tokens that a router has assigned to them:
    ``y_t = Σ_j w_tj (h_tj W_downᵀ + b_down)`` with ``h_tj = act(α g) / α · (u + offset)``, where
    g and u are the halves of ``x_t W_gate_upᵀ + b_gate_up``, of the expert ``topk_index[t, j]``.

    Args:
        x: shape (T, H), any strides.
        topk_index: shape (T, k), int32 or int64: each token's experts. An expert that has no weight
            here (negative, or beyond the last) adds nothing; nothing outside is read. A token may
            name an expert twice.
        topk_weight: shape (T, k): w, of x's dtype or float32.
        gate_up: shape (E, 2I, H), any strides; dtype and device of x.
        down: shape (E, H, I), any strides.
        gate_up_bias: shape (E, 2I), or None.
        down_bias: shape (E, H), or None.
        activation: of the gate, a name ``gated_mlp`` knows.
        stacked: how gate and up lie in gate_up: ``"gate_up"`` (the gate's half first),
            ``"up_gate"``, or ``"interleaved"`` (in turns, the gate's first).
        transposed: whether gate_up is (E, H, 2I) and down (E, I, H). Nothing is repacked.
        limit: clamps g from above, and u from both sides; None for no limit.
        alpha: α: silu with it is ``g · sigmoid(α g)``.
        up_offset: what is added to u. gpt-oss has ``limit=7.0, alpha=1.702, up_offset=1.0``.
        first_expert: the number in topk_index of the first expert here, for expert parallelism.
        recompute: what a training call keeps for its backward: 0 the pre-activations (T k, 2I) and
            x, 1 x alone, for one more product. ``"eager"`` keeps what PyTorch's autograd keeps.
        backend: ``"triton"``, on CUDA devices; ``"cpp"``, on CPUs; ``"eager"``, PyTorch's own ops;
            or ``"batch_invariant"``, by which tokens do not depend on each other. None lets
            fastlinear choose.

    Returns:
        y (T, H), dtype of x (under autocast: the autocast dtype), dense.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name or number is out of its range.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Differentiable, to
    any order, in all but topk_index. Deterministic for a given backend and shape. No shape depends
    on topk_index. ``"triton"`` reads it on the device alone, so that it may be captured into a CUDA
    graph; ``"eager"`` does where torch has a grouped product (bfloat16, from sm_80 to sm_90).
    Source: Shazeer et al., arXiv 1701.06538; the gate Shazeer, arXiv 2002.05202.

    >>> import torch, fastlinear as fl
    >>> x, gate_up, down = torch.ones(2, 3), torch.ones(4, 10, 3), torch.ones(4, 3, 5)
    >>> index, weight = torch.tensor([[0, 3], [1, 4]]), torch.tensor([[0.5, 0.5], [0.25, 0.75]])
    >>> y = fl.experts(x, index, weight, gate_up, down, activation="relu")  # there is no expert 4
    >>> y[:, 0]
    tensor([45.0000, 11.2500])
    """
    y: Tensor = FRONT.call(
        *_call(
            *(x, topk_index, topk_weight, gate_up, down, gate_up_bias, down_bias),
            *(activation, stacked, transposed, limit, alpha, up_offset),
            *(first_expert, recompute, backend),
        )
    )
    return y


def _call(
    x: Any,
    index: Any,
    weight: Any,
    gate_up: Any,
    down: Any,
    gate_up_bias: Any,
    down_bias: Any,
    activation: str,
    stacked: str,
    transposed: bool,
    limit: float | None,
    alpha: float,
    up_offset: float,
    first_expert: int,
    recompute: int,
    backend: str | None,
) -> Arguments:
    """The arguments of the front end."""
    if type(first_expert) is not int or not 0 <= first_expert <= _MOST:
        raise InputError(
            "experts",
            "first_expert to be a whole number from 0 on",
            repr(first_expert),
            "It is the number in topk_index of the first expert in gate_up.",
        )
    if type(recompute) is not int or recompute not in (0, 1):
        raise InputError(
            "experts",
            "recompute to be 0 or 1",
            repr(recompute),
            "0 keeps the pre-activations for the backward, 1 keeps x alone.",
        )
    if transposed:
        gate_up, down = _turned(gate_up), _turned(down)
    routing = index, weight, gate_up_bias, down_bias
    numbers = numbers_of(limit, alpha, up_offset)
    options = activation, stacked, numbers, str(first_expert), recompute == 1
    return x, (gate_up, down), routing, *options, backend


def _turned(weight: Any) -> Any:
    if isinstance(weight, Tensor):
        return weight.mT if weight.dim() == 3 else weight
    return getattr(weight, "mT", weight)  # of a trace


def explain(
    x: Tensor,
    topk_index: Tensor,
    topk_weight: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    stacked: str = "gate_up",
    transposed: bool = False,
    limit: float | None = None,
    alpha: float = 1.0,
    up_offset: float = 0.0,
    first_expert: int = 0,
    recompute: int = 0,
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``experts`` takes for this call, why, and why not each other.

    Args:
        x … backend: as for ``experts``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    call = _call(
        *(x, topk_index, topk_weight, gate_up, down, gate_up_bias, down_bias),
        *(activation, stacked, transposed, limit, alpha, up_offset),
        *(first_expert, recompute, backend),
    )
    return FRONT.explain(call, needs_grad)
