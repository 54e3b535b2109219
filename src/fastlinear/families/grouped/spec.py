"""The ``OpSpec`` of grouped_linear, and its front end.

A call is (x, weight, bias, activation, layout, backend).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.core import calls
from fastlinear.core.errors import FastlinearError
from fastlinear.core.problem import Problem
from fastlinear.core.settings import asked
from fastlinear.core.tensor_kinds import carried
from fastlinear.dispatch.select import Choice
from fastlinear.families import linear as single
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference, selection
from fastlinear.families.grouped.autograd import Formula, GroupedLinear
from fastlinear.families.grouped.problem import NAME, STEP
from fastlinear.families.grouped.sign_mask import place_for
from fastlinear.families.grouped.validation import validate
from fastlinear.fastpath import recorded
from fastlinear.op.front import Front, choices
from fastlinear.op.spec import Arguments, OpSpec, Plan, Resolved, inferring
from fastlinear.op.step import Step

LAYOUT_OF = {"tokens": "... g k", "groups": "g ... k", "channels": "b g k ..."}
"""Order of memory → a layout of users in which tensors lie so."""


def _reference(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str, _: Any = None
) -> Tensor:
    return reference.grouped_linear(x, weight, bias, activation, layout)


def _problem(arguments: Arguments, grad: bool) -> Problem:
    x, weight, bias, activation, layout, _ = arguments
    order = layouts.order_of(layout, x.shape)
    return selection.problem_of(_rows(x, weight, layout), weight, bias, activation, order, grad)


def _rows(x: Tensor, weight: Tensor, layout: str) -> Tensor:
    """x as backends take it, (B, L, G, K)."""
    return layouts.blocks(x.detach(), layout, weight.shape[0], weight.shape[2])


def _resolve(arguments: Arguments, grad: bool, _: bool) -> Resolved:
    x, weight, _, activation, layout, backend = arguments
    own = partial(reference.grouped_linear, activation=activation, layout=layout)
    empty = not x.numel() * weight.numel()
    if x.device.type not in ("cpu", "cuda") or (empty and backend is None):
        return Resolved(own, own, by_torch=True)
    chosen = choices(SPEC, arguments, grad)  # one that cannot serve is refused of empty tensors too
    if empty:
        return Resolved(own, own, by_torch=True)
    if grad:
        names = {c.backend.name for c in chosen if c.problem.piece != STEP}
        return (
            Resolved(own, own, by_torch=True) if names == {"eager"} else _train(arguments, chosen)
        )
    return inferring(_inference(chosen[0].load(), activation, layout), x)


def _train(arguments: Arguments, chosen: tuple[Choice, ...]) -> Resolved:
    x, weight, _, activation, layout, _ = arguments
    run, backward = chosen[:2]
    order = chosen[0].problem.option("order")
    names = run.backend.name, backward.backend.name
    sign_mask = place_for(_rows(x, weight, layout), weight, activation, order, *names)
    formula = Formula(activation, layout, *names, run.load(), backward.load(), sign_mask)
    plan = _training(formula)
    record = None if calls.is_captured(x) else partial(recorded.node, formula)
    return Resolved(plan, plan, record)


def _inference(run: Callable[..., Any], activation: str, layout: str) -> Plan:
    """The forward's backend between the user's layout and the backends'."""

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        groups, _, k = weight.shape
        order = layouts.order_of(layout, x.shape)
        rows = layouts.blocks(x, layout, groups, k)
        y = run(rows, weight, bias, activation, False, order)[0]
        return layouts.result(y, layout, x.shape)

    return plan


def _training(formula: Formula) -> Plan:
    apply = GroupedLinear.apply
    return lambda x, weight, bias: apply(x, weight, bias, formula)


def _shared(arguments: Arguments) -> Tensor:
    """One input for all groups is one linear layer with G·N outputs."""
    x, weight, bias, activation, layout, backend = arguments
    cast = x, weight, bias
    if all(isinstance(t, Tensor) for t in (x, weight)) and isinstance(bias, Tensor | None):
        cast = calls.as_autocast(*cast)  # type: ignore[assignment]
    validate(*cast, activation, layout, backend)
    groups, n, _ = weight.shape
    flat = None if bias is None else bias.flatten()
    given = x, weight.flatten(0, 1), flat
    compiling = torch.compiler.is_compiling()
    if asked(backend) is None or compiling:
        y = single.linear_act(*given, activation=activation, backend=backend)
    else:
        try:
            y = single.linear_act(*given, activation=activation, backend=backend)
        except FastlinearError as error:  # the caller knows of no other function
            raise type(error)(NAME, *error.args[1:]) from error
    shaped = y.unflatten(-1, (groups, n))
    if not isinstance(y, Tensor) or calls.unlike_plain((y,)) or compiling:
        return shaped
    if y.requires_grad or calls.recorded():  # y may be kept: changes of the two count as one's
        return shaped
    return calls.as_result(shaped, shaped.shape)


def _redirect(arguments: Arguments) -> Tensor | None:
    if arguments[4] != layouts.SHARED:
        return None
    return carried(NAME, partial(_shared, arguments), **SPEC.named(arguments))


SPEC = OpSpec(
    name=NAME,
    operands=("x", "weight", "bias"),
    options=("activation", "layout", "backend"),
    validate=validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    redirect=_redirect,
)
FRONT = Front(SPEC)


def _as_call(inputs: tuple[Any, ...]) -> tuple[Arguments, Tensor]:
    x, weight, bias, activation, dy, order = inputs
    layout = LAYOUT_OF[order]
    return (_laid_out(x, order), weight, bias, activation, layout), _laid_out(dy, order)


def _laid_out(t: Tensor, order: str) -> Tensor:
    """t (B, L, G, features) as a user of ``LAYOUT_OF`` holds it."""
    axes = {"tokens": (0, 1, 2, 3), "groups": (2, 0, 1, 3), "channels": (0, 2, 3, 1)}
    return t.permute(axes[order])


STEPS = Step(FRONT, _as_call)
eager, pieces = STEPS.eager, STEPS.pieces
