"""Pure selection: forced → user's tuned cache → prediction → the first that can serve.

A prediction is the sum of a backend's works at the device's prices. PyTorch's own ops win ties,
and what is closer to them than predictions are to measurements.

A tuned decision in doubt does not replace the choice without it, where that may be faster within
the noise of its measurement.

Nothing here measures anything, and nothing here imports a backend. A library that the choice needs
is compiled; where it cannot be, or takes long, the next backend is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.cache import tuned
from fastlinear.dispatch.prices import Prediction, prices
from fastlinear.dispatch.work import Work, host

BASELINE = "eager"
STEP = "step"
"""The piece that a training call is as a whole."""
# Of what PyTorch's ops do and the other backend does not, within which they win: predictions of a
# GPU are off by 12 to 20% (rms), but by the same where both do the same.
_TIE = {"cpu": 0.03, "cuda": 0.1}
# A backward has two products for each of its forward.
_NODE_SHARES = {"forward": 1 / 3, "backward": 2 / 3}


@dataclass(frozen=True)
class Choice:
    """The outcome of a selection, with the story behind it.

    Attributes:
        problem: what was asked.
        backend: the chosen backend.
        source: ``"forced"``, ``"tuned"``, ``"predicted"`` or ``"default"``.
        reason: one sentence on why this one.
        passed_over: (backend name, why not) for every other backend of the piece.
    """

    problem: Problem
    backend: Backend
    source: str
    reason: str
    passed_over: tuple[tuple[str, str], ...]

    def load(self) -> Callable[..., Any]:
        """The backend's function, for such calls."""
        return self.backend.load(self.problem)


def select(problem: Problem, forced: str | None = None, *, ready: bool = True) -> Choice:
    """Choose a backend for a Problem.

    Args:
        problem: the concrete call. On a GPU, measurements made inside a CUDA graph stand in for
            missing ones made outside, and the other way round.
        forced: a backend's name. Raises InputError where there is none of that name, and
            UnsupportedError with the reason if it cannot serve.
        ready: whether the choice is to run: what it needs is compiled. Else nothing is.
    """
    fam = family(problem.family)
    candidates = fam.candidates(problem.piece, on_request=forced is not None)
    reasons = {b.name: b.reason_not(problem) for b in candidates}
    if forced is not None:
        return _forced(problem, candidates, reasons, fam.current(forced))
    while True:
        able = [b for b in candidates if reasons[b.name] is None]
        choice = _of_able(problem, able, reasons)
        why = choice.backend.why_not_ready(problem) if ready else None
        if why is None:
            return choice
        reasons[choice.backend.name] = why  # its library cannot be compiled, or not yet


def _of_able(problem: Problem, able: Sequence[Backend], reasons: dict[str, str | None]) -> Choice:
    by_name = {b.name: b for b in able}
    untuned: Choice | None = None
    doubted = ""
    for asked in _regimes(problem):
        entry = tuned(asked, able)
        if entry is None or entry.best not in by_name:
            continue
        if entry.rivals:
            untuned = untuned or _untuned(problem, able, reasons)
            if untuned is not None and untuned.backend.name in entry.rivals:
                doubted = doubted or (
                    f"; tuning took {entry.best} in its place and is in doubt: {entry.doubt}; "
                    "tune again when it is quiet"
                )
                continue
        story = entry.story() if asked is problem else f"{entry.story()}, {_regime(asked)}"
        return _choice(problem, by_name[entry.best], "tuned", story, reasons, entry.times_us)
    untuned = untuned or _untuned(problem, able, reasons)
    if untuned is not None:
        return replace(untuned, reason=untuned.reason + doubted)
    raise UnsupportedError(
        problem.family,
        "at least one backend able to serve the call",
        f"{problem.describe()}: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()),
        "Change what these reasons name, or call PyTorch's own functions.",
    )


def _untuned(
    problem: Problem, able: Sequence[Backend], reasons: dict[str, str | None]
) -> Choice | None:
    """The choice of this machine without the user's measurements."""
    avoided = {b.name: why for b in able if (why := b.why_avoided(problem)) is not None}
    if len(avoided) < len(able):
        able, reasons = [b for b in able if b.name not in avoided], {**reasons, **avoided}
    by_name = {b.name: b for b in able}
    found = predictions(problem, able)
    if found:
        return _predicted(problem, by_name, found, reasons)
    if not able:
        return None
    why = "nobody tells what this costs"
    return _choice(problem, able[0], "default", why, reasons, {})


def predictions(problem: Problem, able: Sequence[Backend]) -> dict[str, Prediction]:
    """Backend → what it is predicted to take; empty where that is not known of PyTorch's own ops
    and they are able."""
    known, priced = family(problem.family), prices(problem.device)
    if priced is None:
        return {}
    found, node = {}, _share_of_node(problem)
    if node and priced.of_call(problem, node) is None:  # the same for all, where anybody tells it
        node = ()
    for backend in able:
        works = known.work_of(problem, backend.name)
        told = None if works is None else priced.of_call(problem, (*works, *node))
        if told is not None:
            found[backend.name] = told
    missing = any(b.name == BASELINE for b in able) and BASELINE not in found
    return {} if missing else found


def _share_of_node(problem: Problem) -> tuple[Work, ...]:
    """What a piece of a training call has of the host's time for autograd.

    A GPU computes meanwhile, so that a piece pays for what it adds to the longer of both.
    """
    pieces = family(problem.family).pieces
    by_call = problem.device == "cuda" and problem.needs_grad and not problem.captured
    if not by_call or problem.piece == STEP or STEP not in pieces or "backward" not in pieces:
        return ()
    share = _NODE_SHARES.get(problem.piece)
    if share is None:  # a part of the backward
        share = _NODE_SHARES["backward"] / (len(pieces) - len((*_NODE_SHARES, STEP)))
    return (host(f"{problem.family} node", share),)


def _predicted(
    problem: Problem,
    by_name: Mapping[str, Backend],
    found: Mapping[str, Prediction],
    reasons: dict[str, str | None],
) -> Choice:
    own, tie = found.get(BASELINE), _TIE[problem.device]
    others = {name: told for name, told in found.items() if name != BASELINE}
    if own is not None:
        ahead = {n: t for n, t in others.items() if t.us < own.us - tie * own.apart_from(t)}
        others = ahead or {BASELINE: own}
    best = min(others, key=lambda name: others[name].us)
    why = f"least predicted: {found[best]}"
    choice = _choice(problem, by_name[best], "predicted", why, reasons, {})
    told = {name: f"predicted {found[name]}" for name in found if name != best}
    passed = tuple((name, told.get(name, why)) for name, why in choice.passed_over)
    return replace(choice, passed_over=passed)


def _regimes(problem: Problem) -> tuple[Problem, ...]:
    """The Problem, and on a GPU the same in the other regime."""
    other = problem.other_regime()
    return (problem,) if other is None else (problem, other)


def _regime(problem: Problem) -> str:
    return "measured inside a CUDA graph" if problem.captured else "measured outside CUDA graphs"


def _forced(
    problem: Problem,
    candidates: tuple[Backend, ...],
    reasons: dict[str, str | None],
    forced: str,
) -> Choice:
    if forced not in reasons:
        raise InputError(
            problem.family,
            f"backend in {sorted(reasons)} for {problem.piece}",
            f"backend={forced!r}",
            family(problem.family).remedy(forced),
        )
    why = reasons[forced]
    if why is not None:
        raise UnsupportedError(
            problem.family,
            f"a call that backend {forced!r} can serve",
            f"{problem.describe()}: {why}",
            "Switch it off by batch_invariant(False), or name another backend."
            if forced == BATCH_INVARIANT
            else "Leave backend out, or ask fastlinear.explain(...) which can.",
        )
    backend = next(b for b in candidates if b.name == forced)
    why = (
        "rows are not to depend on each other"
        if forced == BATCH_INVARIANT
        else "the caller named it"
    )
    return _choice(problem, backend, "forced", why, reasons, {})


def _choice(
    problem: Problem,
    backend: Backend,
    source: str,
    reason: str,
    reasons: dict[str, str | None],
    times_us: dict[str, float],
) -> Choice:
    passed = []
    best = times_us.get(backend.name)
    for name, why in reasons.items():
        if name == backend.name:
            continue
        if why is None and best and name in times_us:
            why = f"measured {times_us[name] / best:.2f}x the time of {backend.name}"
        elif why is None:
            why = f"able to serve; not chosen because {backend.name} comes first ({source})"
        passed.append((name, why))
    return Choice(problem, backend, source, reason, tuple(passed))
