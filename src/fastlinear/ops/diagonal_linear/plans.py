"""Plans of diagonal_linear: what to call for calls of one kind."""

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
from fastlinear.ops.diagonal_linear import reference
from fastlinear.ops.diagonal_linear.autograd import Formula, Rest, applied
from fastlinear.ops.diagonal_linear.problem import STEP
from fastlinear.ops.diagonal_linear.selection import choices

Plan = Callable[[Tensor, Tensor, Rest], Tensor]
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


@dataclass(frozen=True, slots=True)
class Resolved:
    """One plan.

    Attributes:
        plan: what the op's Python calls.
        in_door: what the compiled door runs where the tensors are as their memory lies and all are
            dense. None for none.
        launched: whether the door may be given the backend's one launch instead.
        run: the forward's backend, for calls with ``out``; None is PyTorch's own.
        training: what such calls are recorded by, where the door may record them itself.
        inference: the forward's backend by name, where the door may run it itself.
    """

    plan: Plan
    in_door: Plan | None
    launched: bool
    run: Callable[..., Tensor] | None
    training: Training | None = None
    inference: str | None = None


@dataclass(frozen=True, slots=True)
class Training:
    """The formula of a training call, and the names of the backends in it.

    Attributes:
        formula: what both ways through Python and C++ run.
        forward, backward: names of the backends.
    """

    formula: Formula
    forward: str
    backward: str


def training_of(chosen: tuple[Choice, ...], activation: str) -> Training:
    """The backends chosen for the pieces, with the formula over them."""
    forward, backward = chosen[0].backend, chosen[1].backend
    formula = Formula(activation, forward.load(), backward.load())
    return Training(formula, forward.name, backward.name)


def resolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    backend: str | None,
    grad: bool,
    autocast: torch.dtype | None,
    unusual: Callable[..., Tensor],
) -> Resolved:
    """What to call, and what the door runs for it.

    The tensors are as the backends get them; under autocast the plan casts what it is given.
    ``unusual`` takes the calls that a plan of ours cannot.
    """
    given = [t for t in (x, weight, bias, residual) if t is not None]
    own = _native(activation, bias is not None, residual is not None or reference.widens(x))
    if x.device.type not in ("cpu", "cuda") or any(t.layout is not torch.strided for t in given):
        return Resolved(own, None, False, None)
    captured = calls.is_captured(x)
    chosen = choices(x, bias, residual, activation, backend, grad, captured)
    names = {c.backend.name for c in chosen if c.problem.piece != STEP}
    if x.numel() == 0 or names == {"eager"}:
        plan = own if autocast is None else _guarded(own, activation, backend, autocast, unusual)
        return Resolved(plan, own if autocast is None else None, False, None)
    run = chosen[0].backend.load()
    training = training_of(chosen, activation) if grad else None
    inner = _inference(run, activation) if training is None else applied(training.formula)
    plan = _guarded(inner, activation, backend, autocast, unusual)
    if autocast is not None:
        return Resolved(plan, None, False, run)
    launched = names == {"triton"} and not grad and not captured
    own_way = None if captured else training
    name = None if captured or grad else chosen[0].backend.name
    return Resolved(plan, inner, launched, run, own_way, name)


def training_plan(chosen: tuple[Choice, ...], activation: str) -> Plan:
    """``DiagonalLinear`` over the backends chosen for forward and backward."""
    return applied(training_of(chosen, activation).formula)


def _native(activation: str, bias: bool, more: bool) -> Plan:
    """PyTorch's own ops, with as little around them as can be.

    ``more``: a residual, or float16 that computes in float32.
    """
    if more:
        return lambda x, weight, rest: reference.diagonal_linear(
            x, weight, rest[0], activation, rest[1]
        )
    if not bias and activation == "none":
        return _product
    if activation == "none":
        return _sum
    value = activation_of(activation).value
    pre = _sum if bias else _product
    return lambda x, weight, rest: value(pre(x, weight, rest))


def _sum(x: Tensor, weight: Tensor, rest: Any) -> Tensor:
    return x * weight + rest[0]


def _product(x: Tensor, weight: Tensor, _: Any) -> Tensor:
    return x * weight


def _inference(run: Callable[..., Tensor], activation: str) -> Plan:
    def plan(x: Tensor, weight: Tensor, rest: Rest) -> Tensor:
        bias, residual = rest
        if x.dim() == 2:
            return run(x, weight, bias, activation, residual, None)
        k = x.shape[-1]
        rows = None if residual is None else residual.reshape(-1, k)
        y = run(x.reshape(-1, k), weight, bias, activation, rows, None)
        return calls.as_result(y, x.shape)

    return plan


def _guarded(
    inner: Plan,
    activation: str,
    backend: str | None,
    autocast: torch.dtype | None,
    unusual: Callable[..., Tensor],
) -> Plan:
    """The plan with all that a call's facts do not say of its tensors."""

    def plan(x: Tensor, weight: Tensor, rest: Rest) -> Tensor:
        given = [t for t in (x, weight, *rest) if t is not None]
        wrapped = any(_is_wrapped(t) for t in given)
        if wrapped or _forward_ad._current_level >= 0:
            return unusual(x, weight, rest[0], activation, rest[1], backend)
        if calls.recorded():
            return reference.diagonal_linear(x, weight, rest[0], activation, rest[1])
        return inner(*prepared(x, weight, rest, autocast))

    return plan


def prepared(
    x: Tensor, weight: Tensor, rest: Rest, autocast: torch.dtype | None
) -> tuple[Tensor, Tensor, Rest]:
    """The tensors as kernels read them: cast for autocast, without lazy signs, parameters dense."""

    def one(t: Tensor, dense: bool) -> Tensor:
        if t.is_neg():
            t = t.resolve_neg()
        if autocast is not None:
            t = cast_once(t, autocast)
        return t.contiguous() if dense else t

    bias, residual = rest
    return (
        one(x, False),
        one(weight, True),
        (
            None if bias is None else one(bias, True),
            None if residual is None else one(residual, False),
        ),
    )


def as_memory_lies(*tensors: Tensor | None) -> bool:
    """Whether kernels may read these as they are: no lazy sign, no transform's wrapper."""
    return not any(t is not None and (t.is_neg() or _is_wrapped(t)) for t in tensors)
