"""From records and sites to findings: what wastes time, how much, and the least possible."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastlinear.core.cost import Ceilings, Cost, floor_us
from fastlinear.ops.common.activations import ACTIVATIONS
from fastlinear.profile.attribute import ENGINE, PYTHON
from fastlinear.profile.records import Finding, LinearSite, Record
from fastlinear.profile.sites import Share

CeilingsOf = Callable[[str, str], Ceilings]
"""(dtype name, float32 matmul precision) → measured limits of the device."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
_ATTAINABLE = 0.7  # of the floor's rate: what a good kernel reaches on an ordinary shape
_NOTICEABLE = 0.01  # of the step: below this share a finding is not worth reading
_LAUNCH_BOUND = 0.3
_RATE_LIMITED = 0.2  # floor over measured time from which the arithmetic rate is what limits
_TINY_DIM = 16  # a tensor-core tile's or a vector register's width in elements


@dataclass(frozen=True)
class Step:
    """What diagnosis knows about the step as a whole.

    Attributes:
        mode: ``"inference"`` or ``"train"``.
        device: ``"cpu"`` or ``"cuda"``.
        step_us: wall time of one step.
        busy_us: time per step in which the device ran something.
        precision: the float32 matmul precision in force.
        op_us: host time of the smallest op torch can run, per call.
    """

    mode: str
    device: str
    step_us: float
    busy_us: float
    precision: str
    op_us: float


def diagnose(
    step: Step,
    records: tuple[Record, ...],
    sites: tuple[LinearSite, ...],
    shares: dict[str, Share],
    ceilings_of: CeilingsOf,
) -> tuple[Finding, ...]:
    """All findings, largest predicted gain first. ``ceilings_of`` is asked only when needed."""
    timer = _Timer(step, records)
    found: list[Finding | None] = [_launch_bound(step, records, sites, ceilings_of)]
    for site in sites:
        if not site.calls or not site.rows or site.dtype not in ITEM_BYTES:
            continue
        if site.code == "ok" and site.fqn in shares:
            found.append(_linear_activation(step, site, shares[site.fqn], timer, ceilings_of))
        found.append(_no_tensor_cores(step, site, timer, ceilings_of))
        found.append(_slow_dims(step, site, timer, ceilings_of))
    kept = [f for f in found if f is not None]
    return tuple(sorted(kept, key=lambda f: -f.predicted_gain_us))


def linear_cost(site: LinearSite, mode: str, *, k: int | None = None, n: int | None = None) -> Cost:
    """Least work of one site in one step: forward, and in train mode dx, dW and db.

    Forward: 2MNK flops; reads x, W, b, writes y. Backward: reads dy and, for the activation's
    derivative, one (M, N) tensor; for dx 2MNK flops, reads W, writes dx; for dW and db 2MNK flops,
    reads x, writes both. Only gradients the step really computes are counted.
    """
    m = site.rows
    k, n = k or site.in_features, n or site.out_features
    size = ITEM_BYTES[site.dtype]
    bias = n if site.bias else 0
    cost = Cost(2.0 * m * n * k, size * (m * k + n * k + bias + m * n))
    if mode != "train":
        return cost
    if not (site.input_grad or site.weight_grad):
        return cost
    kept = m * n if _saves(site) == "pre" else 0  # the forward writes it besides y
    saved = m * n if _saves(site) != "none" else 0
    cost += Cost(0.0, size * (kept + m * n + saved))
    for needed in (site.input_grad, site.weight_grad):
        if needed:
            cost += Cost(2.0 * m * n * k, size * (m * k + n * k))
    return cost + Cost(0.0, size * bias if site.weight_grad else 0)


def _saves(site: LinearSite) -> str:
    return ACTIVATIONS[site.activation or "none"].saved


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
        gain = max(0.0, forward - (pass_us if _saves(site) == "pre" else 0.0))
        gain += min(backward, pass_us if site.bias else 0.0)
    gain = max(0.0, min(gain, measured - floor))
    where = site.activation_fqn or f"{site.parent_fqn or 'the model'}.forward"
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


def _launch_bound(
    step: Step,
    records: tuple[Record, ...],
    sites: tuple[LinearSite, ...],
    ceilings_of: CeilingsOf,
) -> Finding | None:
    """The host, not the device, sets the pace.

    On CUDA: the share of the step's wall time in which no kernel runs. On a CPU, which has no
    such clock: ops of one step times the measured cost of the smallest op torch can run, over the
    step's wall time. That counts no module or Python overhead, so it is a lower bound of the
    overhead; the predicted gain is all of it, an upper bound of what fewer or larger ops can save.
    """
    ops = sum(r.calls for r in records if r.op not in (PYTHON, ENGINE))
    waste = step.step_us - step.busy_us if step.device == "cuda" else ops * step.op_us
    waste = min(max(0.0, waste), step.step_us)
    share = waste / step.step_us if step.step_us else 0.0
    if share < _LAUNCH_BOUND:
        return None
    real = [s for s in sites if s.calls and s.rows and s.dtype in ITEM_BYTES]
    cost, floor = Cost(0.0, 0.0), 0.0
    for site in real:
        one = linear_cost(site, step.mode)
        cost += one
        floor += floor_us(one, ceilings_of(site.dtype, step.precision))
    how = (
        f"no kernel runs for {waste:.0f} of {step.step_us:.0f} µs"
        if step.device == "cuda"
        else f"starting {ops:.0f} ops costs about {waste:.0f} of {step.step_us:.0f} µs"
    )
    remedy = "CUDA graphs, larger batches or" if step.device == "cuda" else "Larger batches or"
    return Finding(
        code="launch_bound",
        fqn="",
        title=f"Launch-bound: {share:.0%} of the step",
        message=f"In one step {how}. {remedy} fewer, larger ops would save up to that.",
        measured_us=step.step_us,
        floor_us=floor,
        predicted_gain_us=waste,
        flops=cost.flops,
        bytes=cost.bytes,
        bound="launch",
        details={"share": share, "ops": ops, "op_us": step.op_us, "busy_us": step.busy_us},
    )


def _bound(cost: Cost, ceilings: Ceilings) -> str:
    compute = cost.flops / ceilings.flops_per_s >= cost.bytes / ceilings.bytes_per_s
    return "compute" if compute else "memory"
