"""The public function diagonal_linear: validation, selection, and one autograd formula.

Hot path: one call of the compiled door looks a ready plan up by every fact of the tensors, and runs
it. Where the door cannot be built, or knows no such call, the lookup below does the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.ops.common import calls, door, layouts
from fastlinear.ops.diagonal_linear import apart, launches, plans, programs
from fastlinear.ops.diagonal_linear.problem import NAME
from fastlinear.ops.diagonal_linear.selection import choices
from fastlinear.ops.diagonal_linear.validation import validate, validate_out

__all__ = ["call", "diagonal_linear", "explain", "validate"]

_MAX_PLANS = 4096
_is_compiling = torch.compiler.is_compiling


def diagonal_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    residual: Tensor | None = None,
    *,
    out: Tensor | None = None,
    backend: str | None = None,
) -> Tensor:
    """Linear layer with a diagonal weight, in one pass: ``act(x ∘ w + b) + residual``.

    Args:
        x: input, shape (..., K), any strides.
        weight: the diagonal, shape (K,). Same dtype and device as ``x``.
        bias: shape (K,), or None.
        activation: none, relu, relu2, silu, gelu (erf), gelu_tanh, sigmoid, tanh, quick_gelu or
            leaky_relu (slope 0.01).
        residual: added after the activation, of x's shape, or None. A scaled branch is
            ``diagonal_linear(branch, scale, residual=stream)``.
        out: contiguous tensor of x's shape to write to, sharing no memory with an input. Without
            gradients only.
        backend: force a backend by name; None lets fastlinear choose.

    Returns:
        Shape of ``x``, its dtype (under autocast the autocast dtype, plus the residual as torch
        promotes it); ``out`` where that is given.

    Raises:
        InputError: shapes, dtypes or devices do not fit, the activation is unknown, or ``out``
            cannot take the result.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes compute and sum in float32. Deterministic
    for a given backend and shape. Differentiable, to any order.

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, w, b = torch.ones(2, 3), torch.full((3,), 2.0), torch.ones(3)
    >>> fl.diagonal_linear(x, w, b, activation="relu", residual=x)
    tensor([[4., 4., 4.],
            [4., 4., 4.]])
    """
    return call(x, weight, bias, activation, residual, out, backend)


def call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    """``diagonal_linear`` with positional arguments: the entry of ``fastlinear.nn``."""
    if _is_compiling():
        return apart.compiled(_unusual, x, weight, bias, activation, residual, out, backend)
    y: Tensor | None
    if out is None:
        y = _door(x, weight, (bias, residual), activation, backend)
    else:
        y = _door_into(x, weight, (bias, residual, out), activation, backend)
    if y is not None:
        return y
    return _looked_up(x, weight, bias, activation, residual, out, backend)


def explain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    residual: Tensor | None = None,
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``diagonal_linear`` takes for this call, why, and why not each other.

    Args:
        x, weight, bias, activation, residual, backend: as for ``diagonal_linear``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    if needs_grad is None:
        needs_grad = apart.needs_grad(x, weight, bias, residual)
    autocast = calls.autocast_dtype(x) if isinstance(x, Tensor) else None
    if autocast is not None and isinstance(weight, Tensor):
        if residual is not None and residual.dtype != autocast:
            residual = None  # added by torch, which promotes
        x, weight, (bias, residual) = plans.prepared(x, weight, (bias, residual), autocast)
    validate(x, weight, bias, activation, residual, backend)
    captured = calls.is_captured(x)
    return Explanation(choices(x, bias, residual, activation, backend, needs_grad, captured))


# --------------------------------------------------------------------------------------------
# Plans: what to call for calls of one kind

_plans: dict[Any, plans.Resolved] = {}


def _unusual(*call: Any) -> Tensor:
    return apart.unusual(diagonal_linear, *call)


def _no_door(*_: Any) -> None:
    return None


_door: Callable[..., Any] = _no_door
_door_into: Callable[..., Any] = _no_door
_TABLE, _TABLE_INTO = NAME, f"{NAME}, into memory of the caller's"


def _forget() -> None:
    _plans.clear()
    for name in (_TABLE, _TABLE_INTO) if _door is not _no_door else ():
        table = door.table(name)
        if table is not None:
            table.clear()


cache.on_change(_forget)


def _looked_up(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
    backend: str | None,
) -> Tensor:
    given = [x, weight, *(t for t in (bias, residual) if t is not None)]
    if calls.unlike_plain(given):
        run = partial(_unusual, x, weight, bias, activation, residual, backend)
        named = {"x": x, "weight": weight, "bias": bias, "residual": residual}
        y = layouts.carried("diagonal_linear", run, **named)
        return y if out is None else apart.into(out, y, given)
    autocast = calls.autocast_dtype(x)
    if autocast is not None and residual is not None and residual.dtype != autocast:
        y = call(x, weight, bias, activation, None, None, backend)
        y = residual + y  # as torch promotes; a residual kept in float32 stays there
        return y if out is None else apart.into(out, y, given)
    grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    key: Any = (
        tuple([(t.shape, t.stride(), t.dtype, t.device) for t in given]),
        bias is None,
        activation,
        backend,
        grad,
        autocast,
        calls.is_captured(x),
    )
    try:
        found = _plans.get(key)
    except TypeError:  # an activation or backend that cannot be hashed: validation names it
        found = None
    if found is None:
        found = _resolved(key, x, weight, bias, activation, residual, backend, grad, autocast)
    if out is not None:
        y = _given_out(found, x, weight, (bias, residual), activation, out, autocast)
        if found.in_door is not None:
            _admit_into(found, x, weight, bias, activation, residual, out, backend)
        return y
    y = found.plan(x, weight, (bias, residual))
    if found.in_door is not None:
        _admit(found, x, weight, bias, activation, residual, backend)
    return y


def _resolved(
    key: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    backend: str | None,
    grad: bool,
    autocast: torch.dtype | None,
) -> plans.Resolved:
    """The plan of a kind of call seen for the first time: validate, select, remember."""
    global _door, _door_into
    if autocast is not None:
        x, weight, (bias, residual) = plans.prepared(x, weight, (bias, residual), autocast)
    validate(x, weight, bias, activation, residual, backend)
    found = plans.resolved(x, weight, bias, activation, residual, backend, grad, autocast, _unusual)
    if len(_plans) >= _MAX_PLANS:
        _forget()
    _plans[key] = found
    table, into = door.table(_TABLE), door.table(_TABLE_INTO)
    if table is not None and into is not None:
        _door, _door_into = table.call, into.call
    return found


def _given_out(
    found: plans.Resolved,
    x: Tensor,
    weight: Tensor,
    rest: plans.Rest,
    activation: str,
    out: Tensor,
    autocast: torch.dtype | None,
) -> Tensor:
    """The call with memory of the caller's for its result."""
    bias, residual = rest
    inputs = (x, weight, bias, residual)
    kept = autocast is None or x.dtype is torch.float64
    validate_out(out, x, x.dtype if kept else autocast, inputs)
    plain = plans.as_memory_lies(*inputs, out)
    if found.run is None or not plain or calls.recorded() or calls.forward_mode():
        return out.copy_(found.plan(x, weight, rest))
    x, weight, (bias, residual) = plans.prepared(x, weight, rest, autocast)
    k = x.shape[-1]
    rows = None if residual is None else residual.reshape(-1, k)
    found.run(x.reshape(-1, k), weight, bias, activation, rows, out.view(-1, k))
    if not out.is_inference():  # a backward that has kept what was there is to know
        torch.autograd.graph.increment_version(out)
    return out


def _admit(
    found: plans.Resolved,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    backend: str | None,
) -> None:
    """Make the plan of a call that has run known to the compiled door, if that wants it.

    Its facts tell more calls apart than a key of ours does.
    """
    if _door is _no_door or (x.is_cuda and not door.serves_cuda()):
        return
    table = door.table(_TABLE)
    rest = (bias, residual)
    if not _wanted(table, x, weight, rest, activation, backend):
        return
    assert table is not None
    dense = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    plan: Any = found.in_door if dense else found.plan
    if x.is_cuda and dense and found.launched:
        plan = launches.in_door(x, weight, bias, activation, residual, plan) or plan
    elif dense and found.training is not None:
        plan = programs.node(found.training, x, weight, bias, residual) or plan
    elif dense and found.inference is not None:
        given = x, weight, bias, activation, residual
        plan = programs.inference(found.inference, *given, plan) or plan
    table.admit(x, weight, rest, activation, backend, plan)


def _admit_into(
    found: plans.Resolved,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor,
    backend: str | None,
) -> None:
    """The same of a call with ``out``, outside autocast."""
    if _door is _no_door or (x.is_cuda and not door.serves_cuda()):
        return
    table = door.table(_TABLE_INTO)
    rest = (bias, residual, out)
    if not _wanted(table, x, weight, rest, activation, backend):
        return
    assert table is not None

    def plan(x: Tensor, weight: Tensor, rest: tuple[Tensor | None, Tensor | None, Tensor]) -> Any:
        return _given_out(found, x, weight, rest[:2], activation, rest[2], None)

    made = None
    dense = weight.is_contiguous() and (bias is None or bias.is_contiguous())
    if dense and found.inference is not None:
        given = x, weight, bias, activation, residual
        made = programs.into(found.inference, *given, out, plan)
    table.admit(x, weight, rest, activation, backend, made or plan)


def _wanted(table: door.Table | None, x: Tensor, weight: Tensor, rest: Any, *names: Any) -> bool:
    """Whether the door wants a plan of such a call, and may have one."""
    if table is None or not table.wants(x, weight, rest, *names) or calls.recorded():
        return False
    return plans.as_memory_lies(x, weight, *rest)
