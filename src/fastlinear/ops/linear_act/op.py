"""The public function linear_act: validation, selection, and one autograd formula.

Hot path: a tuple of facts about the call looks up a ready plan; validation and selection run only
when such a call is seen for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core.errors import InputError
from fastlinear.core.precision import float32_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.dispatch.select import Choice
from fastlinear.ops.common import calls
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.autocast import cast as cast_once
from fastlinear.ops.common.calls import is_captured
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.autograd import Formula, LinearAct, backward_of
from fastlinear.ops.linear_act.backends import STEP
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
    a given backend and shape. Differentiable, to any order.

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
    if (
        type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or (bias is not None and type(bias) not in _PLAIN)
        or _transforms_active()
    ):
        return _unusual(x, weight, bias, activation, backend)
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
        plan = _plans.get(key)
    except TypeError:  # an activation or backend that cannot be hashed: validation names it
        plan = None
    if plan is None:
        plan = _resolve(key, x, weight, bias, activation, backend, grad, autocast)
    return plan(x, weight, bias)


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

Plan = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_plans: dict[Any, Plan] = {}
cache.on_change(_plans.clear)


def _resolve(
    key: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
    grad: bool,
    autocast: torch.dtype | None,
) -> Plan:
    if autocast is not None:
        x, weight, bias = _cast(x, weight, bias, autocast)
    validate(x, weight, bias, activation, backend)
    if x.device.type not in ("cpu", "cuda") or not _strided(x, weight):
        plan = _native(activation)
    else:
        chosen = choices(x, weight, bias, activation, backend, grad, is_captured(x))
        names = {c.backend.name for c in chosen if c.problem.piece != STEP}
        empty = x.numel() == 0 or weight.numel() == 0
        # A cast weight is a new tensor at every call, so a packed copy of it would be as well.
        repacked = autocast is not None and any(name.endswith("_packed") for name in names)
        if empty or names == {"eager"} or (repacked and backend is None):
            plan = _native(activation)
        else:
            plan = _chosen_plan(chosen, activation, backend, grad, autocast)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _native(activation: str) -> Plan:
    value = torch.relu if activation == "relu" else activation_of(activation).value
    linear = torch.nn.functional.linear
    if activation == "none":
        return linear
    return lambda x, weight, bias: value(linear(x, weight, bias))


def _chosen_plan(
    chosen: tuple[Choice, ...],
    activation: str,
    backend: str | None,
    grad: bool,
    autocast: torch.dtype | None,
) -> Plan:
    inner = training_plan(chosen, activation) if grad else _inference(chosen, activation)

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _forward_ad._current_level >= 0 or not _strided(x, weight):
            return _unusual(x, weight, bias, activation, backend)
        if calls.recorded():
            return reference.linear_act(x, weight, bias, activation)
        if x.is_neg() or weight.is_neg():  # a lazy sign: kernels read memory as it lies
            x, weight = x.resolve_neg(), weight.resolve_neg()
        if autocast is not None:
            x, weight = cast_once(x, autocast), cast_once(weight, autocast)
            bias = None if bias is None else cast_once(bias, autocast)
        if bias is not None and (bias.is_neg() or not bias.is_contiguous()):
            bias = bias.resolve_neg().contiguous()
        return inner(x, weight, bias)

    return plan


def _inference(chosen: tuple[Choice, ...], activation: str) -> Plan:
    run = chosen[0].backend.load()

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2:
            y: Tensor = run(x, weight, bias, activation, False)[0]
            return y
        y = run(x.reshape(-1, x.shape[-1]), weight, bias, activation, False)[0]
        return y.view(*x.shape[:-1], weight.shape[0])

    return plan


def training_plan(chosen: tuple[Choice, ...], activation: str) -> Plan:
    """``LinearAct`` over the backends chosen for the pieces; for plain tensors on the hot path."""
    run = chosen[0].backend.load()
    formula = Formula(activation, activation_of(activation).saved, run, backward_of(chosen))
    apply = LinearAct.apply

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = apply(x, weight, bias, formula)
        return y

    return plan


# --------------------------------------------------------------------------------------------
# Calls off the hot path


def _strided(x: Tensor, weight: Tensor) -> bool:
    return x.layout is torch.strided and weight.layout is torch.strided


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
            expected="plain strided tensors outside torch.func transforms and forward-mode "
            "differentiation with a forced backend",
            received=f"x of type {type(x).__name__}, backend={backend!r}",
            remedy="Leave backend out; such calls take PyTorch's own path.",
        )
    return reference.linear_act(x, weight, bias, activation)


def _compiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """The call as torch.compile sees it: one registered op."""
    if (
        type(x) not in _PLAIN
        or type(weight) not in _PLAIN
        or (bias is not None and type(bias) not in _PLAIN)
        or _transforms_active()
    ):
        return _unusual(x, weight, bias, activation, backend)
    autocast = calls.autocast_dtype(x)
    if autocast is not None:
        x, weight, bias = _cast(x, weight, bias, autocast)
    validate(x, weight, bias, activation, backend)
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    y: Tensor = torch.ops.fastlinear.linear_act(x, weight, bias, activation, grad, backend or "")[0]
    return y
