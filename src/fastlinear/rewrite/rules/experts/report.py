"""Mixtures of experts as findings: equal layers on rows that data chose, which no trace follows."""

from __future__ import annotations

from fastlinear.core.cost import Cost, floor_us, measure_ceilings, roofline
from fastlinear.core.precision import float32_precision
from fastlinear.profile.records import Finding
from fastlinear.profile.site_cost import ITEM_BYTES, linear_cost
from fastlinear.rewrite.finding import Told
from fastlinear.rewrite.in_code import in_code_together
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.rules.experts.lists import Experts, match
from fastlinear.rewrite.session import Session

CODE = "ragged_linear"


def findings(session: Session) -> list[Told]:
    """One for every list of equal experts that ran on different numbers of rows in a forward that
    cannot be traced. Nothing is measured here."""
    found = []
    for one in match(session.model, session.sites.values()):
        if session.model.get_submodule(one.fqn) not in session.arguments:
            continue
        offers = session.offers(one.fqn)
        if isinstance(offers, Refusal):
            found.append(Told(_finding(session, one, offers.reason.rstrip("."))))
    return found


def _finding(session: Session, one: Experts, why: str) -> Finding:
    inside = {n for name in one.names for n in (name, *_below(session, name))}
    cuda = session.device.type == "cuda"
    records = [r for r in session.records if r.fqn in inside]
    measured = sum(r.device_us if cuda else r.cpu_us for r in records)
    mode = "train" if session.train else "inference"
    cost, dtype = Cost(0.0, 0.0), "float32"
    for site in session.sites.values():
        if site.fqn in one.linears and site.calls and site.rows and site.dtype in ITEM_BYTES:
            cost, dtype = cost + linear_cost(site, mode), site.dtype
    limits = measure_ceilings(str(session.device), dtype, float32_precision())
    called = sorted(rows for rows in one.rows if rows)
    layers = len(one.layers)
    what = "linears" if one.layers[0] == one.names else f"experts of {layers} linears"
    advice = _advice(session, one)
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


def _below(session: Session, fqn: str) -> list[str]:
    return [f"{fqn}.{n}" for n, _ in session.model.get_submodule(fqn).named_modules() if n]


def _advice(session: Session, one: Experts) -> str:
    """One call of ``ragged_linear``, of the first layer."""
    held = in_code_together(session.model, one.layers[0])
    first = session.model.get_submodule(one.layers[0][0])
    bias = "" if first.bias is None else f", torch.stack([m.bias for m in {held}])"
    return (
        f"fl.ragged_linear(x, torch.stack([m.weight for m in {held}]), group_sizes{bias}), "
        "the weights stacked once"
    )
