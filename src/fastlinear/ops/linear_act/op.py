"""The public function linear_act: validation, selection, and one autograd formula.

Hot path: a tuple of facts about the call looks up a ready plan; validation and selection run only
when such a call is seen for the first time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad
from torch.overrides import handle_torch_function, has_torch_function

from fastlinear.core.errors import InputError
from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.dispatch import cache
from fastlinear.dispatch.explain import Explanation
from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import backends, reference
from fastlinear.ops.linear_act.autograd import Formula, LinearAct, backward_of

_MAX_PLANS = 4096
_LAUNCH_BOUND = (
    "the step takes less time on the device than its launches take on the host, where PyTorch's "
    "own autograd is cheapest; inside a CUDA graph, force a backend"
)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_FLOAT32 = torch.float32
_is_compiling = torch.compiler.is_compiling
_grad_enabled = torch.is_grad_enabled
_matmul_precision = torch.get_float32_matmul_precision
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
    autocast = _autocast_dtype(x) if _any_autocast() else None
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
        _matmul_precision() if dtype is _FLOAT32 else None,
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
    validate(x, weight, bias, activation)
    if needs_grad is None:
        needs_grad = torch.is_grad_enabled() and any(
            t is not None and t.requires_grad for t in (x, weight, bias)
        )
    return Explanation(choices(x, weight, bias, activation, backend, needs_grad))


def choices(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for each piece of the backward."""
    p = problem_of(x, weight, bias, activation, needs_grad)
    if not needs_grad:
        return (select(p, backend),)
    problems = [p, *(p.with_piece(piece) for piece in backends.BACKWARD_PIECES)]
    if p.device == "cuda" and backend is None and backends.launch_bound(p):
        return tuple(
            replace(select(q, "eager"), source="launch_bound", reason=_LAUNCH_BOUND)
            for q in problems
        )
    return (select(p, backend), *(select(q) for q in problems[1:]))


def problem_of(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, needs_grad: bool
) -> Any:
    """The forward Problem of a call."""
    n, k = weight.shape
    m = x.shape[:-1].numel()
    rows = x.detach().reshape(m, k) if x.numel() else x.new_empty(m, k)
    if rows.stride(1) != 1 and k != 1:
        x_layout = "strided"
    elif rows.stride(0) in (k, 1) or rows.stride(0) * x.itemsize % 16 == 0:
        x_layout = "rows"
    else:
        x_layout = "rows_odd"
    if weight.is_contiguous():
        w_layout = "nk"
    elif weight.t().is_contiguous():
        w_layout = "kn"
    else:
        w_layout = "strided"
    return backends.problem(
        "forward",
        m,
        k,
        n,
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        bias=bias is not None,
        needs_grad=needs_grad,
        x_layout=x_layout,
        w_layout=w_layout,
        precision=matmul_precision(x.dtype),
    )


def validate(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None = None,
) -> None:
    """Raise InputError unless the arguments fit each other."""
    activation_of(activation, "linear_act")
    if backend is not None and not isinstance(backend, str):
        raise InputError(
            "linear_act",
            expected="backend to be a name or None",
            received=repr(backend),
            remedy="Leave backend out to let fastlinear choose.",
        )
    for name, value in (("x", x), ("weight", weight), ("bias", bias)):
        if not isinstance(value, torch.Tensor) and not (name == "bias" and value is None):
            raise InputError(
                "linear_act",
                expected=f"{name} to be a tensor",
                received=type(value).__name__,
                remedy="Convert it, for example with torch.as_tensor.",
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
                "linear_act",
                expected=f"bias of shape ({n},) for weight (N={n}, K={k})",
                received=f"shape {tuple(bias.shape)}",
                remedy="Give one number per output feature, or None.",
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
    autocast: torch.dtype | None,
) -> Plan:
    if autocast is not None:
        x, weight, bias = _cast(x, weight, bias, autocast)
    validate(x, weight, bias, activation, backend)
    if x.device.type not in ("cpu", "cuda") or not _strided(x, weight):
        plan = _native(activation)
    else:
        chosen = choices(x, weight, bias, activation, backend, grad)
        names = {c.backend.name for c in chosen}
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
    run = chosen[0].backend.load()
    inner = _training(run, chosen[1:], activation) if grad else _inference(run, activation)

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _forward_ad._current_level >= 0 or not _strided(x, weight):
            return _unusual(x, weight, bias, activation, backend)
        if autocast is not None:
            x, weight, bias = _cast(x, weight, bias, autocast)
        if bias is not None and not bias.is_contiguous():
            bias = bias.contiguous()
        return inner(x, weight, bias)

    return plan


def _inference(run: Callable[..., Any], activation: str) -> Plan:
    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() == 2:
            y: Tensor = run(x, weight, bias, activation, False)[0]
            return y
        y = run(x.reshape(-1, x.shape[-1]), weight, bias, activation, False)[0]
        return y.view(*x.shape[:-1], weight.shape[0])

    return plan


def _training(run: Callable[..., Any], chosen: tuple[Choice, ...], activation: str) -> Plan:
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


def _autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype autocast gives this call, None where it leaves the call alone."""
    device = x.device.type
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


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
    if not isinstance(x, Tensor) or _autocast_dtype(x) is None:
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
    autocast = _autocast_dtype(x)
    if autocast is not None:
        x, weight, bias = _cast(x, weight, bias, autocast)
    validate(x, weight, bias, activation, backend)
    grad = torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    )
    y: Tensor = torch.ops.fastlinear.linear_act(x, weight, bias, activation, grad, backend or "")[0]
    return y
