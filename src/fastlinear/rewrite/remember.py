"""A plan's measurements: dispatch has them while it is tried, and keeps them if it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastlinear.core.errors import PlanError
from fastlinear.core.interrupts import whole
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import Backend, families, family
from fastlinear.rewrite.plan import Plan


@dataclass(frozen=True)
class Decision:
    """What was measured for one Problem, and the backends that can serve it here."""

    problem: Problem
    able: tuple[Backend, ...]
    best: str
    times_us: dict[str, float]
    doubt: str
    rivals: tuple[str, ...]

    @property
    def usable(self) -> bool:
        """Whether every backend it compares can serve the Problem here."""
        known = {b.name for b in self.able}
        return self.best in known and set(self.times_us) <= known

    def store(self) -> None:
        """Give it to dispatch."""
        measured = self.best, self.times_us, self.doubt, self.rivals
        cache.store(self.problem, self.able, *measured)


def decisions_of(plan: Plan) -> list[Decision]:
    """The plan's measurements that count here: those this user has none of his own for, or only
    one in doubt where the plan's is not.

    Raises PlanError for incomplete ones.
    """
    found = []
    for item in plan.tuned:
        try:
            decision = _decision(item)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
            raise PlanError(
                "apply_",
                "complete measurements in the plan",
                f"{type(error).__name__}: {error}",
                "Make the plan again with optimize_.",
            ) from error
        if not decision.usable:
            continue
        own = cache.tuned(decision.problem, decision.able)
        if own is None or (own.doubt and not decision.doubt):
            found.append(decision)
    return found


@whole
def on_trial(decisions: Sequence[Decision], device: str) -> Iterator[None]:
    """Inside it dispatch has these decisions beside the user's own; none is written to the disk."""
    own = _own(device)
    with cache.in_memory():
        for decision in (*own, *decisions):
            decision.store()
        yield


def _own(device: str) -> list[Decision]:
    """The user's own decisions that are still valid."""
    found = []
    for key, item in cache.entries(device).items():
        try:
            decision = _decision(item)
        except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError):
            continue  # of another version: selection does not find it either
        decision = replace(decision, problem=_in_order(decision.problem, key))
        if cache.tuned(decision.problem, decision.able) is not None:
            found.append(decision)
    return found


def _in_order(problem: Problem, key: str) -> Problem:
    """The Problem with its names in the key's order, which the file does not keep."""
    rank = {pair: i for i, pair in enumerate(key.replace("|", ",").split(","))}

    def place(pair: tuple[str, Any]) -> int:
        return rank.get(f"{pair[0]}={pair[1]}", -1)

    dims, options = sorted(problem.dims, key=place), sorted(problem.options, key=place)
    return replace(problem, dims=tuple(dims), options=tuple(options))


def _decision(item: dict[str, Any]) -> Decision:
    problem = Problem.from_json(item["problem"])
    if problem.family not in families():
        raise ValueError(f"family {problem.family!r}")
    candidates = family(problem.family).candidates(problem.piece)
    able = tuple(b for b in candidates if b.reason_not(problem) is None)
    times = {str(k): float(v) for k, v in item["times_us"].items()}
    best, doubt = str(item["best"]), str(item.get("doubt", ""))
    if best not in times or not all(0.0 < us < math.inf for us in times.values()):
        raise ValueError(f"best {best!r} of times {times}")
    every = [name for name in times if name != best] if doubt else []
    rivals = tuple(str(name) for name in item.get("rivals", every))
    return Decision(problem, able, best, times, doubt, rivals)
