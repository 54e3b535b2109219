"""Trials that run out of memory: they end with a note, and what they hold is freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

from fastlinear.core import memory
from fastlinear.core.compare import Verdict
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.work import Work

T = TypeVar("T")
CODE = "out_of_memory"
_LINE = 200  # characters of an error worth showing


def contained(
    work: Work,
    doing: str,
    run: Callable[[], T],
    otherwise: T,
    given_up: Iterable[Candidate] = (),
) -> T:
    """``run()``; where it runs out of memory ``otherwise``, with a note.

    Args:
        work: the optimization under way.
        doing: what is tried, in words.
        run: the trial.
        otherwise: what stands for its result.
        given_up: the rewrites that are rejected with it.
    """
    try:
        return run()
    except Exception as error:
        if not memory.ran_out(error):
            raise
        text = in_words(error)
    work.notes.append(f"{doing} ended early, out of memory: {text}")
    for c in given_up:
        reason = f"{doing} ran out of memory: {text}"
        work.settle(c.fqn, "rejected", CODE, reason, activation=c.activation)
    memory.give_back(work.runner.device)
    return otherwise


def in_words(error: BaseException) -> str:
    """What an error says, in one line."""
    return " ".join(str(error).split())[:_LINE] or type(error).__name__


def code_of(error: BaseException) -> str:
    """The code of a trial that raised."""
    return CODE if memory.ran_out(error) else "raises"


def code_of_verdict(failed: Verdict) -> str:
    """The code of a rewrite that failed verification."""
    return CODE if any(text in failed.name for text in memory.SAID) else "less_accurate"
