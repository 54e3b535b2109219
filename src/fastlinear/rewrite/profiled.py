"""Findings by the profile's times alone: on work that nothing is measured of in its place."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from fastlinear.core.cost import Cost, floor_us, measure_ceilings, roofline
from fastlinear.core.precision import float32_precision
from fastlinear.profile.records import Finding
from fastlinear.profile.site_cost import ITEM_BYTES, linear_cost
from fastlinear.rewrite.session import Session


def profiled(
    session: Session,
    *,
    code: str,
    fqn: str,
    title: str,
    message: Callable[[float], str],
    modules: Collection[str],
    linears: Collection[str],
    details: dict[str, Any],
) -> Finding:
    """A finding without a gain. The times of ``modules`` count, and the arithmetic and the memory
    traffic of ``linears``. ``message`` is made of the microseconds of a step; for the others see
    ``Finding``."""
    cuda, mode = session.device.type == "cuda", "train" if session.train else "inference"
    records = [r for r in session.records if r.fqn in modules]
    measured = sum(r.device_us if cuda else r.cpu_us for r in records)
    cost, dtype = Cost(0.0, 0.0), "float32"
    for site in session.sites.values():
        if site.fqn in linears and site.calls and site.rows and site.dtype in ITEM_BYTES:
            cost, dtype = cost + linear_cost(site, mode), site.dtype
    limits = measure_ceilings(str(session.device), dtype, float32_precision())
    return Finding(
        code=code,
        fqn=fqn,
        title=title,
        message=message(measured),
        measured_us=measured,
        floor_us=floor_us(cost, limits),
        predicted_gain_us=0.0,
        flops=cost.flops,
        bytes=cost.bytes,
        bound=roofline(cost, limits, measured or 1.0).bound,
        details=details,
    )
