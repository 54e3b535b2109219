"""Whether a plan's rewrites run by the backends it names, and why where they do not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import Choice
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.plan import Rewrite


def others(candidates: Iterable[Candidate], planned: Mapping[str, Rewrite]) -> dict[str, str]:
    """Name → what is taken in place of the backends that the plan names for it, and why; only of
    rewrites for which that is so."""
    found = {c.fqn: _other(c, planned[c.fqn].backends) for c in candidates}
    return {fqn: text for fqn, text in found.items() if text}


def notes(found: Mapping[str, str], rewrites: int) -> list[str]:
    """What a reader should know of them, a line for each different one."""
    alike: dict[str, list[str]] = {}
    for fqn, text in found.items():
        alike.setdefault(text, []).append(fqn)
    return [
        f"other backends than planned for {len(names)} of {rewrites} rewrites "
        f"({', '.join(names[:3])}{', …' if len(names) > 3 else ''}): {text}"
        for text, names in alike.items()
    ]


def _other(c: Candidate, planned: Mapping[str, str]) -> str:
    problem, forced = c.problem, c.backend
    if c.chain is not None:
        problem, forced = c.chain.problems[0], c.chain.dispatch.backend
    here = {choice.problem.piece: choice for choice in measure.choices(problem, forced)}
    told = []
    for piece, name in planned.items():
        choice = here.get(piece)
        if choice is None:
            told.append(f"{piece} not by {name}: it is no choice of its own here")
        elif choice.backend.name != name:
            told.append(f"{piece} by {choice.backend.name}, not {name}: {_why(choice, name)}")
    return "; ".join(told)


def _why(choice: Choice, planned: str) -> str:
    """Why another backend was chosen than the planned one."""
    candidates = family(choice.problem.family).candidates(choice.problem.piece)
    known = {b.name: b for b in candidates}
    if planned not in known:
        return "there is no such backend"
    return known[planned].reason_not(choice.problem) or choice.reason
