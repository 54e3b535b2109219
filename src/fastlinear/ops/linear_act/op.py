"""The public function linear_act: validation, selection, and one autograd formula.

Hot path: one call of the compiled door looks a ready plan up by every fact of the tensors, and runs
it. Where the door cannot be built, or knows no such call, the lookup below does the same.
Validation and selection run only when such a call is seen for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core.errors import InputError
from fastlinear.core.precision import float32_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.ops.common import calls, door, door_node
from fastlinear.ops.common.calls import is_captured, lies_turned
from fastlinear.ops.common.layouts import carried, is_odd
from fastlinear.ops.linear_act import launches, plans, programs, reference
from fastlinear.ops.linear_act.selection import choices, problem_of
from fastlinear.ops.linear_act.validation import validate

__all__ = ["call", "choices", "explain", "linear_act", "problem_of", "validate"]

_MAX_PLANS = 4096
_FLOAT32 = torch.float32
_PLAIN = calls.PLAIN
_transforms_active = calls.transforms_active
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_capturing = torch.cuda.is_current_stream_capturing


def linear_act(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
) -> Tensor:
    """Linear layer with its activation: ``act(x Wᵀ + b)`` as one operation where that is faster.

    Args:
        x: input, shape (..., K), any strides.
        weight: shape (N, K), as in ``nn.Linear``; any strides. Same dtype and device as ``x``.
        bias: shape (N,), or None.
        activation: none, relu, relu2, silu, gelu (erf), gelu_tanh, sigmoid, tanh, quick_gelu or
            leaky_relu (slope 0.01).
        backend: force the forward's backend by name; None lets fastlinear choose.

    Returns:
        Shape (..., N), dtype of ``x`` (under autocast: the autocast dtype).

    Raises:
        InputError: shapes, dtypes or devices do not fit, or the activation is unknown.
        UnsupportedError: a forced backend cannot serve the call; the message says why.

    float32, bfloat16, float16 and float64; 16-bit dtypes accumulate in float32. Deterministic for
    a given backend and shape. Differentiable, to any order (once inside ``torch.compile``).

    Sparse and nested tensors are computed by PyTorch's own ops where those carry them, and named in
    an InputError otherwise; quantized ones are always. On the meta device the result has its shape
    and dtype alone.

    >>> import torch, fastlinear as fl
    >>> x, w, b = torch.ones(2, 3), torch.ones(4, 3), torch.zeros(4)
    >>> fl.linear_act(x, w, b, activation="relu").shape
    torch.Size([2, 4])
    """
    return call(x, weight, bias, activation, backend)


def call(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """``linear_act`` with positional arguments: the entry of ``fastlinear.nn.Linear``."""
    if _is_compiling():
        return _compiled(x, weight, bias, activation, backend)
    y: Tensor | None = _door(x, weight, bias, activation, backend)
    if y is not None:
        return y
    return _looked_up(x, weight, bias, activation, backend)


def run(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """``call`` of tensors that are there, though a compiler may be at work: it may run a registered
    op to see what comes out."""
    y: Tensor | None = _door(x, weight, bias, activation, backend)
    return y if y is not None else _looked_up(x, weight, bias, activation, backend)


def explain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    activation: str = "none",
    backend: str | None = None,
    needs_grad: bool | None = None,
) -> Explanation:
    """Which backend ``linear_act`` takes for this call, why, and why not each other.

    Args:
        x, weight, bias, activation, backend: as for ``linear_act``.
        needs_grad: whether to explain the training choice; by default what the tensors say.
    """
    autocast = calls.autocast_dtype(x) if isinstance(x, Tensor) else None
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and any(
            isinstance(t, Tensor) and t.requires_grad for t in (x, weight, bias)
        )
    if autocast is not None and isinstance(weight, Tensor) and isinstance(bias, Tensor | None):
        x, weight, bias = _cast(x, weight, bias, autocast)
    validate(x, weight, bias, activation, backend)
    captured = is_captured(x)
    return Explanation(choices(x, weight, bias, activation, backend, needs_grad, captured))


# --------------------------------------------------------------------------------------------
# Plans: what to call for calls of one kind

_plans: dict[Any, plans.Resolved] = {}


def _no_door(*_: Any) -> None:
    return None


_door: Callable[..., Any] = _no_door


def _forget() -> None:
    _plans.clear()
    table = door.table("linear_act") if _door is not _no_door else None
    if table is not None:
        table.clear()


def _forget_in_door() -> None:
    """Have the door ask again: formulas that run in Python are recorded in C++ from here on.

    What PyTorch's own nodes record stays theirs: a checkpoint counts on the same ones for a call
    and its repetition.
    """
    table = door.table("linear_act") if _door is not _no_door else None
    if table is not None:
        table.clear()


cache.on_change(_forget)
door_node.on_ready(_forget_in_door)


def _looked_up(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    if (
        type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or (bias is not None and (type(bias) not in _PLAIN or is_odd(bias)))
        or _transforms_active()
        or is_odd(x)
        or is_odd(weight)
    ):
        run = partial(_unusual, x, weight, bias, activation, backend)
        return carried("linear_act", run, x=x, weight=weight, bias=bias)
    dtype = x.dtype
    autocast = calls.autocast_dtype(x) if _any_autocast() else None
    facts: tuple[Any, ...] = (
        x.shape,
        weight.shape,
        dtype,
        weight.dtype,
        x.device,
        weight.device,
        x.is_contiguous() or x.stride(),
        weight.is_contiguous() or weight.stride(),
        activation,
        backend,
        autocast,
        float32_precision() if dtype is _FLOAT32 else None,
        x.is_cuda and _capturing(),  # is_captured(x), without its call
    )
    if bias is None:
        grad = _grad_enabled() and (x.requires_grad or weight.requires_grad)
        key: tuple[Any, ...] = (facts, grad)
    else:
        grad = _grad_enabled() and (x.requires_grad or weight.requires_grad or bias.requires_grad)
        key = (facts, grad, bias.shape, bias.dtype, bias.device)
    try:
        found = _plans.get(key)
    except TypeError:  # an activation or backend that cannot be hashed: validation names it
        found = None
    if found is None:
        found = _resolved(key, x, weight, bias, activation, backend, grad, autocast)
    y = found.plan(x, weight, bias)
    if found.in_door is not None:
        _admit(found, x, weight, bias, activation, backend)
    return y


def _resolved(
    key: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
    grad: bool,
    autocast: torch.dtype | None,
) -> plans.Resolved:
    """The plan of a kind of call seen for the first time: validate, select, remember."""
    global _door
    if autocast is not None:
        x, weight, bias = _cast(x, weight, bias, autocast)
    validate(x, weight, bias, activation, backend)
    if calls.recorded():  # PyTorch's own ops, and none that a choice of backends asks
        return plans.Resolved(plans.native(activation), None, None)
    table = door.table("linear_act")
    if table is not None:
        _door = table.call
    nodes = grad and table is not None and door_node.begun()
    found = plans.resolved(x, weight, bias, activation, backend, grad, autocast, nodes, _unusual)
    if len(_plans) >= _MAX_PLANS:
        _forget()
    _plans[key] = found
    return found


def _admit(
    found: plans.Resolved,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
) -> None:
    """Make the plan of a call that has run known to the compiled door, if that wants it.

    Its facts tell more calls apart than a key of ours does.
    """
    if _door is _no_door or (x.is_cuda and not door.serves_cuda()):
        return
    table = door.table("linear_act")
    if table is None or not table.wants(x, weight, bias, activation, backend):
        return
    if calls.recorded() or not plans.as_memory_lies(x, weight, bias):
        return
    dense = bias is None or bias.is_contiguous()
    plan = found.in_door if dense else found.plan
    if x.is_cuda and dense and found.kernel is not None:
        given = found.kernel, x, weight, bias, activation, plan
        plan = launches.in_door(*given) or programs.inference(*given) or plan
    elif dense and found.training is not None:
        plan = programs.node(found.training, x, weight, bias) or plan
    table.admit(x, weight, bias, activation, backend, plan)


# --------------------------------------------------------------------------------------------
# Calls off the hot path


def _cast(
    x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast float32 and 16-bit tensors to the autocast dtype, as torch does for linear."""

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t

    return cast(x), cast(weight), None if bias is None else cast(bias)


def _unusual(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """Tensor subclasses, FX proxies and functorch transforms: plain torch ops carry them."""
    given = (x, weight) if bias is None else (x, weight, bias)
    if not all(isinstance(t, Tensor) for t in given) and has_torch_function(given):
        y: Tensor = handle_torch_function(
            linear_act, given, x, weight, bias, activation=activation, backend=backend
        )
        return y
    if not isinstance(x, Tensor) or calls.autocast_dtype(x) is None:
        # under autocast dtypes may differ; torch's own linear checks the rest there
        validate(x, weight, bias, activation, backend)
    if backend not in (None, "eager"):
        raise InputError(
            "linear_act",
            "plain strided tensors outside torch.func transforms and forward-mode "
            "differentiation with a forced backend",
            f"x of type {type(x).__name__}, backend={backend!r}",
            "Leave backend out; such calls take PyTorch's own path.",
        )
    return reference.linear_act(x, weight, bias, activation)


def _compiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """The call as torch.compile sees it: one registered op."""
    if calls.unlike_plain((x, weight) if bias is None else (x, weight, bias)):
        return _unusual(x, weight, bias, activation, backend)
    autocast = calls.autocast_dtype(x)
    if autocast is not None:
        x, weight, bias = _cast(x, weight, bias, autocast)
    validate(x, weight, bias, activation, backend)
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    y: Tensor
    if grad:
        y = torch.ops.fastlinear.linear_act(x, weight, bias, activation, grad, backend or "")[0]
        return y
    turned = lies_turned(weight)
    y = torch.ops.fastlinear.linear_act_inference(
        x, weight.t() if turned else weight, bias, turned, activation, backend or ""
    )
    return y
