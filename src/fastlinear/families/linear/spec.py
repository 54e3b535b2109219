"""The ``OpSpec`` of linear_act, and its front end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.core.precision import matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.select import Choice, select
from fastlinear.families.linear import reference, selection
from fastlinear.families.linear.autograd import (
    Backward,
    Formula,
    applied,
    backward_from,
    backward_of,
)
from fastlinear.families.linear.problem import BACKWARD_PIECES, NAME, STEP
from fastlinear.families.linear.validation import validate
from fastlinear.fastpath import autograd_node, lookup, recorded
from fastlinear.op import library
from fastlinear.op.front import Front, choices
from fastlinear.op.spec import Arguments, OpSpec, Plan, Resolved, inferring
from fastlinear.op.step import Step
from fastlinear.op.timing import Timed

_linear = torch.nn.functional.linear
# The functions behind torch.nn.functional, without the Python around them.
_ACTS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...] | None, Any]] = {
    "relu": (torch.relu, None, None),
    "silu": (torch._C._nn.silu, None, None),
    "gelu": (torch._C._nn.gelu, None, None),
    "gelu_tanh": (torch._C._nn.gelu, ("approximate",), "tanh"),
    "leaky_relu": (torch._C._nn.leaky_relu, None, None),
}


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, _: Any = None
) -> Tensor:
    return reference.linear_act(x, weight, bias, activation)


def _problem(arguments: Arguments, grad: bool) -> Problem:
    x, weight, bias, activation, _ = arguments
    return selection.problem_of(x, weight, bias, activation, grad, calls.is_captured(x))


def _choices(p: Problem, backend: str | None, _: Arguments) -> tuple[Choice, ...]:
    return selection.choices_of(p, backend)


def _resolve(arguments: Arguments, grad: bool, autocast: bool) -> Resolved:
    x, weight, _, activation, _ = arguments
    if x.device.type not in ("cpu", "cuda"):
        return Resolved(_own(activation), by_torch=True)
    chosen = choices(SPEC, arguments, grad)
    names = {c.backend.name for c in chosen if c.problem.piece != STEP}
    captured = calls.is_captured(x)
    empty = x.numel() == 0 or weight.numel() == 0
    if empty or names == {"eager"}:
        step = any(c.problem.piece == STEP and c.backend.name == "pieces" for c in chosen)
        plain = grad and step and not (empty or captured or autocast)
        # PyTorch's nodes cost less than one in Python, and more than one in C++
        if not (plain and lookup.table(NAME) is not None and autograd_node.begun()):
            own, in_table = _own(activation), _own_in_table(activation)
            if grad or empty or x.is_cuda:
                return Resolved(own, in_table, by_torch=True)
            return inferring(own, x, in_table, by_torch=True)
    if grad:
        return _train(arguments, chosen)
    return inferring(_inference(chosen[0].load(), activation), x)


def _train(arguments: Arguments, chosen: tuple[Choice, ...]) -> Resolved:
    x, _, _, activation, _ = arguments
    run = chosen[0].load()
    formula = Formula(activation, activation_of(activation).saved, run, backward_of(chosen))
    plan = _training(formula)
    if calls.is_captured(x):
        return Resolved(plan, plan)
    return Resolved(plan, plan, partial(recorded.node, formula))


def _own(activation: str) -> Plan:
    """PyTorch's own ops."""
    if activation == "none":
        return _linear
    value = torch.relu if activation == "relu" else activation_of(activation).value
    return lambda x, weight, bias: value(_linear(x, weight, bias))


def _own_in_table(activation: str) -> Any:
    if activation == "none":
        return _linear
    act, names, value = _ACTS.get(activation, (activation_of(activation).value, None, None))
    return ("layer", _linear, act, names, value)


def _inference(run: Callable[..., Any], activation: str) -> Plan:
    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.contiguous()
        if x.dim() == 2:
            y: Tensor = run(x, weight, bias, activation, False)[0]
            return y
        y = run(x.reshape(-1, x.shape[-1]), weight, bias, activation, False)[0]
        return calls.as_result(y, (*x.shape[:-1], weight.shape[0]))

    return plan


def _training(formula: Formula) -> Plan:
    apply = applied(formula)

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return apply(x, weight, None if bias is None else bias.contiguous())

    return plan


def _compiled(arguments: Arguments, grad: bool) -> Tensor:
    x, weight, bias, activation, backend = arguments
    y: Tensor
    if grad:
        y = library.call(NAME, x, weight, bias, activation, grad, backend or "")[0]
        return y
    turned = calls.lies_turned(weight)
    weight = weight.t() if turned else weight
    y = library.call(f"{NAME}_inference", x, weight, bias, turned, activation, backend or "")
    return y


SPEC = OpSpec(
    name=NAME,
    operands=("x", "weight", "bias"),
    options=("activation", "backend"),
    validate=validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    compiled=_compiled,
    choices=_choices,
    pieces=selection.select_pieces,
    torch_casts=True,
)
FRONT = Front(SPEC)
STEPS = Step(FRONT)
eager, pieces = STEPS.eager, STEPS.pieces
timed = Timed(FRONT, lambda inputs, backend: (*inputs[:4], backend))

# --------------------------------------------------------------------------------------------
# The whole backward as made of its pieces

_backwards: dict[Any, Backward] = {}
cache.on_change(_backwards.clear)


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db) by the backends chosen for the pieces of the backward, one after the other."""
    captured = calls.is_captured(x)
    layouts = (x.shape, weight.shape, x.dtype, x.device, x.stride(), weight.stride())
    key = (*layouts, activation, captured, needs[2], matmul_precision(x.dtype))
    run = _backwards.get(key)
    if run is None:
        bias = weight.new_empty(weight.shape[0]) if needs[2] else None
        p = selection.problem_of(x, weight, bias, activation, True, captured)
        chosen = (select(p.with_piece(piece)) for piece in BACKWARD_PIECES)
        run = _backwards[key] = backward_from(*(c.load() for c in chosen))
    return run(dy, saved, x, weight, activation, needs)
