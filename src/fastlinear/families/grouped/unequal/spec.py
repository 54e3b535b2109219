"""The ``OpSpec`` of unequal_linear, and its front end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from functools import partial
from typing import Any

from torch import Tensor

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT, asked
from fastlinear.core.tensor_kinds import unlike_strided
from fastlinear.dispatch.select import Choice
from fastlinear.families.grouped.unequal.autograd import Formula, Maybe, applied, loop
from fastlinear.families.grouped.unequal.layout import sizes_of
from fastlinear.families.grouped.unequal.problem import NAME, problem_of
from fastlinear.families.grouped.unequal.validation import fail, validate
from fastlinear.families.linear.spec import FRONT as LINEAR
from fastlinear.fastpath import autograd_node, recorded
from fastlinear.op.front import Front, choices, needs_grad
from fastlinear.op.spec import Arguments, OpSpec, Resolved
from fastlinear.op.step import choose_whole, trained
from fastlinear.op.timing import Timed

_Tensors = Sequence[Tensor]
_LISTS = "Give them in the order of the groups: [first, second, ...]."
_MOST_PLANS = 256  # each holds what a launch needs besides addresses


def _normal(arguments: Arguments) -> Arguments:
    xs, weights, biases, *options = arguments
    held = None if biases is None else tuple(sequence("biases", biases))
    return (tuple(sequence("xs", xs)), tuple(sequence("weights", weights)), held, *options)


def sequence(name: str, given: Any) -> Any:
    """The tensors of one argument, in a list or a tuple.

    Raises:
        InputError: they come in nothing that keeps an order, or in no container at all.
    """
    if type(given) is list or type(given) is tuple:
        return given
    single = isinstance(given, Tensor) and (unlike_strided(given) is not None or not given.dim())
    if single or isinstance(given, (str, Mapping, Set)) or not hasattr(given, "__iter__"):
        received = type(given).__name__
        if single:
            received = unlike_strided(given) or "a tensor of no dimensions"
        fail(f"{name} to be a list or tuple of tensors, one a group", received, _LISTS)
    return list(given)


def _reference(
    xs: _Tensors, weights: _Tensors, biases: Maybe | None, activation: str, _: Any = None
) -> list[Tensor]:
    return loop(xs, weights, biases, activation)


def _problem(arguments: Arguments, grad: bool) -> Problem:
    xs, weights, biases, activation, _ = arguments
    return problem_of(xs, weights, biases, activation, grad)


def _redirect(arguments: Arguments) -> list[Tensor] | None:
    """No groups at all have no first tensor to go by."""
    if not isinstance(arguments[0], list | tuple) or arguments[0]:
        return None
    validate(*_normal(arguments))
    return []


def _resolve(arguments: Arguments, grad: bool, _: bool) -> Resolved:
    xs, activation = arguments[0], arguments[3]
    own = partial(loop, activation=activation)
    if xs[0].device.type not in ("cpu", "cuda"):
        return Resolved(own, by_torch=True)
    chosen = choices(SPEC, arguments, grad)
    if chosen[0].backend.name == "eager":
        return Resolved(own, own, by_torch=True)
    if chosen[0].backend.name == BATCH_INVARIANT:
        by_layer = partial(_layers, activation=activation)
        return Resolved(by_layer, by_layer)
    if grad:
        return _train(arguments, chosen)
    formula = Formula(activation)

    def plan(xs: _Tensors, weights: _Tensors, biases: Maybe | None) -> list[Tensor]:
        return formula.inference(xs, weights, biases)[0]

    return Resolved(plan, plan, partial(_record, formula, False))


def _train(arguments: Arguments, _: tuple[Choice, ...]) -> Resolved:
    formula = Formula(arguments[3])
    plan = partial(applied, formula)
    return Resolved(plan, plan, partial(_record, formula, True))


def _record(
    formula: Formula, grad: bool, xs: _Tensors, weights: _Tensors, biases: Maybe | None
) -> Any:
    if any(t is not None and t.is_neg() for t in (*xs, *weights, *(biases or ()))):
        return None
    return recorded.lists(
        "UnequalLinearBackward",
        len(xs),
        (xs, weights, biases),
        formula.forward if grad else formula.inference,
        partial(formula.gradients, sizes=sizes_of(xs, weights)) if grad else None,
        autograd_node.KEPT[formula.keeps] if grad else autograd_node.NOTHING,
    )


def _layers(xs: _Tensors, weights: _Tensors, biases: Maybe | None, activation: str) -> list[Tensor]:
    """Each group a layer of its own, whose rows do not depend on each other."""
    given = (None,) * len(xs) if biases is None else biases
    return [
        LINEAR.call(x, w, b, activation, BATCH_INVARIANT)
        for x, w, b in zip(xs, weights, given, strict=True)
    ]


def _compiled(arguments: Arguments, _: bool) -> list[Tensor]:
    backend = asked(arguments[-1])
    if backend == BATCH_INVARIANT:
        return _layers(*arguments[:4])
    if backend not in (None, "eager"):
        raise UnsupportedError(
            NAME,
            f"a call that backend {backend!r} can serve",
            "one inside torch.compile, which makes its own kernels",
            "Leave backend out.",
        )
    return loop(*arguments[:4])


SPEC = OpSpec(
    name=NAME,
    operands=("xs", "weights", "biases"),
    options=("activation", "backend"),
    validate=validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    compiled=_compiled,
    normal=_normal,
    redirect=_redirect,
    choices=choose_whole,
    sequences=True,
    changing=True,
    most_plans=_MOST_PLANS,
)
FRONT = Front(SPEC)
timed = Timed(FRONT, lambda inputs, backend: (*inputs[:4], backend), whole=True)

# --------------------------------------------------------------------------------------------
# The backends of the family's record


def eager_forward(
    xs: _Tensors, weights: _Tensors, biases: Maybe | None, activation: str
) -> tuple[Tensor, ...]:
    """The y_g by one product of PyTorch a group."""
    return tuple(loop(xs, weights, biases, activation))


def together_forward(
    xs: _Tensors, weights: _Tensors, biases: Maybe | None, activation: str
) -> tuple[Tensor, ...]:
    """The y_g by the kernels of the device."""
    formula = Formula(activation)
    if needs_grad((xs, weights, biases)):
        return tuple(applied(formula, xs, weights, biases))
    return tuple(formula.inference(xs, weights, biases)[0])


def batch_invariant_forward(
    xs: _Tensors, weights: _Tensors, biases: Maybe | None, activation: str
) -> tuple[Tensor, ...]:
    """The y_g by one layer a group, whose rows do not depend on each other."""
    return tuple(_layers(xs, weights, biases, activation))


eager_step = partial(trained, eager_forward)
together_step = partial(trained, together_forward)
batch_invariant_step = partial(trained, batch_invariant_forward)
