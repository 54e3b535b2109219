"""Plans of linear_act: what to call for calls of one kind, and what the compiled door runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad as _forward_ad

from fastlinear.dispatch.select import Choice
from fastlinear.ops.common import calls
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.autocast import cast as cast_once
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.autograd import Formula, applied, backward_of
from fastlinear.ops.linear_act.problem import STEP
from fastlinear.ops.linear_act.selection import choices

Plan = Callable[[Tensor, Tensor, Tensor | None], Tensor]
_linear = torch.nn.functional.linear
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
# The functions behind torch.nn.functional, without the Python around them.
_ACTS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...] | None, Any]] = {
    "relu": (torch.relu, None, None),
    "silu": (torch._C._nn.silu, None, None),
    "gelu": (torch._C._nn.gelu, None, None),
    "gelu_tanh": (torch._C._nn.gelu, ("approximate",), "tanh"),
    "leaky_relu": (torch._C._nn.leaky_relu, None, None),
}


@dataclass(frozen=True, slots=True)
class Resolved:
    """One plan.

    Attributes:
        plan: what the op's Python calls.
        in_door: what the compiled door runs where the tensors are as their memory lies and bias is
            dense: the same without looking at them, or one of the door's tuples. None for no plan.
        kernel: the one backend of such calls, where it may be a launch that the door makes itself.
        training: what such calls are recorded by, where the door may record them itself.
    """

    plan: Plan
    in_door: Any
    kernel: str | None
    training: Training | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """The formula of a training call, and the names of the backends in it.

    Attributes:
        formula: what both ways through Python and C++ run.
        forward: the forward's backend.
        backward: piece → its backend; one entry where one backend computes all of it.
    """

    formula: Formula
    forward: str
    backward: dict[str, str]


def training_of(chosen: tuple[Choice, ...], activation: str) -> Training:
    """The backends chosen for the pieces, with the formula over them."""
    run = chosen[0].backend.load()
    formula = Formula(activation, activation_of(activation).saved, run, backward_of(chosen))
    names = {c.problem.piece: c.backend.name for c in chosen[1:] if c.problem.piece != STEP}
    return Training(formula, chosen[0].backend.name, names)


def resolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    backend: str | None,
    grad: bool,
    autocast: torch.dtype | None,
    nodes: bool,
    unusual: Callable[..., Tensor],
) -> Resolved:
    """What to call, and what the door runs for it.

    x, weight and bias are as the backends get them; under autocast the plan casts what it is given.
    ``nodes``: whether the door can record training calls. ``unusual`` takes the calls that a plan
    of ours cannot.
    """
    if x.device.type not in ("cpu", "cuda") or not _strided(x, weight):
        return Resolved(native(activation), None, None)
    captured = calls.is_captured(x)
    chosen = choices(x, weight, bias, activation, backend, grad, captured)
    names = {c.backend.name for c in chosen if c.problem.piece != STEP}
    empty = x.numel() == 0 or weight.numel() == 0
    if empty or names == {"eager"}:
        step = any(c.problem.piece == STEP and c.backend.name == "pieces" for c in chosen)
        plain = not empty and not captured and autocast is None
        if not (step and plain and nodes):
            # PyTorch's nodes cost less than one in Python, and more than one in C++
            return Resolved(native(activation), _native_in_door(activation), None)
    training = training_of(chosen, activation) if grad else None
    inner = _inference(chosen, activation) if training is None else applied(training.formula)
    plan = _guarded(inner, activation, backend, autocast, unusual)
    if autocast is not None:
        return Resolved(plan, plan, None)
    return Resolved(
        plan, inner, None if grad or captured else names.pop(), None if captured else training
    )


def native(activation: str) -> Plan:
    """PyTorch's own ops."""
    if activation == "none":
        return _linear
    value = torch.relu if activation == "relu" else activation_of(activation).value
    return lambda x, weight, bias: value(_linear(x, weight, bias))


def _native_in_door(activation: str) -> Any:
    if activation == "none":
        return _linear
    act, names, value = _ACTS.get(activation, (activation_of(activation).value, None, None))
    return ("layer", _linear, act, names, value)


def _guarded(
    inner: Plan,
    activation: str,
    backend: str | None,
    autocast: torch.dtype | None,
    unusual: Callable[..., Tensor],
) -> Plan:
    """The plan with all that a call's facts do not say of its tensors."""

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _forward_ad._current_level >= 0 or _wrapped(x, weight, bias) or not _strided(x, weight):
            return unusual(x, weight, bias, activation, backend)
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
        return calls.as_result(y, (*x.shape[:-1], weight.shape[0]))

    return plan


def _wrapped(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether a tensor is left over from a transform of torch.func that has ended."""
    return _is_wrapped(x) or _is_wrapped(weight) or (bias is not None and _is_wrapped(bias))


def as_memory_lies(*tensors: Tensor | None) -> bool:
    """Whether kernels may read these as they are: no lazy sign, no transform's wrapper."""
    return not any(t is not None and (t.is_neg() or _is_wrapped(t)) for t in tensors)


def _strided(x: Tensor, weight: Tensor) -> bool:
    return x.layout is torch.strided and weight.layout is torch.strided
