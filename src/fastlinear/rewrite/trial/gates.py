"""Gated MLPs as findings: what ``gated_mlp`` would save on the inputs of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.cost import floor_us, measure_ceilings, roofline
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.core.timing import Samples, interleave
from fastlinear.dispatch.backend import family
from fastlinear.nn.gated_match import weights_of
from fastlinear.ops.gated_mlp.problem import NAME, STEP
from fastlinear.ops.gated_mlp.selection import problem_of
from fastlinear.profile.records import Finding
from fastlinear.profile.step import private_copy
from fastlinear.profile.timeline import Timeline, timeline
from fastlinear.rewrite.result import SiteOutcome
from fastlinear.rewrite.rules import gated as rule
from fastlinear.rewrite.rules.gated import GatedSite
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.work import Work

CODE = NAME
_MOST_S = 1.0  # of measuring a module


@dataclass
class _Seen:
    """Calls of one module in a run: how many, and the first input."""

    calls: int = 0
    x: Tensor | None = None


@dataclass(frozen=True)
class _Found:
    """What one kind of call takes as it is and by ``gated_mlp``, in microseconds, whether that is
    faster beyond noise, and what runs in each."""

    before_us: float
    after_us: float
    faster: bool
    timelines: dict[str, Timeline]


def find(work: Work) -> None:
    """Add a finding for every gated MLP that ``gated_mlp`` computes faster, rewritten or not.

    Nothing is rewritten here. The model runs once more, and is to be preserved by the caller.
    """
    sites = rule.match(work.model) if work.allows(NAME) else []
    if not sites:
        return
    seen = _observed(work, sites)
    known: dict[Problem, _Found] = {}
    found = []
    for i, site in enumerate(sites):
        x, after = seen[site.fqn].x, site.instead()
        if x is None or after is None or not _plain(site, x):
            continue
        problem = _problem(work, site, x)
        kept = _kept(work, site)
        if problem not in known:
            if work.budget.left_s == 0 and kept is None:
                break
            share = work.budget.share(4 * (len(sites) - i), _MOST_S)
            with work.budget:
                known[problem] = _measured(work, site, x, after, kept, share)
        if known[problem].faster:
            found.append(_finding(work, site, problem, seen[site.fqn].calls, known[problem]))
    if found:
        ranked = sorted((*work.profile.findings, *found), key=lambda f: -f.predicted_gain_us)
        work.profile = replace(work.profile, findings=tuple(ranked))


def _kept(work: Work, site: GatedSite) -> SiteOutcome | None:
    """The outcome of its first linear, where the module is rewritten as one call."""
    name = site.gated.gate
    outcome = work.outcomes.get(f"{site.fqn}.{name}" if site.fqn else name)
    if outcome is None or (outcome.rule, outcome.status) != (NAME, "kept"):
        return None
    return outcome


def _observed(work: Work, sites: list[GatedSite]) -> dict[str, _Seen]:
    """One run with hooks on the sites."""
    seen = {site.fqn: _Seen() for site in sites}

    def look(fqn: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        record = seen[fqn]
        record.calls += 1
        if record.x is None and len(args) == 1 and type(args[0]) is Tensor:
            record.x = args[0].detach().clone()

    handles = [s.module.register_forward_pre_hook(partial(look, s.fqn)) for s in sites]
    try:
        work.runner.step(work.model, Call(*private_copy((work.call.args, work.call.kwargs))))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _plain(site: GatedSite, x: Tensor) -> bool:
    """Whether ``gated_mlp`` takes the module's parameters with this input."""
    dtypes = {p.dtype for p in site.module.parameters()}
    return bool(x.numel()) and x.dtype in DTYPE_NAMES and dtypes == {x.dtype}


def _problem(work: Work, site: GatedSite, x: Tensor) -> Problem:
    weights, biases = weights_of(site.module, site.gated)
    rows = x.reshape(-1, x.shape[-1])
    train = work.runner.mode == "train"
    gated = site.gated
    p = problem_of(rows, weights, biases, gated.activation, gated.order, None, train)
    return p.with_piece(STEP) if train else p


def _measured(
    work: Work,
    site: GatedSite,
    x: Tensor,
    after: Callable[[Tensor], Tensor],
    kept: SiteOutcome | None,
    budget_s: float,
) -> _Found:
    """The module as it is, and by ``gated_mlp``; with its backward in training. Times of a module
    that is rewritten are known."""
    train, device = work.runner.mode == "train", work.runner.device
    given = x.requires_grad_(train)
    units = {
        name: _unit(f, given, site, train)
        for name, f in {"before": site.module.forward, "after": after}.items()
    }
    with torch.set_grad_enabled(train):
        for unit in units.values():
            unit()
        if kept is not None and kept.before_us is not None and kept.after_us is not None:
            calls = kept.calls / len(site.gated.names)
            before_us, after_us, faster = kept.before_us / calls, kept.after_us / calls, True
        else:
            before, ours = _times(units, device, budget_s)
            before_us, after_us = before.median_us, ours.median_us
            faster = ours.ci95_us[1] < before.ci95_us[0]
        timelines = {n: timeline(unit, device) for n, unit in units.items() if faster}
    return _Found(before_us, after_us, faster, timelines)


def _times(
    units: dict[str, Callable[[], Any]], device: torch.device, budget_s: float
) -> tuple[Samples, Samples]:
    times = interleave(units, device=device, metric="wall", rounds=9, budget_s=budget_s)
    return times["before"], times["after"]


def _unit(
    f: Callable[[Tensor], Tensor], x: Tensor, site: GatedSite, train: bool
) -> Callable[[], Any]:
    if not train:
        return lambda: f(x)
    wanted = [x, *(p for p in site.module.parameters() if p.requires_grad)]
    dy = torch.randn_like(f(x))
    return lambda: torch.autograd.grad(f(x), wanted, dy)


def _finding(
    work: Work, site: GatedSite, problem: Problem, calls: int, measured: _Found
) -> Finding:
    cost = family(NAME).cost(problem)
    limits = measure_ceilings(str(work.runner.device), problem.dtype, problem.precision)
    _, h, _ = site.sizes
    numbers = problem.dim("M") * h * getattr(torch, problem.dtype).itemsize
    theirs, ours = (count * numbers for count in site.passes(work.runner.mode))
    gated = site.gated
    before_us, after_us = measured.before_us, measured.after_us
    advice = site.advice if _kept(work, site) is None else "optimize_ has put it in place"
    message = (
        f"products {site.products}; between them PyTorch's operations move {_size(theirs)} a call, "
        f"one fused pass {_size(ours)}: {_size(theirs - ours)} or "
        f"{(theirs - ours) / limits.bytes_per_s * 1e6:.1f} us are avoidable. "
        f"{before_us:.1f} us a call, {after_us:.1f} us by gated_mlp. {advice}"
    )
    return Finding(
        code=CODE,
        fqn=site.fqn,
        title=f"gated MLP of {h} hidden features, {gated.activation}",
        message=message,
        measured_us=before_us * calls,
        floor_us=floor_us(cost, limits) * calls,
        predicted_gain_us=(before_us - after_us) * calls,
        flops=cost.flops * calls,
        bytes=cost.bytes * calls,
        bound=roofline(cost, limits, before_us).bound,
        details={
            "activation": gated.activation,
            "order": gated.order,
            "linears": list(gated.names),
            "calls": calls,
            "avoidable_bytes": (theirs - ours) * calls,
            "advice": advice,
            "timeline": {name: t.to_json() for name, t in measured.timelines.items()},
        },
    )


def _size(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
