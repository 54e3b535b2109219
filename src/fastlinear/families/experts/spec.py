"""The ``OpSpec`` of experts, and its front end.

A call is (x, (gate_up, down), (topk_index, topk_weight, gate_up_bias, down_bias), activation,
order, numbers of the gate, first expert, recompute, backend); numbers are strings.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.autocast import cast
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.core.wrappers import without_values
from fastlinear.dispatch.select import Choice
from fastlinear.families.experts import reference
from fastlinear.families.experts.formula import Experts, Formula
from fastlinear.families.experts.gate import gate_of
from fastlinear.families.experts.problem import NAME, problem_of
from fastlinear.families.experts.routed import Routing, Way, Weights
from fastlinear.families.experts.validation import validate
from fastlinear.fastpath import recorded
from fastlinear.op import library
from fastlinear.op.front import Front, choices, needs_grad
from fastlinear.op.spec import Arguments, Called, OpSpec, Resolved, inferring, leaves
from fastlinear.op.step import choose_whole, trained
from fastlinear.op.timing import Timed


def _reference(
    x: Tensor,
    weights: Weights,
    routing: Routing,
    activation: str,
    order: str,
    numbers: str,
    first: str,
    recompute: bool,
    _: Any = None,
) -> Tensor:
    if any(without_values(t) for t in (x, routing[0])):  # the registered op says the shape
        options = activation, order, numbers, first, recompute
        grad = needs_grad((x, weights, routing))
        y: Tensor = library.call(NAME, x, *weights, *routing, *options, grad, "")[0]
        return y
    gate = gate_of(activation, order, numbers)
    return reference.experts(x, weights, routing, gate, int(first))


def _problem(arguments: Arguments, grad: bool) -> Problem:
    x, weights, routing, activation, order, numbers, _, recompute, _ = arguments
    clamped = not numbers.startswith("inf")
    return problem_of(x, weights, routing, activation, order, clamped, recompute, grad)


def formula_of(arguments: Arguments, backend: str) -> Formula:
    """The formula of a call by a backend that sorts slots."""
    activation, order, numbers, first, recompute = arguments[3:8]
    return Formula(Way(gate_of(activation, order, numbers), int(first), backend), recompute)


def _own(arguments: Arguments) -> Resolved:
    def plan(x: Tensor, weights: Weights, routing: Routing) -> Tensor:
        return _reference(x, weights, routing, *arguments[3:8])

    return Resolved(plan, plan, by_torch=True)


def _resolve(arguments: Arguments, grad: bool, _: bool) -> Resolved:
    x = arguments[0]
    empty = not all(t.numel() for t in leaves(arguments) if t is not None)
    if x.device.type not in ("cpu", "cuda") or (empty and arguments[-1] is None):
        return _own(arguments)
    chosen = choices(SPEC, arguments, grad)  # one that cannot serve is refused of empty tensors too
    if empty or chosen[0].backend.name == "eager":
        return _own(arguments)
    if grad:
        return _train(arguments, chosen)
    return inferring(formula_of(arguments, chosen[0].backend.name).inference, x)


def _train(arguments: Arguments, chosen: tuple[Choice, ...]) -> Resolved:
    formula = formula_of(arguments, chosen[0].backend.name)
    plan = partial(_applied, formula)
    return Resolved(plan, plan, partial(recorded.node, formula))


def _applied(formula: Formula, x: Tensor, weights: Weights, routing: Routing) -> Tensor:
    y: Tensor = Experts.apply(x, *weights, *routing, formula)
    return y


def _cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    """All but the routing: its weights stay as exact as the router has them."""
    x, weights, (index, weight, *biases), *options = arguments
    if weight.dtype not in (dtype, torch.float32, torch.float64):
        weight = weight.float()  # the other of 16 bits
    return (
        cast(x, dtype),
        tuple(cast(w, dtype) for w in weights),
        (index, weight, *(None if b is None else cast(b, dtype) for b in biases)),
        *options,
    )


def _public(arguments: Arguments) -> Called:
    x, weights, (index, weight, *biases), activation, order, numbers, first, recompute, backend = (
        arguments
    )
    limit, alpha, offset = map(float, numbers.split())
    options = {
        "activation": activation,
        "stacked": order,
        "limit": None if limit == float("inf") else limit,
        "alpha": alpha,
        "up_offset": offset,
        "first_expert": int(first),
        "recompute": int(recompute),
        "backend": backend,
    }
    return NAME, (x, index, weight, *weights, *biases), options


SPEC = OpSpec(
    name=NAME,
    operands=(
        "x",
        ("gate_up", "down"),
        ("topk_index", "topk_weight", "gate_up_bias", "down_bias"),
    ),
    options=("activation", "order", "numbers", "first", "recompute", "backend"),
    validate=validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    public=_public,
    cast=_cast,
    choices=choose_whole,
)
FRONT = Front(SPEC)
timed = Timed(FRONT, lambda inputs, backend: (*inputs[:8], backend), whole=True)

# --------------------------------------------------------------------------------------------
# The backends of the family's record


def _by(backend: str, x: Tensor, weights: Weights, routing: Routing, *options: Any) -> Tensor:
    formula = formula_of((x, weights, routing, *options), backend)
    if needs_grad((x, weights, routing)):
        return _applied(formula, x, weights, routing)
    return formula.inference(x, weights, routing)


eager_forward, triton_forward, cpp_forward = _reference, partial(_by, "triton"), partial(_by, "cpp")
batch_invariant_forward = partial(_by, BATCH_INVARIANT)
eager_step, triton_step, cpp_step, batch_invariant_step = (
    partial(trained, by)
    for by in (eager_forward, triton_forward, cpp_forward, batch_invariant_forward)
)
