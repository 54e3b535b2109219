"""The ``OpSpec`` of gated_mlp and gated_linear, and their front end.

A call is (x, (gate, up, down weight), (gate, up, down bias), function, activation, order, level,
backend). ``level`` is ``recompute`` as a string.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.core import calls
from fastlinear.core.errors import InputError
from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice
from fastlinear.dispatch.steps import choices_of
from fastlinear.families.gated import reference, selection
from fastlinear.families.gated.autograd import Formula, GatedMLP, as_rows
from fastlinear.families.gated.problem import NAME
from fastlinear.families.gated.saved_memory import OWN, reads_kept, way_of
from fastlinear.families.gated.stacking import Biases, Weights
from fastlinear.families.gated.validation import KINDS, validate
from fastlinear.fastpath import recorded
from fastlinear.op import library
from fastlinear.op.front import Front, choices
from fastlinear.op.spec import Arguments, OpSpec, Plan, Resolved, inferring
from fastlinear.op.step import Step

_Three = tuple[Any, Any, Any]
_LEVELS = ("0", "1")


def level_of(recompute: int | None, function: str) -> str | None:
    """``recompute`` as an option of a call.

    Raises:
        InputError: it is not 0, 1 or None.
    """
    if recompute is None:
        return None
    if type(recompute) is int and 0 <= recompute < len(_LEVELS):  # True and 1.0 are equal to 1
        return _LEVELS[recompute]
    raise InputError(
        function,
        "recompute to be 0, 1 or None",
        repr(recompute),
        "0 keeps the pre-activations for the backward, 1 keeps x alone.",
    )


def recompute_of(level: str | None) -> int | None:
    """``recompute`` of a level."""
    return None if level is None else int(level)


def _validate(
    x: Tensor,
    weights: _Three,
    biases: _Three,
    function: str,
    activation: str,
    order: str,
    *rest: Any,
) -> None:
    validate(function, x, weights, biases, activation, order, rest[-1])


def _reference(
    x: Tensor, weights: _Three, biases: _Three, _: str, activation: str, order: str, *__: Any
) -> Tensor:
    return reference.gated_mlp(x, Weights(*weights), Biases(*biases), activation, order)


def _problem(arguments: Arguments, grad: bool) -> Problem:
    x, weights, biases, _, activation, order, level, _ = arguments
    rows = as_rows(x.detach())
    held = Weights(*weights), Biases(*biases)
    return selection.problem_of(rows, *held, activation, order, recompute_of(level), grad)


def _choices(p: Problem, backend: str | None, arguments: Arguments) -> tuple[Choice, ...]:
    return choices_of(p, backend, own_autograd=arguments[6] is None)


def has_kernels(x: Tensor, weights: _Three) -> bool:
    """Whether a backend may be asked: on a CPU or GPU, with numbers to compute."""
    empty = not x.numel() or any(w is not None and not w.numel() for w in weights)
    return x.device.type in ("cpu", "cuda") and not empty


def _resolve(arguments: Arguments, grad: bool, _: bool) -> Resolved:
    x, weights, _, _, activation, order, level, _ = arguments
    own = _own(activation, order)
    if not has_kernels(x, weights):
        if arguments[-1] is not None and x.device.type in ("cpu", "cuda"):
            choices(SPEC, arguments, grad)  # one that cannot serve is refused of empty tensors too
        return Resolved(own, own, by_torch=True)
    chosen = choices(SPEC, arguments, grad)
    if grad:
        backends = {c.problem.piece: c.backend.name for c in chosen}
        own_autograd = way_of(backends, recompute_of(level)) == OWN
        return Resolved(own, own, by_torch=True) if own_autograd else _train(arguments, chosen)
    return inferring(_inference(chosen[0].load(), activation, order), x)


def _train(arguments: Arguments, chosen: tuple[Choice, ...]) -> Resolved:
    x, _, _, _, activation, order, level, _ = arguments
    run, backward = chosen[:2]
    names = run.backend.name, backward.backend.name
    formula = Formula(activation, order, level != "1", run.load(), backward.load(), *names)
    plan = _training(formula)
    record = None if calls.is_captured(x) else partial(recorded.node, formula)
    return Resolved(plan, plan, record)


def _own(activation: str, order: str) -> Plan:
    """PyTorch's own ops."""
    return lambda x, weights, biases: reference.gated_mlp(
        x, Weights(*weights), Biases(*biases), activation, order
    )


def _inference(run: Callable[..., Any], activation: str, order: str) -> Plan:
    def plan(x: Tensor, weights: _Three, biases: _Three) -> Tensor:
        held = Weights(*weights), Biases(*biases)
        y: Tensor = run(as_rows(x), *held, activation, order, False)[0]
        return y if x.dim() == 2 else calls.as_result(y, (*x.shape[:-1], y.shape[-1]))

    return plan


def _training(formula: Formula) -> Plan:
    apply = GatedMLP.apply
    return lambda x, weights, biases: apply(x, *weights, *biases, formula)


def _compiled(arguments: Arguments, _: bool) -> Tensor:
    x, weights, biases, _, activation, order, level, backend = arguments
    needs = [t is not None and t.requires_grad for t in (x, *weights, *biases)]
    grad = torch.is_grad_enabled() and reads_kept(needs)
    options = activation, order, level == "1", grad, backend or ""
    y: Tensor = library.call(NAME, x, *weights, *biases, *options)[0]
    return y


def _public(arguments: Arguments) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    x, weights, biases, function, activation, order, level, backend = arguments
    options = {
        "activation": activation,
        "stacked": None if order == "apart" else order,
        "recompute": recompute_of(level),
        "backend": backend,
    }
    if function == "gated_linear":
        return function, (x, *weights[:2], *biases[:2]), options
    return function, (x, *weights, *biases), options


SPEC = OpSpec(
    name=NAME,
    operands=(
        "x",
        tuple(f"{kind}_weight" for kind in KINDS),
        tuple(f"{kind}_bias" for kind in KINDS),
    ),
    options=("function", "activation", "order", "level", "backend"),
    validate=_validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    compiled=_compiled,
    public=_public,
    choices=_choices,
)
FRONT = Front(SPEC)


def _as_call(inputs: tuple[Any, ...]) -> tuple[Arguments, Tensor]:
    x, weights, biases, activation, order, dy = inputs
    function = "gated_linear" if weights[2] is None else "gated_mlp"
    return (x, weights[:], biases[:], function, activation, order, None), dy


STEPS = Step(FRONT, _as_call)
eager, pieces = STEPS.eager, STEPS.pieces
