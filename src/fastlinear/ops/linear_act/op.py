"""The public function linear_act: validation, selection, and one autograd formula.

Hot path: a tuple of facts about the call looks up a ready plan; validation and selection run only
when such a call is seen for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import backends, reference

_MAX_PLANS = 4096
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_is_compiling = torch.compiler.is_compiling
_any_autocast = torch._C._is_any_autocast_enabled
_transforms_active = torch._C._are_functorch_transforms_active


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
    if _is_compiling():
        return _compiled(x, weight, bias, activation, backend)
    if type(x) not in _PLAIN or type(weight) not in _PLAIN or _transforms_active():
        return _unusual(x, weight, bias, activation, backend)
    if _any_autocast() and torch.is_autocast_enabled(x.device.type):
        x, weight, bias = _autocast(x, weight, bias)
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    key = (
        x.shape,
        weight.shape,
        x.dtype,
        weight.dtype,
        x.device,
        weight.device,
        None if x.is_contiguous() else x.stride(),
        None if weight.is_contiguous() else weight.stride(),
        None if bias is None else (bias.shape, bias.dtype, bias.device),
        activation,
        backend,
        grad,
        torch.get_float32_matmul_precision(),
    )
    plan = _plans.get(key)
    if plan is None:
        plan = _resolve(key, x, weight, bias, activation, backend, grad)
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
    validate(x, weight, bias, activation)
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return Explanation(choices(x, weight, bias, activation, backend, needs_grad))


def choices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for the backward and its pieces."""
    p = problem_of(x, weight, bias, activation, needs_grad)
    chosen = [select(p, backend)]
    if needs_grad:
        whole = select(p.with_piece("backward"))
        chosen.append(whole)
        if whole.backend.name == "eager":
            chosen += [select(p.with_piece(s)) for s in ("grad_pre", "grad_input", "grad_weight")]
    return tuple(chosen)


def problem_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, needs_grad: bool
) -> Any:
    """The forward Problem of a call."""
    n, k = weight.shape
    rows = x.detach().reshape(-1, k)
    unit_stride = rows.stride(1) == 1 or k == 1
    if weight.is_contiguous():
        w_layout = "nk"
    elif weight.t().is_contiguous():
        w_layout = "kn"
    else:
        w_layout = "strided"
    return backends.problem(
        "forward",
        rows.shape[0],
        k,
        n,
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        bias=bias is not None,
        needs_grad=needs_grad,
        x_layout="rows" if unit_stride else "strided",
        w_layout=w_layout,
        precision=matmul_precision(x.dtype),
    )


def validate(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> None:
    """Raise InputError unless the arguments fit each other."""
    activation_of(activation, "linear_act")
    for name, value in (("x", x), ("weight", weight)):
        if not isinstance(value, torch.Tensor):
            raise InputError(
                "linear_act", expected=f"{name} to be a tensor", received=type(value).__name__
            )
    if weight.dim() != 2:
        raise InputError(
            "linear_act",
            expected="weight of shape (N, K)",
            received=f"shape {tuple(weight.shape)}",
            remedy="For one weight per group use grouped linears.",
        )
    n, k = weight.shape
    if x.dim() == 0 or x.shape[-1] != k:
        transposed = (
            " The weight looks transposed: pass weight.t()." if x.shape[-1:] == (n,) else ""
        )
        raise InputError(
            "linear_act",
            expected=f"x of shape (..., {k}) for weight (N={n}, K={k})",
            received=f"shape {tuple(x.shape)}",
            remedy=f"Make x's last dimension equal weight's second.{transposed}",
        )
    others = [("weight", weight)]
    if bias is not None:
        if bias.shape != (n,):
            raise InputError(
                "linear_act", expected=f"bias of shape ({n},)", received=f"{tuple(bias.shape)}"
            )
        others.append(("bias", bias))
    if x.dtype not in DTYPE_NAMES:
        raise InputError(
            "linear_act",
            expected=f"a dtype in {', '.join(DTYPE_NAMES.values())}",
            received=str(x.dtype),
            remedy="Convert the input, for example x.float().",
        )
    for name, value in others:
        if value.dtype != x.dtype:
            raise InputError(
                "linear_act",
                expected=f"{name} of x's dtype {x.dtype}",
                received=str(value.dtype),
                remedy="Convert one of them, or use torch.autocast.",
            )
        if value.device != x.device:
            raise InputError(
                "linear_act",
                expected=f"{name} on x's device {x.device}",
                received=str(value.device),
                remedy=f"Move it: {name}.to({str(x.device)!r}).",
            )


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
) -> Plan:
    validate(x, weight, bias, activation)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    if x.numel() == 0 or weight.numel() == 0 or x.device.type not in ("cpu", "cuda"):
        plan = _native(activation)
    else:
        chosen = choices(x, weight, bias, activation, backend, grad)
        if all(c.backend.name == "eager" for c in chosen):
            plan = _native(activation)
        elif grad:
            plan = _training_plan(chosen, activation)
        else:
            plan = _inference_plan(chosen[0], activation)
    _plans[key] = plan
    return plan


def _native(activation: str) -> Plan:
    value = activation_of(activation).value
    linear = torch.nn.functional.linear
    return lambda x, weight, bias: value(linear(x, weight, bias))


def _inference_plan(choice: Choice, activation: str) -> Plan:
    run = choice.backend.load()

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2:
            y: Tensor = run(x, weight, bias, activation, False)[0]
            return y
        y = run(x.reshape(-1, x.shape[-1]), weight, bias, activation, False)[0]
        return y.view(*x.shape[:-1], weight.shape[0])

    return plan


def _training_plan(chosen: tuple[Choice, ...], activation: str) -> Plan:
    run = chosen[0].backend.load()
    backward = _backward_of(chosen[1:])
    saved = activation_of(activation).saved

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = _LinearAct.apply(x, weight, bias, activation, saved, run, backward)
        return y

    return plan


def _backward_of(chosen: tuple[Choice, ...]) -> Callable[..., Any]:
    """One callable for the whole backward: a fused backend, or the pieces chosen one by one."""
    by_piece = {c.problem.piece: c.backend for c in chosen}
    if by_piece["backward"].name != "eager":
        return by_piece["backward"].load()
    grad_pre = by_piece["grad_pre"].load()
    grad_input = by_piece["grad_input"].load()
    grad_weight = by_piece["grad_weight"].load()

    def pieces(
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: tuple[bool, bool, bool],
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        dpre, db = grad_pre(dy, saved, activation, needs[2])
        dx = grad_input(dpre, weight) if needs[0] else None
        dw = grad_weight(dpre, x) if needs[1] else None
        return dx, dw, db

    return pieces


class _LinearAct(torch.autograd.Function):
    """The one autograd formula of the family; backends sit below it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        saved_kind: str,
        run: Callable[..., Any],
        backward: Callable[..., Any],
    ) -> Tensor:
        x2 = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        y, pre = run(x2, weight, bias, activation, saved_kind == "pre")
        y = y if x.dim() == 2 else y.view(*x.shape[:-1], weight.shape[0])
        saved = pre if saved_kind == "pre" else y if saved_kind == "output" else None
        ctx.save_for_backward(x, weight, bias, saved)
        ctx.activation = activation
        ctx.run_backward = backward
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, bias, saved = ctx.saved_tensors
        needs = tuple(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # create_graph: the gradients must be differentiable
            grads = _differentiable_backward(dy, x, weight, bias, ctx.activation, needs)
        else:
            grads = _run_backward(dy, saved, x, weight, ctx.activation, needs, ctx.run_backward)
        return (*grads, None, None, None, None)


def _run_backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, ...],
    run: Callable[..., Any],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    n, k = weight.shape
    dy2 = dy.reshape(-1, n)
    if not dy2.is_contiguous():  # an expanded gradient, as sum() makes
        dy2 = dy2.contiguous()
    saved2 = None if saved is None else saved.reshape(-1, n)
    dx, dw, db = run(dy2, saved2, x.reshape(-1, k), weight, activation, needs)
    return (None if dx is None else dx.view(x.shape)), dw, db


def _differentiable_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    inputs = (x, weight, bias)
    wanted = [t for t, need in zip(inputs, needs, strict=True) if need and t is not None]
    with torch.enable_grad():
        y = reference.linear_act(x, weight, bias, activation)
        grads = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
    return tuple(
        next(grads) if need and t is not None else None
        for t, need in zip(inputs, needs, strict=True)
    )


# --------------------------------------------------------------------------------------------
# Calls off the hot path


def _autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast float32 and 16-bit tensors to the autocast dtype, as torch does for linear."""
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t

    return cast(x), cast(weight), None if bias is None else cast(bias)


def _unusual(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """Tensor subclasses, FX proxies and functorch transforms: plain torch ops carry them."""
    if has_torch_function((x, weight)) and not isinstance(x, torch.Tensor):
        y: Tensor = handle_torch_function(
            linear_act, (x, weight), x, weight, bias, activation=activation, backend=backend
        )
        return y
    validate(x, weight, bias, activation)
    if backend not in (None, "eager"):
        raise InputError(
            "linear_act",
            expected="plain tensors outside torch.func transforms with a forced backend",
            received=f"x of type {type(x).__name__}, backend={backend!r}",
            remedy="Leave backend out; such calls take PyTorch's own path.",
        )
    return reference.linear_act(x, weight, bias, activation)


def _compiled(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, backend: str | None
) -> Tensor:
    """The call as torch.compile sees it: one registered op."""
    validate(x, weight, bias, activation)
    if torch.is_autocast_enabled(x.device.type):
        x, weight, bias = _autocast(x, weight, bias)
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    save_pre = grad and activation_of(activation).saved == "pre"
    y: Tensor = torch.ops.fastlinear.linear_act(
        x, weight, bias, activation, save_pre, backend or ""
    )[0]
    return y
