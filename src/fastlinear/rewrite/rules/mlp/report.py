"""Chains of linears that stop between modules, as findings: where, and what stands in the way."""

from __future__ import annotations

from fastlinear.core.cost import Cost, floor_us, measure_ceilings, roofline
from fastlinear.core.precision import float32_precision
from fastlinear.profile.records import Finding, LinearSite
from fastlinear.profile.site_cost import ITEM_BYTES, linear_cost
from fastlinear.rewrite.finding import Told
from fastlinear.rewrite.rules.mlp.blocks import Stopped
from fastlinear.rewrite.rules.mlp.find import match
from fastlinear.rewrite.rules.mlp.stops import Stop
from fastlinear.rewrite.session import Session

CODE = "chain_stopped"


def findings(session: Session) -> list[Told]:
    """One for every module in whose forward a chain of linears stops that would go through several
    modules. Nothing is measured here."""
    return [Told(_finding(session, stopped)) for stopped in session.once(match)[1]]


def _finding(session: Session, stopped: Stopped) -> Finding:
    ends = dict.fromkeys(n for s in stopped.stops for n in (s.before, s.after))
    sites = [s for s in session.sites.values() if any(_in(s.fqn, end) for end in ends)]
    names = {s.fqn for s in sites}
    cuda = session.device.type == "cuda"
    records = [r for r in session.records if r.fqn in names]
    measured = sum(r.device_us if cuda else r.cpu_us for r in records)
    cost = _cost(sites, "train" if session.train else "inference")
    dtype = next((s.dtype for s in sites if s.dtype in ITEM_BYTES), "float32")
    limits = measure_ceilings(str(session.device), dtype, float32_precision())
    return Finding(
        code=CODE,
        fqn=stopped.fqn,
        title="chain of linears stops between modules",
        message=f"{'; '.join(map(_words, stopped.stops))}. One call of mlp computes a chain of "
        "linears that follow each other with one activation between them.",
        measured_us=measured,
        floor_us=floor_us(cost, limits),
        predicted_gain_us=0.0,
        flops=cost.flops,
        bytes=cost.bytes,
        bound=roofline(cost, limits, measured or 1.0).bound,
        details={"stops": [[s.before, s.after, s.reason] for s in stopped.stops]},
    )


def _words(stop: Stop) -> str:
    return f"{stop.before!r} to {stop.after!r} is no one chain: {stop.reason}"


def _in(name: str, end: str) -> bool:
    return name == end or name.startswith(f"{end}.")


def _cost(sites: list[LinearSite], mode: str) -> Cost:
    total = Cost(0.0, 0.0)
    for site in sites:
        if site.calls and site.rows and site.dtype in ITEM_BYTES:
            total += linear_cost(site, mode)
    return total
