"""Mixtures of experts as findings: equal layers on rows that data chose, which no trace follows."""

from __future__ import annotations

from dataclasses import replace

from fastlinear.core.cost import Cost, floor_us, measure_ceilings, roofline
from fastlinear.core.precision import float32_precision
from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.profile.records import Finding
from fastlinear.profile.site_cost import ITEM_BYTES, linear_cost
from fastlinear.rewrite.evaluate.parents import traced
from fastlinear.rewrite.in_code import in_code_together
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.rules.experts import find as rule
from fastlinear.rewrite.rules.experts.find import Experts
from fastlinear.rewrite.work import Work

CODE = "ragged_linear"


def find(work: Work) -> None:
    """Add a finding for every list of equal experts that ran on different numbers of rows in a
    forward that cannot be traced. Nothing is rewritten or measured here."""
    if not work.allows(NAME):
        return
    found = []
    for one in rule.match(work.model, work.profile.sites):
        if work.model.get_submodule(one.fqn) not in work.arguments:
            continue
        offers = traced(work, one.fqn)
        if isinstance(offers, Refusal):
            found.append(_finding(work, one, offers.reason.rstrip(".")))
    ranked = sorted((*work.profile.findings, *found), key=lambda f: -f.predicted_gain_us)
    work.profile = replace(work.profile, findings=tuple(ranked))


def _finding(work: Work, one: Experts, why: str) -> Finding:
    inside = {n for name in one.names for n in (name, *_below(work, name))}
    cuda = work.runner.device.type == "cuda"
    records = [r for r in work.profile.records if r.fqn in inside]
    measured = sum(r.device_us if cuda else r.cpu_us for r in records)
    cost, dtype = Cost(0.0, 0.0), "float32"
    for site in work.profile.sites:
        if site.fqn in one.linears and site.calls and site.rows and site.dtype in ITEM_BYTES:
            cost, dtype = cost + linear_cost(site, work.config.mode), site.dtype
    limits = measure_ceilings(str(work.runner.device), dtype, float32_precision())
    called = sorted(rows for rows in one.rows if rows)
    layers = len(one.layers)
    what = "linears" if one.layers[0] == one.names else f"experts of {layers} linears"
    advice = _advice(work, one)
    return Finding(
        code=CODE,
        fqn=one.fqn,
        title=f"{len(one.names)} equal {what} on rows of their own",
        message=(
            f"{len(called)} of {len(one.names)} equal {what} ran one after another, on "
            f"{called[0]} to {called[-1]} rows each: {measured:.1f} us. Which rows go where is "
            f"decided in a run, so optimize_ rewrites nothing: {why}. Sort the rows by expert and "
            f"make one call a layer: {advice}. Not measured."
        ),
        measured_us=measured,
        floor_us=floor_us(cost, limits),
        predicted_gain_us=0.0,
        flops=cost.flops,
        bytes=cost.bytes,
        bound=roofline(cost, limits, measured or 1.0).bound,
        details={
            "kind": "experts",
            "experts": list(one.names),
            "rows": list(one.rows),
            "linears": list(one.linears),
            "advice": advice,
        },
    )


def _below(work: Work, fqn: str) -> list[str]:
    return [f"{fqn}.{n}" for n, _ in work.model.get_submodule(fqn).named_modules() if n]


def _advice(work: Work, one: Experts) -> str:
    """One call of ``ragged_linear``, of the first layer."""
    held = in_code_together(work.model, one.layers[0])
    first = work.model.get_submodule(one.layers[0][0])
    bias = "" if first.bias is None else f", torch.stack([m.bias for m in {held}])"
    return (
        f"fl.ragged_linear(x, torch.stack([m.weight for m in {held}]), group_sizes{bias}), "
        "the weights stacked once"
    )
