"""Diagonal modules and sequences as findings: what ``diagonal_linear`` would save on the inputs of
the model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.cost import floor_us, measure_ceilings
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.timing import Samples, interleave
from fastlinear.dispatch.backend import family
from fastlinear.ops.diagonal_linear.problem import NAME
from fastlinear.profile.records import Finding
from fastlinear.profile.step import is_compiled
from fastlinear.rewrite.rules import diagonal as rule
from fastlinear.rewrite.rules.diagonal import Diagonal
from fastlinear.rewrite.rules.diagonal_sequences import Sequence, Watch
from fastlinear.rewrite.trial.diagonal_places import (
    Place,
    of_module,
    of_sequence,
    problem_of_place,
    words,
)
from fastlinear.rewrite.trial.not_measured import budget_spent, not_measured
from fastlinear.rewrite.trial.of_the_step import of_the_step
from fastlinear.rewrite.work import Work

CODE = "diagonal_linear"
_MOST_S = 0.5  # of measuring a module


@dataclass
class _Seen:
    """Calls of one module in a run: how many, and the first input."""

    calls: int = 0
    x: Tensor | None = None


def find(work: Work) -> None:
    """Add a finding for every diagonal module, and every elementwise sequence, that
    ``diagonal_linear`` computes faster.

    Nothing is rewritten. The model runs once more, and is to be preserved by the caller.
    """
    if not work.allows(NAME):
        return
    sites = rule.match(work.model)
    seen, sequences = _observed(work, sites)
    # a sequence that lies in a module is part of what that computes; a module whose result a
    # sequence goes on with is part of that
    modules = {d.fqn for d in sites}
    sequences = [s for s in sequences if s.span != s.fqn or s.fqn not in modules]
    inside = {s.fqn for s in sequences}
    places: list[Place] = [
        *(of_sequence(work.model, s) for s in sequences),
        *(
            of_module(work.model, d, seen[d.fqn].x, seen[d.fqn].calls)
            for d in sites
            if d.fqn not in inside
        ),
    ]
    places = [p for p in places if p.x is not None and p.x.dtype in DTYPE_NAMES]
    found, times = [], _Times(work, len(places))
    for place in places:
        measured = times.of(place)
        if measured is None:
            found.append(_unmeasured(work, place))
        elif measured[1].ci95_us[1] < measured[0].ci95_us[0]:
            found.append(_finding(work, place, *(t.median_us for t in measured)))
    ranked = sorted((*work.profile.findings, *found), key=lambda f: -f.predicted_gain_us)
    work.profile = replace(work.profile, findings=tuple(ranked))


def _observed(work: Work, sites: list[Diagonal]) -> tuple[dict[str, _Seen], list[Sequence]]:
    """One run with hooks on the sites, and with every op of its forward watched."""
    seen = {site.fqn: _Seen() for site in sites}

    def look(fqn: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        record = seen[fqn]
        record.calls += 1
        if record.x is None and len(args) == 1 and isinstance(args[0], Tensor):
            record.x = args[0].detach().clone()

    handles = [s.module.register_forward_pre_hook(partial(look, s.fqn)) for s in sites]
    unwatched = any(
        is_compiled(m) or isinstance(m, torch.jit.ScriptModule) for m in work.model.modules()
    )
    watch = None if unwatched else Watch(work.model)
    try:
        with nullcontext() if watch is None else watch:
            work.step("in the run that shows what its layers are given")
    finally:
        for handle in handles:
            handle.remove()
    return seen, [] if watch is None else watch.sequences()


class _Times:
    """Times of places, each kind of call measured once, within the budget."""

    def __init__(self, work: Work, places: int) -> None:
        self._work, self._left = work, places
        self._known: dict[Any, tuple[Samples, Samples]] = {}

    def of(self, place: Place) -> tuple[Samples, Samples] | None:
        """Before and after; None where the budget is spent."""
        assert place.x is not None
        train = self._work.runner.mode == "train"
        own = place.fqn if place.kind != "sequence" else ""
        key = (own, place.kind, place.x.stride(), problem_of_place(place, train))
        if key not in self._known:
            if self._work.budget.left_s == 0:
                return None
            share = self._work.budget.share(4 * max(1, self._left), _MOST_S)
            with self._work.budget:
                self._known[key] = self._measured(place, train, share)
        self._left -= 1
        return self._known[key]

    def _measured(self, place: Place, train: bool, budget_s: float) -> tuple[Samples, Samples]:
        assert place.x is not None
        x = place.x.detach().requires_grad_(train)
        given = (x, torch.randn_like(x).requires_grad_(train)) if place.residual else (x,)
        units = {
            n: _unit(f, given, train)
            for n, f in {"before": place.before, "after": place.after}.items()
        }
        with torch.set_grad_enabled(train):
            for unit in units.values():
                unit()
            device = self._work.runner.device
            times = interleave(units, device=device, metric="wall", rounds=9, budget_s=budget_s)
        return times["before"], times["after"]


def _unmeasured(work: Work, place: Place) -> Finding:
    words = f"{place.kind.replace('_', ' ')} of {place.features} features"
    more = f"{words} (perhaps better as {place.advice})"
    return not_measured(CODE, place.fqn, words, more, budget_spent(work), _facts(place))


def _finding(work: Work, place: Place, before_us: float, after_us: float) -> Finding:
    assert place.x is not None
    before_us, after_us, said = of_the_step(work, before_us, after_us, place.calls)
    problem = problem_of_place(place, work.runner.mode == "train")
    cost = family(NAME).cost(problem)
    limits = measure_ceilings(str(place.x.device), problem.dtype)
    return Finding(
        code=CODE,
        fqn=place.fqn,
        title=f"{place.kind.replace('_', ' ')} of {place.features} features",
        message=words(place, before_us, after_us) + (f" Times: {said}." if said else ""),
        measured_us=before_us * place.calls,
        floor_us=floor_us(cost, limits) * place.calls,
        predicted_gain_us=(before_us - after_us) * place.calls,
        flops=0.0,
        bytes=cost.bytes * place.calls,
        bound="memory",
        details={**_facts(place), "problem": problem.to_json()},
    )


def _facts(place: Place) -> dict[str, Any]:
    return {
        "kind": place.kind,
        "activation": place.activation,
        "residual": place.residual,
        "calls": place.calls,
        "advice": place.advice,
    }


def _unit(
    forward: Callable[..., Tensor], given: tuple[Tensor, ...], train: bool
) -> Callable[[], Any]:
    if not train:
        return lambda: forward(*given)
    dy = torch.ones_like(given[0])

    def run() -> None:
        for t in given:
            t.grad = None
        forward(*given).backward(dy)

    return run
