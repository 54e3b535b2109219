"""The public functions gated_linear and gated_mlp."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.dispatch.explain import Explanation
from fastlinear.families.gated.saved_memory import OWN, account, needs_of, way_of
from fastlinear.families.gated.spec import FRONT, has_kernels, level_of
from fastlinear.families.gated.stacking import Biases, Weights
from fastlinear.op.front import public


@public
def gated_linear(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    stacked: str | None = None,
    recompute: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Gated linear layer (GLU and its kin): ``act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)``.

    Args:
        x: input, shape (..., K), any strides.
        gate_weight: shape (H, K), as in ``nn.Linear``; or gate and up stacked, (2H, K). Any
            strides. Same dtype and device as ``x``.
        up_weight: shape (H, K); None where stacked.
        gate_bias: shape (H,), or (2H,) where stacked, or None.
        up_bias: shape (H,), or None. One half may have a bias and the other none.
        activation: of the gate, by name: none, relu, silu, gelu (erf), gelu_tanh or another that
            the project's README lists.
        stacked: how rows lie in a stacked gate_weight: ``"gate_up"`` (the gate's first),
            ``"up_gate"``, or ``"interleaved"`` (in turns, the gate's first). Nothing is repacked.
        recompute: what a training call keeps for its backward: 0 the two pre-activations and x, 1
            x alone, for one more product; None whichever way is fastest.
        backend: force the backend by name; None lets fastlinear choose. By
            ``"batch_invariant"`` rows of the result do not depend on each other.

    Returns:
        Shape (..., H), dtype of ``x`` (under autocast: the autocast dtype), dense.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shape. Differentiable, to any order. Source: Shazeer, arXiv 2002.05202.

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, wg, wu = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3)
    >>> fl.gated_linear(x, wg, wu, activation="relu").shape
    torch.Size([2, 4])
    >>> both = torch.cat([wg, wu])
    >>> fl.gated_linear(x, both, activation="relu", stacked="gate_up").shape
    torch.Size([2, 4])
    """
    order = "apart" if stacked is None else stacked
    level = None if recompute is None else level_of(recompute, "gated_linear")
    weights, biases = (gate_weight, up_weight, None), (gate_bias, up_bias, None)
    y: Tensor = FRONT.call(x, weights, biases, "gated_linear", activation, order, level, backend)
    return y


@public
def gated_mlp(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None = None,
    down_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    stacked: str | None = None,
    recompute: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """Gated MLP (SwiGLU, GeGLU, ReGLU): ``(act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)) Wdᵀ + bd``.

    Args:
        x: input, shape (..., K), any strides.
        gate_weight, up_weight, gate_bias, up_bias: as for ``gated_linear``.
        down_weight: shape (N, H); any strides.
        down_bias: shape (N,), or None.
        activation, stacked, recompute, backend: as for ``gated_linear``.

    Returns:
        Shape (..., N), dtype of ``x`` (under autocast: the autocast dtype), dense.

    Raises:
        InputError: shapes, dtypes or devices do not fit, or a name is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shape. Differentiable, to any order. What the gate lets through is formed
    again in the backward, never kept, unless ``recompute`` is None and PyTorch's own autograd is
    fastest. Source: Shazeer, arXiv 2002.05202.

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, wg, wu, wd = torch.ones(2, 3), torch.ones(4, 3), torch.ones(4, 3), torch.ones(3, 4)
    >>> fl.gated_mlp(x, wg, wu, wd, activation="gelu_tanh").shape
    torch.Size([2, 3])
    """
    order = "apart" if stacked is None else stacked
    level = None if recompute is None else level_of(recompute, "gated_mlp")
    weights, biases = (gate_weight, up_weight, down_weight), (gate_bias, up_bias, down_bias)
    y: Tensor = FRONT.call(x, weights, biases, "gated_mlp", activation, order, level, backend)
    return y


def call(
    x: Tensor,
    weights: tuple[Any, Any, Any],
    biases: tuple[Any, Any, Any],
    activation: str,
    order: str,
    recompute: int | None,
    backend: str | None,
    function: str = "gated_mlp",
) -> Tensor:
    """Both functions with positional arguments, of the gate, up and down projection each: the
    entry of ``nn.GatedMLP``."""
    level = None if recompute is None else level_of(recompute, function)
    y: Tensor = FRONT.call(x, weights[:], biases[:], function, activation, order, level, backend)
    return y


def explain(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None = None,
    down_weight: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    *,
    activation: str = "silu",
    stacked: str | None = None,
    recompute: int | None = None,
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend a call takes, why, and why not each other; of a training call also what it
    keeps for its backward, and what the other levels of ``recompute`` would.

    Args:
        x, gate_weight … backend: as for ``gated_mlp``; for ``gated_linear`` without a down weight.
        needs_grad: whether to explain the training choice; by default what the tensors say. Where
            none of them requires a gradient, it is explained as if all did.
    """
    weights = gate_weight, up_weight, down_weight
    biases = gate_bias, up_bias, down_bias
    function = "gated_linear" if down_weight is None else "gated_mlp"
    order = "apart" if stacked is None else stacked
    level = level_of(recompute, function)
    call = x, weights, biases, function, activation, order, level, backend
    found = FRONT.explain(call, needs_grad)
    if len(found.choices) == 1:
        return found
    held: Any = Weights(*weights), Biases(*biases)  # type: ignore[arg-type]
    backends = {c.problem.piece: c.backend.name for c in found.choices}
    way = way_of(backends, recompute) if has_kernels(x, weights) else OWN
    return Explanation(found.choices, account(found.choices[0].problem, needs_of(x, *held), way))
