"""Diagonal modules as findings: what ``diagonal_linear`` would save on the inputs of the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.cost import floor_us, measure_ceilings
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.core.timing import interleave
from fastlinear.dispatch.backend import family
from fastlinear.ops.diagonal_linear.problem import NAME, STEP, problem_of
from fastlinear.profile.records import Finding
from fastlinear.profile.step import private_copy
from fastlinear.rewrite.rules import diagonal as rule
from fastlinear.rewrite.rules.diagonal import Diagonal
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.work import Work

CODE = "diagonal_linear"
_MOST_S = 0.5  # of measuring a module


@dataclass
class _Seen:
    """Calls of one module in a run: how many, and the first input."""

    calls: int = 0
    x: Tensor | None = None


def find(work: Work) -> None:
    """Add a finding for every diagonal module that ``diagonal_linear`` computes faster.

    Nothing is rewritten. The model runs once more, and is to be preserved by the caller.
    """
    sites = rule.match(work.model) if work.allows(NAME) else []
    if not sites:
        return
    seen = _observed(work, sites)
    found = []
    for i, site in enumerate(sites):
        calls = seen[site.fqn]
        if calls.x is None or calls.x.dtype not in DTYPE_NAMES or work.budget.left_s == 0:
            continue
        with work.budget:
            finding = _finding(work, site, calls, work.budget.share(4 * (len(sites) - i), _MOST_S))
        if finding is not None:
            found.append(finding)
    ranked = sorted((*work.profile.findings, *found), key=lambda f: -f.predicted_gain_us)
    work.profile = replace(work.profile, findings=tuple(ranked))


def _observed(work: Work, sites: list[Diagonal]) -> dict[str, _Seen]:
    """One run with hooks on the sites."""
    seen = {site.fqn: _Seen() for site in sites}

    def look(fqn: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        record = seen[fqn]
        record.calls += 1
        if record.x is None and len(args) == 1 and isinstance(args[0], Tensor):
            record.x = args[0].detach().clone()

    handles = [s.module.register_forward_pre_hook(partial(look, s.fqn)) for s in sites]
    try:
        work.runner.step(work.model, Call(*private_copy((work.call.args, work.call.kwargs))))
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _finding(work: Work, site: Diagonal, seen: _Seen, budget_s: float) -> Finding | None:
    assert seen.x is not None
    weight = getattr(site.module, site.weight)
    if seen.x.dtype != weight.dtype or seen.x.shape[-1] != site.features:
        return None  # autocast or promotion decides there what is computed
    train = work.runner.mode == "train"
    x = seen.x.requires_grad_(train)
    before = _unit(partial(type(site.module).forward, site.module), site, x, train)
    after = _unit(site.instead(), site, x, train)
    with torch.set_grad_enabled(train):
        before(), after()
        times = interleave(
            {"before": before, "after": after},
            device=work.runner.device,
            metric="wall",
            rounds=9,
            budget_s=budget_s,
        )
    first, second = times["before"], times["after"]
    if second.ci95_us[1] >= first.ci95_us[0]:
        return None
    problem = _problem(site, x, train)
    cost = family(NAME).cost(problem)
    limits = measure_ceilings(str(x.device), problem.dtype)
    measured, gain = first.median_us * seen.calls, (first.median_us - second.median_us) * seen.calls
    return Finding(
        code=CODE,
        fqn=site.fqn,
        title=f"{site.kind.replace('_', ' ')} of {site.features} features",
        message=_words(site, first.median_us, second.median_us),
        measured_us=measured,
        floor_us=floor_us(cost, limits) * seen.calls,
        predicted_gain_us=gain,
        flops=0.0,
        bytes=cost.bytes * seen.calls,
        bound="memory",
        details={
            "kind": site.kind,
            "activation": site.activation,
            "calls": seen.calls,
            "problem": problem.to_json(),
            "advice": site.advice,
        },
    )


def _unit(
    forward: Callable[[Tensor], Tensor], site: Diagonal, x: Tensor, train: bool
) -> Callable[[], Any]:
    if not train:
        return lambda: forward(x)
    dy = torch.ones_like(x)

    def run() -> None:
        x.grad = None
        forward(x).backward(dy)

    return run


def _problem(site: Diagonal, x: Tensor, train: bool) -> Problem:
    bias = None if site.bias is None else getattr(site.module, site.bias)
    found = problem_of(x, bias, None, site.activation, train)
    return found.with_piece(STEP) if train else found


def _words(site: Diagonal, before: float, after: float) -> str:
    what = {
        rule.LAYER_SCALE: f"{type(site.module).__name__} scales {site.features} features",
        rule.AFFINE: f"{type(site.module).__name__} scales and shifts {site.features} features",
        rule.LINEAR: f"The weight is exactly diagonal: {site.features} numbers do the work of "
        f"{site.features} x {site.features}",
    }[site.kind]
    return (
        f"{what}: {before:.1f} us a call, {after:.1f} us by diagonal_linear, which passes over "
        f"memory once. Replace it with {site.advice}; a residual added to its result costs no "
        "further pass there."
    )
