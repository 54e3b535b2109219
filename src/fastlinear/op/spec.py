"""What the front end must know of a family: its ``OpSpec``, and the plan it makes for a call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.autocast import cast
from fastlinear.core.calls import is_captured
from fastlinear.core.precision import matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice
from fastlinear.dispatch.steps import choices_of, select_pieces
from fastlinear.fastpath import recorded

Arguments = tuple[Any, ...]
"""A call: three leading arguments with its tensors, then its options, the forced backend last.

A leading argument is a tensor, None, or a tuple of those; an option is a string, a bool or None.
"""
Plan = Callable[[Any, Any, Any], Any]
"""The three leading arguments → the result."""

Called = tuple[str, tuple[Any, ...], dict[str, Any]]
"""Name of a public function, its positional arguments, its keywords."""


@dataclass(frozen=True, slots=True)
class Resolved:
    """What serves calls of one kind.

    Attributes:
        plan: what Python calls. Its tensors are cast, and none has a lazy sign unless
            ``by_torch``.
        in_table: what the C++ table runs if ``record`` makes nothing: the plan or one of the
            table's own tuples. None keeps such calls out of the table.
        record: makes the table's plan of such calls, from tensors on which ``plan`` ran. None
            where that is ``in_table`` anyhow.
        by_torch: whether the plan is PyTorch's own ops, which any tensor and any mode may see.
        later: whether such calls get into the table only when they come again.
    """

    plan: Plan
    in_table: Any = None
    record: Callable[[Any, Any, Any], Any] | None = None
    by_torch: bool = False
    later: bool = False


def inferring(plan: Plan, x: Tensor, in_table: Any = None, *, by_torch: bool = False) -> Resolved:
    """What serves calls without gradients on a CPU or GPU by a plan that can be recorded.

    On a CPU a kind of call is recorded when it comes again: a first call loads and compiles nothing
    for that.
    """
    record = None if is_captured(x) else partial(recorded.inference, plan)
    return Resolved(plan, in_table or plan, record, by_torch, later=not x.is_cuda)


def _cast(arguments: Arguments, dtype: torch.dtype) -> Arguments:
    return mapped(lambda t: cast(t, dtype), arguments)


def _choices(problem: Problem, backend: str | None, _: Arguments) -> tuple[Choice, ...]:
    return choices_of(problem, backend)


@dataclass(frozen=True)
class OpSpec:
    """A family as data. Functions take ``Arguments`` unpacked, unless another form is given.

    Attributes:
        name: of the family and of its registered op.
        operands: names of the tensors, in the structure of the three leading arguments: a string,
            or a tuple of strings for a tuple of tensors.
        options: names of the options, the last of them ``backend``.
        sequences: whether an operand that is named by one string may be a sequence of tensors.
        validate: raises InputError unless the arguments fit each other.
        reference: the result by PyTorch's own ops.
        resolve: (arguments, whether gradients are recorded, whether autocast is on) → what serves
            such calls, which are valid.
        problem: (arguments, whether gradients are recorded) → the forward's Problem.
        train: (arguments, choices for the pieces) → what serves training calls by those backends.
        compiled: (arguments, whether gradients are recorded) → the result inside a compiled
            function, where that is not the op that ``op.registered`` makes.
        public: arguments → the call of the public function, where that has other parameters than
            ``operands`` and ``options``.
        normal: arguments → the same, with leading arguments of one type.
        cast: (arguments, dtype) → the same under autocast.
        redirect: arguments → the result of calls that another op serves, else None.
        choices: (the forward's Problem, a forced backend, arguments) → the choice for each piece.
        pieces: the forward's Problem → the choices for the pieces, the whole step left aside.
        changing: whether shapes change so often that a kind of call gets into the C++ table only
            when it comes again.
        most_plans: how many kinds of calls are remembered.
        torch_casts: whether autocast casts the tensors of ``reference`` itself.
    """

    name: str
    operands: tuple[str | tuple[str, ...], ...]
    options: tuple[str, ...]
    validate: Callable[..., None]
    reference: Callable[..., Any]
    resolve: Callable[[Arguments, bool, bool], Resolved]
    problem: Callable[[Arguments, bool], Problem]
    train: Callable[[Arguments, tuple[Choice, ...]], Resolved]
    compiled: Callable[[Arguments, bool], Any] | None = None
    public: Callable[[Arguments], Called] | None = None
    normal: Callable[[Arguments], Arguments] | None = None
    cast: Callable[[Arguments, torch.dtype], Arguments] = _cast
    redirect: Callable[[Arguments], Any] | None = None
    choices: Callable[[Problem, str | None, Arguments], tuple[Choice, ...]] = _choices
    pieces: Callable[[Problem], tuple[Choice, ...]] = select_pieces
    torch_casts: bool = False
    sequences: bool = False
    changing: bool = False
    most_plans: int = 4096

    def called(self, arguments: Arguments) -> Called:
        """The call of the public function."""
        if self.public is not None:
            return self.public(arguments)
        return self.name, arguments[:3], dict(zip(self.options, arguments[3:], strict=True))

    def named(self, arguments: Arguments) -> dict[str, Any]:
        """The leading arguments by the names of their tensors."""
        found: dict[str, Any] = {}
        for name, given in zip(self.operands, arguments, strict=False):
            if isinstance(name, str):
                found[name] = given
            else:
                found.update(zip(name, given, strict=True))
        return found


def kind(arguments: Arguments) -> tuple[Any, ...]:
    """What tells kinds of calls apart in their arguments: facts of the tensors, and the options."""
    facts = [
        None if t is None else (t.shape, t.stride(), t.dtype, t.device) for t in leaves(arguments)
    ]
    x = first(arguments)
    return (tuple(facts), *arguments[3:], matmul_precision(x.dtype), is_captured(x))


def leaves(arguments: Arguments) -> list[Any]:
    """The tensors of a call, None included."""
    found: list[Any] = []
    for given in arguments[:3]:
        if isinstance(given, tuple | list):
            found += given
        else:
            found.append(given)
    return found


def first(arguments: Arguments) -> Any:
    """The first tensor of a call: whose dtype and device the others share."""
    x = arguments[0]
    return x[0] if isinstance(x, tuple | list) else x


def mapped(function: Callable[[Tensor], Tensor], arguments: Arguments) -> Arguments:
    """The call with a function applied to each of its tensors."""

    def one(t: Any) -> Any:
        return None if t is None else function(t)

    changed = (tuple(map(one, a)) if isinstance(a, tuple | list) else one(a) for a in arguments[:3])
    return (*changed, *arguments[3:])
