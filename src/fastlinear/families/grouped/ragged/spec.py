"""The ``OpSpec`` of ragged_linear, and its front end."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.core.wrappers import without_values
from fastlinear.dispatch.select import Choice
from fastlinear.families.grouped.ragged import products
from fastlinear.families.grouped.ragged.formula import Formula, More, Ragged
from fastlinear.families.grouped.ragged.problem import NAME, problem_of
from fastlinear.families.grouped.ragged.validation import validate
from fastlinear.fastpath import recorded
from fastlinear.op import library
from fastlinear.op.front import Front, choices, needs_grad
from fastlinear.op.spec import Arguments, Called, OpSpec, Resolved, inferring
from fastlinear.op.step import choose_whole, trained
from fastlinear.op.timing import Timed


def _reference(x: Tensor, weight: Tensor, more: More, activation: str, _: Any = None) -> Tensor:
    sizes, bias = more
    if without_values(sizes):  # no loop can read them; the registered op says the shape
        grad = needs_grad((x, weight, bias))
        y: Tensor = library.call(NAME, x, weight, sizes, bias, activation, grad, "")[0]
        return y
    return products.loop(x, weight, sizes, bias, activation)


def _problem(arguments: Arguments, grad: bool) -> Problem:
    x, weight, (_, bias), activation, _ = arguments
    return problem_of(x, weight, bias, activation, grad)


def _resolve(arguments: Arguments, grad: bool, _: bool) -> Resolved:
    x, weight, _, activation, backend = arguments
    own, empty = partial(_reference, activation=activation), not x.numel() * weight.numel()
    if x.device.type not in ("cpu", "cuda") or (empty and backend is None):
        return Resolved(own, by_torch=True)
    chosen = choices(SPEC, arguments, grad)  # one that cannot serve is refused of empty tensors too
    if empty or chosen[0].backend.name == "eager":
        return Resolved(own, own, by_torch=True)
    if grad:
        return _train(arguments, chosen)
    formula = Formula(activation, chosen[0].backend.name)
    if formula.reads_sizes(x):
        return Resolved(formula.inference, formula.inference)
    return inferring(formula.inference, x)


def _train(arguments: Arguments, chosen: tuple[Choice, ...]) -> Resolved:
    formula = Formula(arguments[3], chosen[0].backend.name)
    plan = partial(_applied, formula)
    if formula.reads_sizes(arguments[0]):
        return Resolved(plan, plan)
    return Resolved(plan, plan, partial(recorded.node, formula))


def _applied(formula: Formula, x: Tensor, weight: Tensor, more: More) -> Tensor:
    y: Tensor = Ragged.apply(x, weight, *more, formula)
    return y


def _public(arguments: Arguments) -> Called:
    x, weight, (sizes, bias), activation, backend = arguments
    return NAME, (x, weight, sizes, bias), {"activation": activation, "backend": backend}


SPEC = OpSpec(
    name=NAME,
    operands=("x", "weight", ("group_sizes", "bias")),
    options=("activation", "backend"),
    validate=validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    public=_public,
    choices=choose_whole,
)
FRONT = Front(SPEC)
timed = Timed(FRONT, lambda inputs, backend: (*inputs[:4], backend), whole=True)

# --------------------------------------------------------------------------------------------
# The backends of the family's record


def _by(backend: str, x: Tensor, weight: Tensor, more: More, activation: str) -> Tensor:
    formula = Formula(activation, backend)
    if needs_grad((x, weight, more)):
        return _applied(formula, x, weight, more)
    return formula.inference(x, weight, more)


eager_forward, triton_forward, cpp_forward = _reference, partial(_by, "triton"), partial(_by, "cpp")
planes_forward, cuda_forward = partial(_by, "planes"), partial(_by, "cuda")
batch_invariant_forward = partial(_by, BATCH_INVARIANT)
eager_step, triton_step, cpp_step = (
    partial(trained, by) for by in (eager_forward, triton_forward, cpp_forward)
)
planes_step, cuda_step, batch_invariant_step = (
    partial(trained, by) for by in (planes_forward, cuda_forward, batch_invariant_forward)
)
