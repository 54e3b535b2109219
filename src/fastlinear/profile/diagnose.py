"""From records and sites to findings: what wastes time, how much, and the least possible."""

from __future__ import annotations

from fastlinear.core.cost import Ceilings, Cost, floor_us
from fastlinear.profile.between import pointwise_between
from fastlinear.profile.launch_bound import launch_bound
from fastlinear.profile.launch_regions import launch_regions
from fastlinear.profile.records import Finding, LinearSite, Record
from fastlinear.profile.site_cost import ITEM_BYTES, CeilingsOf, Step, linear_cost, saves
from fastlinear.profile.sites import Share

__all__ = ["CeilingsOf", "Step", "diagnose", "linear_cost"]

_ATTAINABLE = 0.7  # of the floor's rate: what a good kernel reaches on an ordinary shape
_NOTICEABLE = 0.01  # of the step: below this share a finding is not worth reading
_RATE_LIMITED = 0.2  # floor over measured time from which the arithmetic rate is what limits
_TINY_DIM = 16  # a tensor-core tile's or a vector register's width in elements


def diagnose(
    step: Step,
    records: tuple[Record, ...],
    sites: tuple[LinearSite, ...],
    shares: dict[str, Share],
    ceilings_of: CeilingsOf,
) -> tuple[Finding, ...]:
    """All findings, largest predicted gain first. ``ceilings_of`` is asked only when needed."""
    timer = _Timer(step, records)
    whole = launch_bound(step, records, sites, ceilings_of)
    found: list[Finding | None] = [whole]
    if whole is None or "offer" not in whole.details:
        found += launch_regions(step, records, sites, ceilings_of)
    for site in sites:
        if not site.calls or not site.rows or site.dtype not in ITEM_BYTES:
            continue
        if site.code == "ok" and site.fqn in shares:
            found.append(_linear_activation(step, site, shares[site.fqn], timer, ceilings_of))
        found.append(_no_tensor_cores(step, site, timer, ceilings_of))
        found.append(_slow_dims(step, site, timer, ceilings_of))
    kept = [f for f in found if f is not None]
    between = pointwise_between(step, records, sites, kept, ceilings_of)
    kept += [] if between is None else [between]
    return tuple(sorted(kept, key=lambda f: -f.predicted_gain_us))


class _Timer:
    """Looks up measured times: of the device where there is one, of the host on a CPU."""

    def __init__(self, step: Step, records: tuple[Record, ...]) -> None:
        self.cuda = step.device == "cuda"
        self.records = records

    def us(self, fqn: str, direction: str | None = None, ops: tuple[str, ...] = ()) -> float:
        return sum(
            r.device_us if self.cuda else r.cpu_us
            for r in self.records
            if r.fqn == fqn
            and (direction is None or r.direction == direction)
            and (not ops or r.op in ops)
        )

    def activation_us(self, share: Share, direction: str) -> float:
        ops: tuple[str, ...] = ()
        if share.function is not None:
            base = share.function.removesuffix("_")
            camel = "".join(part.title() for part in base.split("_"))
            ops = (
                (f"aten::{base}", f"aten::{base}_")
                if direction == "forward"
                else tuple(f"{camel}Backward{i}" for i in range(3))
            )
        return share.fraction * self.us(share.fqn, direction, ops)


def _linear_activation(
    step: Step, site: LinearSite, share: Share, timer: _Timer, ceilings_of: CeilingsOf
) -> Finding:
    """The activation's own passes over (M, N) can move into the Linear's epilogue.

    Predicted gain: forward, all of the activation's time, less in training the one extra write of
    the pre-activation where the derivative needs it; backward, the pass that reads the derivative
    again for the bias gradient. Never more than the activation's own time, nor more than what lies
    above the floor.
    """
    ceilings = ceilings_of(site.dtype, step.precision)
    cost = linear_cost(site, step.mode)
    floor = floor_us(cost, ceilings)
    forward = timer.activation_us(share, "forward")
    backward = timer.activation_us(share, "backward") if step.mode == "train" else 0.0
    measured = timer.us(site.fqn) + forward + backward
    pass_us = site.rows * site.out_features * ITEM_BYTES[site.dtype] / ceilings.bytes_per_s * 1e6
    gain = forward
    if step.mode == "train":
        gain = max(0.0, forward - (pass_us if saves(site) == "pre" else 0.0))
        gain += min(backward, pass_us if site.bias else 0.0)
    gain = max(0.0, min(gain, measured - floor))
    where = site.activation_fqn or f"in the forward of {site.parent_fqn or 'the model'}"
    return Finding(
        code="linear_activation",
        fqn=site.fqn,
        title=f"Linear, then {site.activation}",
        message=(
            f"{site.activation} ({where}) makes its own pass over {site.rows} × "
            f"{site.out_features} elements: {forward + backward:.1f} of {measured:.1f} µs. "
            "One op can do both."
        ),
        measured_us=measured,
        floor_us=floor,
        predicted_gain_us=gain,
        flops=cost.flops,
        bytes=cost.bytes,
        bound=_bound(cost, ceilings),
        details={
            "activation": site.activation,
            "activation_fqn": site.activation_fqn,
            "how": site.how,
            "activation_forward_us": forward,
            "activation_backward_us": backward,
            "elementwise_pass_us": pass_us,
        },
    )


def _no_tensor_cores(
    step: Step, site: LinearSite, timer: _Timer, ceilings_of: CeilingsOf
) -> Finding | None:
    """float32 on CUDA under ``"highest"``: SIMT units run what tensor cores could run."""
    if not timer.cuda or site.dtype != "float32" or step.precision != "highest":
        return None
    cost = linear_cost(site, step.mode)
    fast = floor_us(cost, ceilings_of("float32", "high"))
    measured = timer.us(site.fqn)
    gain = measured - fast / _ATTAINABLE
    if gain < _NOTICEABLE * step.step_us:
        return None
    ceilings = ceilings_of("float32", "highest")
    if floor_us(cost, ceilings) < _RATE_LIMITED * measured:
        return None  # launches or a poor kernel take the time, not the rate of the SIMT units
    return Finding(
        code="fp32_no_tensor_cores",
        fqn=site.fqn,
        title="float32 without tensor cores",
        message=(
            f"Its float32 products take {measured:.1f} µs because the matmul precision is "
            f"'highest'; at TF32 rate {fast / _ATTAINABLE:.1f} µs is within reach. Allow it with "
            "torch.set_float32_matmul_precision('high') if 10 bits of mantissa are enough."
        ),
        measured_us=measured,
        floor_us=floor_us(cost, ceilings),
        predicted_gain_us=gain,
        flops=cost.flops,
        bytes=cost.bytes,
        bound=_bound(cost, ceilings),
        details={"floor_high_us": fast, "precision": step.precision},
    )


def _slow_dims(
    step: Step, site: LinearSite, timer: _Timer, ceilings_of: CeilingsOf
) -> Finding | None:
    """Dimensions that miss fast paths: 16-bit ones not a multiple of 8 on CUDA, or tiny ones."""
    k, n = site.in_features, site.out_features
    odd = timer.cuda and ITEM_BYTES[site.dtype] == 2 and (k % 8 or n % 8)
    if not odd and min(k, n) >= _TINY_DIM:
        return None
    measured = timer.us(site.fqn)
    if measured < 2 * _NOTICEABLE * step.step_us:
        return None
    ceilings = ceilings_of(site.dtype, step.precision)
    cost = linear_cost(site, step.mode)
    least = 0.05 * measured if timer.cuda else 5 * site.calls * step.op_us
    if floor_us(cost, ceilings) < least:
        return None  # so little work that the call itself, not the shape, takes the time
    padded = linear_cost(site, step.mode, k=-(-k // 8) * 8, n=-(-n // 8) * 8)
    reachable = floor_us(padded, ceilings) / _ATTAINABLE
    if not timer.cuda:
        reachable += site.calls * step.op_us * (3 if step.mode == "train" else 1)
    gain = measured - reachable
    if measured < 2 * reachable or gain < _NOTICEABLE * step.step_us:
        return None
    why = (
        f"{'K' if k % 8 else 'N'} is no multiple of 8, so rows are not 16-byte aligned"
        if odd
        else f"{'K' if k < n else 'N'} = {min(k, n)} fills only part of a tile"
    )
    return Finding(
        code="slow_dims",
        fqn=site.fqn,
        title=f"Slow dimensions K={k}, N={n}",
        message=(
            f"{why}: {measured:.1f} µs where {reachable:.1f} µs is within reach. Padding to the "
            "next multiple of 8 helps if the model may change."
        ),
        measured_us=measured,
        floor_us=floor_us(cost, ceilings),
        predicted_gain_us=gain,
        flops=cost.flops,
        bytes=cost.bytes,
        bound=_bound(cost, ceilings),
        details={"in_features": k, "out_features": n, "dtype": site.dtype},
    )


def _bound(cost: Cost, ceilings: Ceilings) -> str:
    compute = cost.flops / ceilings.flops_per_s >= cost.bytes / ceilings.bytes_per_s
    return "compute" if compute else "memory"
