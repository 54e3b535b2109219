"""What dispatch makes of a case whose family has several pieces, and how these are tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks.harness.case import Case
from benchmarks.harness.peer import Peer
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.select import Choice
from fastlinear.dispatch.tune import tune


def chosen_pieces(
    choices_of: Callable[[Problem], Iterable[Choice]], forward: Problem, captured: bool
) -> dict[str, str]:
    """Piece → backend and source: what dispatch takes, in a CUDA graph or not."""
    made = choices_of(replace(forward, captured=captured and forward.device == "cuda"))
    return {c.problem.piece: f"{c.backend.name} ({c.source})" for c in made}


def tune_pieces(
    tuning_order: Callable[[Problem], Iterable[Problem]], forward: Problem, device: torch.device
) -> None:
    """Tune all pieces, on a GPU inside CUDA graphs as well."""
    for p in (forward, forward.other_regime()):
        for piece in () if p is None else tuning_order(p):
            tune(piece, device=device)


def dispatched(
    problem_of: Callable[[Case], Problem],
    choices_of: Callable[[Problem], Iterable[Choice]],
    tuning_order: Callable[[Problem], Iterable[Problem]],
) -> tuple[Callable[[Case, Any, bool], dict[str, str]], Callable[[Case, torch.device], None]]:
    """``chosen`` and ``tune`` of a ``Kind`` whose cases are one Problem each, the forward's."""

    def chosen(case: Case, work: object, captured: bool) -> dict[str, str]:
        return chosen_pieces(choices_of, problem_of(case), captured)

    def tune_case(case: Case, device: torch.device) -> None:
        tune_pieces(tuning_order, problem_of(case), device)

    return chosen, tune_case


def forced(
    name: str,
    problem_of: Callable[[Case], Problem],
    make: Callable[[str, Callable[[Case], str | None]], Peer],
    without: Iterable[str] = ("eager",),
) -> Iterator[Peer]:
    """A contender for each backend of a family's forward.

    Args:
        make: from a backend's name and why it cannot serve a case.
        without: backends that are left out.
    """
    for backend in family(name).candidates("forward"):
        if backend.name not in without:
            yield make(backend.name, partial(_why_not, backend, problem_of))


def _why_not(backend: Backend, problem_of: Callable[[Case], Problem], case: Case) -> str | None:
    return backend.reason_not(problem_of(case))
