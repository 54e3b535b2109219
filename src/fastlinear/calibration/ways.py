"""Every way to compute a drawn case: ours, one for each backend that can serve, and PyTorch's.

Ours are ``fastlinear``, the public call; one arm for each other backend that can serve, forced; and
in training, where pieces are chosen by themselves, one for each change of a single piece.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.calibration.drawn import Drawn
from fastlinear.core.errors import FastlinearError, InputError
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.core.settings import batch_invariant as batch_invariant_calls
from fastlinear.dispatch.backend import family, home
from fastlinear.dispatch.select import Choice, select
from fastlinear.dispatch.steps import STEP
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.op.front import Front
from fastlinear.op.spec import Arguments, leaves, mapped
from fastlinear.op.step import Pieces

OURS, EAGER, COMPILE = "fastlinear", "eager", "compile"
GRAPHED = "compile in graphs"
_SMALL = 1 << 26  # bytes of a call whose launches may tell: torch.compile records such ones as well
_BACKWARD = "backward"
Call = Callable[..., Any]
"""The arguments of a public call but the backend → its result."""


@dataclass(frozen=True)
class Arm:
    """One way to compute a case.

    Attributes:
        name: ``"fastlinear"``, ``"fastlinear[piece=backend, …]"``, or a peer's.
        call: what it runs.
        took: piece → backend; empty for a peer.
    """

    name: str
    call: Call
    took: Mapping[str, str]


def front_of(name: str) -> Front:
    """The front end of a family."""
    found: Front = importlib.import_module(f"{home(name)}.spec").FRONT
    return found


def inputs_of(drawn: Drawn, device: torch.device, turn: int) -> tuple[Arguments, Any]:
    """The arguments of the public call but the backend, and the gradient of its result."""
    p = drawn.problem
    spec = importlib.import_module(f"{home(p.family)}.spec")
    made = family(p.family).make_inputs(p.with_piece(STEP), device, drawn.inputs_seed + turn)
    steps = getattr(spec, "STEPS", None)
    return (made[:-1], made[-1]) if steps is None else steps.as_call(made)


def posed(drawn: Drawn, arguments: Arguments) -> Problem:
    """The Problem of the public call, as dispatch sees it."""
    front = front_of(drawn.problem.family)
    asked = front.spec.problem((*arguments, None), drawn.problem.needs_grad)
    return replace(asked, captured=drawn.problem.captured)


def ours(drawn: Drawn, arguments: Arguments) -> Iterator[Arm]:
    """Our arms of a case, the public call first; none of two compute it alike."""
    front, p = front_of(drawn.problem.family), posed(drawn, arguments)
    chosen = front.spec.choices(p, None, (*arguments, None))
    own = chosen[-1].problem.piece == STEP and chosen[-1].backend.name == EAGER
    took = {c.problem.piece: c.backend.name for c in chosen}
    yield Arm(OURS, lambda *call: front.call(*call, None), {STEP: EAGER} if own else took)
    if not p.needs_grad or len(chosen) == 1:
        piece = chosen[0].problem.piece
        for name in _able(chosen[0].problem, without=took[piece]):
            yield Arm(_named({piece: name}), _forced(front, name), {piece: name})
        return
    pieces = front.spec.pieces(p)
    ways = [*_neighbours(pieces)]
    if own:
        ways.insert(0, ({}, pieces))
    for i, (change, changed) in enumerate(ways):
        yield _assigned(front, i, changed, change)


def batch_invariant(drawn: Drawn, arguments: Arguments) -> Arm:
    """The call by the backend whose rows do not depend on each other."""
    front = front_of(drawn.problem.family)
    front.spec.choices(posed(drawn, arguments), BATCH_INVARIANT, (*arguments, BATCH_INVARIANT))
    return Arm(BATCH_INVARIANT, _forced(front, BATCH_INVARIANT), {})


def peers(drawn: Drawn, arguments: Arguments, skip: Sequence[str]) -> Iterator[Arm]:
    """PyTorch's own ops, as they are and compiled."""
    reference = front_of(drawn.problem.family).spec.reference
    yield Arm(EAGER, lambda *call: reference(*call, None), {})
    if COMPILE not in skip:
        torch._dynamo.reset()
        yield Arm(COMPILE, _compiled(reference), {})
        p = drawn.problem
        if p.device == "cuda" and not p.captured and family(p.family).cost(p).bytes < _SMALL:
            yield Arm(GRAPHED, _compiled(reference, mode="reduce-overhead"), {})


def _compiled(reference: Call, **how: Any) -> Call:
    def plain(*call: Any) -> Any:
        return reference(*call, None)

    return torch.compile(plain, dynamic=False, **how)


def _able(p: Problem, without: str) -> list[str]:
    known = family(p.family).candidates(p.piece)
    return [b.name for b in known if b.name != without and b.why_not_ready(p) is None]


def _forced(front: Front, backend: str) -> Call:
    return lambda *call: front.call(*call, backend)


def _assigned(
    front: Front, place: int, pieces: tuple[Choice, ...], change: Mapping[str, str]
) -> Arm:
    took = {c.problem.piece: c.backend.name for c in pieces}
    run = Pieces(front, f"drawn {place}", pieces)
    run.forget()  # the plans of the case before
    return Arm(_named(change or took), run, took)


def _named(took: Mapping[str, str]) -> str:
    return f"{OURS}[{', '.join(f'{piece}={name}' for piece, name in took.items())}]"


def _neighbours(
    pieces: tuple[Choice, ...],
) -> Iterator[tuple[dict[str, str], tuple[Choice, ...]]]:
    """Every choice of the pieces that differs in one of them, with that difference."""
    for i, choice in enumerate(pieces):
        for name in _able(choice.problem, without=choice.backend.name):
            if name == "pieces":
                continue
            try:
                other = select(choice.problem, name)
            except FastlinearError:
                continue
            yield {choice.problem.piece: name}, (*pieces[:i], other, *pieces[i + 1 :])
    yield from _whole_or_not(pieces)


def _whole_or_not(
    pieces: tuple[Choice, ...],
) -> Iterator[tuple[dict[str, str], tuple[Choice, ...]]]:
    """Where a backward is one choice or several (linear_act): the other way."""
    forward = pieces[0].problem
    known = family(forward.family)
    parts = [q for q in known.pieces if q not in ("forward", _BACKWARD, STEP)]
    if not parts:
        return
    if len(pieces) > 2:
        whole = forward.with_piece(_BACKWARD)
        for name in _able(whole, without="pieces"):
            if name != EAGER:
                yield {_BACKWARD: name}, (pieces[0], select(whole, name))
    else:
        own = tuple(select(forward.with_piece(q)) for q in parts)
        yield {c.problem.piece: c.backend.name for c in own}, (pieces[0], *own)


def runner(arm: Arm, arguments: Arguments, dy: Any, train: bool) -> Callable[[], Any]:
    """A call of an arm without arguments; in training (results, a gradient for each tensor)."""
    if not train:
        return partial(arm.call, *arguments)
    call = mapped(_leaf, arguments)
    wanted = [t for t in leaves(call) if t is not None and t.requires_grad]

    def step() -> tuple[Any, ...]:
        y = arm.call(*call)
        return y, torch.autograd.grad(y, wanted, dy)

    return step


def _leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_() if t.is_floating_point() else t


def wait() -> None:
    """Have what callers have once their process is warm: the table of calls, and its nodes.

    Raises:
        InputError: calls are to be batch-invariant, whatever is fastest.
    """
    if batch_invariant_calls():
        raise InputError(
            "measuring choices",
            "calls that take what is fastest",
            "batch_invariant() or FASTLINEAR_BATCH_INVARIANT=1",
            "Switch it off for this process.",
        )
    if lookup.wait(lookup.PATIENCE_S):
        autograd_node.wait(lookup.PATIENCE_S)
