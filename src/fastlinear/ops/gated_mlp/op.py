"""The public functions gated_linear and gated_mlp: validation, selection, one autograd formula.

Validation and selection run only when a kind of call is seen for the first time; a table of ready
plans, looked up by every fact of the tensors, serves the others.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core.errors import InputError
from fastlinear.core.precision import matmul_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.ops.common import calls, door, door_node, layouts
from fastlinear.ops.gated_mlp import programs, reference
from fastlinear.ops.gated_mlp.autograd import Formula, as_rows
from fastlinear.ops.gated_mlp.kept import OWN, account, needs_of, reads_kept, way_of
from fastlinear.ops.gated_mlp.plans import Plan, as_autocast, has_kernels, prepared, resolved
from fastlinear.ops.gated_mlp.selection import choices
from fastlinear.ops.gated_mlp.stacking import Biases, Weights
from fastlinear.ops.gated_mlp.validation import KINDS, validate

_MAX_PLANS = 4096
_is_compiling = torch.compiler.is_compiling
_LEVELS = ("keep", "form again")  # names of recompute's, for the door


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
        activation: of the gate: none, relu, relu2, silu, gelu (erf), gelu_tanh, sigmoid, tanh,
            quick_gelu or leaky_relu (slope 0.01).
        stacked: how rows lie in a stacked gate_weight: ``"gate_up"`` (the gate's first),
            ``"up_gate"``, or ``"interleaved"`` (in turns, the gate's first). Nothing is repacked.
        recompute: what a training call keeps for its backward: 0 the two pre-activations and x, 1
            x alone, for one more product; None whichever way is fastest.
        backend: force the backend by name; None lets fastlinear choose.

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
    weights, biases = Weights(gate_weight, up_weight, None), Biases(gate_bias, up_bias, None)
    return call(
        *(
            x,
            weights,
            biases,
            activation,
            "apart" if stacked is None else stacked,
            recompute,
            backend,
        ),
        function="gated_linear",
    )


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
    weights = Weights(gate_weight, up_weight, down_weight)
    biases = Biases(gate_bias, up_bias, down_bias)
    return call(
        x, weights, biases, activation, "apart" if stacked is None else stacked, recompute, backend
    )


def call(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    backend: str | None,
    function: str = "gated_mlp",
) -> Tensor:
    """Both functions with positional arguments: the entry of ``nn.GatedMLP``."""
    if not _is_compiling() and (
        recompute is None or (type(recompute) is int and 0 <= recompute < 2)
    ):
        level = None if recompute is None else _LEVELS[recompute]
        y: Tensor | None = _door(
            x, weights[:], biases[:], function, activation, order, level, backend
        )
        if y is not None:
            return y
    return _looked_up(x, weights, biases, activation, order, recompute, backend, function)


def _looked_up(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    backend: str | None,
    function: str,
) -> Tensor:
    rest = (activation, order, recompute, backend)
    given = (x, *(t for t in (*weights, *biases) if t is not None))
    plain = recompute is None or type(recompute) is int  # True and 1.0 are equal to 1
    if not (plain and all(isinstance(t, Tensor) for t in given)) and not has_torch_function(given):
        validate(function, x, weights, biases, *rest)  # raises: one of them is not what it must be
    if calls.unlike_plain(given) or calls.forward_mode():
        run = partial(_unusual, function, x, weights, biases, *rest)
        named = {f"{kind}_weight": t for kind, t in zip(KINDS, weights, strict=True)}
        named |= {f"{kind}_bias": t for kind, t in zip(KINDS, biases, strict=True)}
        return layouts.carried(function, run, x=x, **named)
    if _is_compiling():
        return _compiled(function, x, weights, biases, *rest)
    if calls.recorded():
        x, weights, biases = as_autocast(x, weights, biases)
        validate(function, x, weights, biases, *rest)
        return reference.gated_mlp(x, weights, biases, activation, order)
    autocast = calls.autocast_dtype(x)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    negative = any(t.is_neg() for t in given)
    key: Any = (
        function,
        tuple([(t.shape, t.stride(), t.dtype, t.device) for t in given]),
        tuple([t is None for t in (*weights, *biases)]),
        *rest,
        *(grad, autocast, negative),
        matmul_precision(x.dtype),
        calls.is_captured(x),
    )
    try:
        found = _plans.get(key)
    except TypeError:  # an argument that cannot be hashed: validation names it
        found = None
    if found is None:
        found = _resolved(key, function, x, weights, biases, rest, grad, autocast, negative)
    kind, plan = found
    y = plan(x, weights, biases)
    if autocast is None and not negative:
        level = None if recompute is None else _LEVELS[recompute]
        _admit(kind, plan, x, weights, biases, function, activation, order, level, backend)
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
    weights = Weights(gate_weight, up_weight, down_weight)
    biases = Biases(gate_bias, up_bias, down_bias)
    function = "gated_linear" if down_weight is None else "gated_mlp"
    order = "apart" if stacked is None else stacked
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (x, *weights, *biases)
        )
    needs: Any = None
    if all(isinstance(t, Tensor) for t in (x, *weights, *biases) if t is not None):
        needs = needs_of(x, weights, biases)
        x, weights, biases = as_autocast(x, weights, biases)
    validate(function, x, weights, biases, activation, order, recompute, backend)
    rows = as_rows(x.detach())
    found = choices(rows, weights, biases, activation, order, recompute, backend, needs_grad)
    if not needs_grad:
        return Explanation(found)
    backends = {c.problem.piece: c.backend.name for c in found}
    way = way_of(backends, recompute) if has_kernels(x, weights) else OWN
    return Explanation(found, account(found[0].problem, needs, way))


# --------------------------------------------------------------------------------------------
# Plans: what to call for calls of one kind

Kind = Formula | programs.Inference | None
_plans: dict[Any, tuple[Kind, Plan]] = {}


def _no_door(*_: Any) -> None:
    return None


_door: Callable[..., Any] = _no_door


def _forget() -> None:
    _plans.clear()
    _forget_in_door()


def _forget_in_door() -> None:
    """Have the door ask again: formulas that run in Python are recorded in C++ from here on."""
    table = door.table("gated_mlp") if _door is not _no_door else None
    if table is not None:
        table.clear()


cache.on_change(_forget)
door_node.on_ready(_forget_in_door)


def _resolved(
    key: Any,
    function: str,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    rest: tuple[str, str, int | None, str | None],
    grad: bool,
    autocast: torch.dtype | None,
    negative: bool,
) -> tuple[Kind, Plan]:
    """What serves a kind of call seen for the first time."""
    global _door
    x, weights, biases = as_autocast(x, weights, biases)
    validate(function, x, weights, biases, *rest)
    kind, plan = resolved(x, weights, biases, *rest, grad)
    if autocast is not None or negative:
        plan = prepared(plan)
    if len(_plans) >= _MAX_PLANS:
        _forget()
    _plans[key] = kind, plan
    table = door.table("gated_mlp")
    if table is not None:
        _door = table.call
    return kind, plan


def _admit(
    kind: Kind, plan: Plan, x: Tensor, weights: Weights, biases: Biases, *names: Any
) -> None:
    """Make the plan of a call that has run known to the compiled door, if that wants it.

    The door's facts tell more calls apart than a key of ours does.
    """
    if _door is _no_door or (x.is_cuda and not door.serves_cuda()):
        return
    table, given = door.table("gated_mlp"), (x, weights[:], biases[:], *names)
    if table is None or not table.wants(*given):
        return

    def run(x: Tensor, weights: Any, biases: Any) -> Tensor:
        return plan(x, Weights(*weights), Biases(*biases))

    made = None if kind is None else programs.made(kind, x, weights, biases, run)
    table.admit(*given, made or run)


# --------------------------------------------------------------------------------------------
# Calls off the hot path


def _unusual(
    function: str,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    backend: str | None,
) -> Tensor:
    """Tensor subclasses, FX proxies and functorch transforms: plain torch ops carry them."""
    given = tuple(t for t in (x, *weights, *biases) if t is not None)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        public: Callable[..., Tensor] = gated_linear if function == "gated_linear" else gated_mlp
        y: Tensor = handle_torch_function(
            public,
            given,
            x,
            *(weights[:2] if function == "gated_linear" else weights),
            *(biases[:2] if function == "gated_linear" else biases),
            activation=activation,
            stacked=None if order == "apart" else order,
            recompute=recompute,
            backend=backend,
        )
        return y
    x, weights, biases = _cast(x, weights, biases)
    validate(function, x, weights, biases, activation, order, recompute, backend)
    if backend not in (None, "eager"):
        raise InputError(
            function,
            "plain strided tensors outside torch.func transforms and forward-mode "
            "differentiation with a forced backend",
            f"x of type {type(x).__name__}, backend={backend!r}",
            "Leave backend out; such calls take PyTorch's own path.",
        )
    return reference.gated_mlp(x, weights, biases, activation, order)


def _compiled(
    function: str,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    backend: str | None,
) -> Tensor:
    """The call as torch.compile sees it: one registered op."""
    x, weights, biases = _cast(x, weights, biases)
    validate(function, x, weights, biases, activation, order, recompute, backend)
    needs = [t is not None and t.requires_grad for t in (x, *weights, *biases)]
    grad = torch.is_grad_enabled() and reads_kept(needs)
    y: Tensor = torch.ops.fastlinear.gated_mlp(
        x, *weights, *biases, activation, order, recompute == 1, grad, backend or ""
    )[0]
    return y


def _cast(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, Weights, Biases]:
    """The tensors in the dtype autocast has for them, without torch's cache of parameters."""
    dtype = calls.autocast_dtype(x)
    if dtype is None:
        return x, weights, biases

    def cast(t: Any) -> Any:
        if t is None or not t.is_floating_point() or t.dtype is torch.float64:
            return t
        return t.to(dtype)

    return cast(x), Weights(*map(cast, weights)), Biases(*map(cast, biases))
