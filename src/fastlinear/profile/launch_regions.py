"""Parts of a model that are launch-bound by themselves, where the model as a whole is no offer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from fastlinear.core.cost import Cost, floor_us
from fastlinear.profile.attribute import ENGINE, PYTHON
from fastlinear.profile.launch_bound import LAUNCH_BOUND, OFFER, REPLAY_US, WAITS
from fastlinear.profile.records import Finding, LinearSite, Record
from fastlinear.profile.site_cost import ITEM_BYTES, CeilingsOf, Step, linear_cost

CODE = "launch_bound_region"
_NOTICEABLE = 0.01  # of the step


@dataclass
class _Part:
    """A module with all it holds, in one step.

    Attributes:
        calls: of its own forward.
        launches: ops that ran a kernel, a lower bound of the kernels.
        waits: ops at which the host waits for the device.
    """

    fqn: str
    module_class: str = ""
    calls: int = 0
    host_us: float = 0.0
    device_us: float = 0.0
    launches: int = 0
    waits: set[str] = field(default_factory=set)
    children: list[_Part] = field(default_factory=list)

    def add(self, r: Record) -> None:
        self.host_us += r.cpu_us
        self.device_us += r.device_us
        if r.op not in (PYTHON, ENGINE) and r.device_us > 0:
            self.launches += r.calls
        if r.op in WAITS:
            self.waits.add(r.op)


def launch_regions(
    step: Step,
    records: tuple[Record, ...],
    sites: tuple[LinearSite, ...],
    ceilings_of: CeilingsOf,
    apart: Collection[str] = ("",),
) -> tuple[Finding, ...]:
    """The outermost submodules that set the pace by their launches, in the order of the records.

    A module with all it holds is one when its kernels take at most 70% of the time the host spends
    on it, no op in it waits for the device, and replaying it as a CUDA graph would save at
    least 1% of the step: host time less what remains, a replay for each call or its kernels,
    whichever is longer. What it saves is at most the time in which the device has nothing to do
    in the whole step. Inside such a module no other is named.

    Args:
        step: what is known of the step; on a CPU nothing is found.
        records: host and device time by module and op.
        sites: the linears, for the least time of the same work.
        ceilings_of: measured limits of the device; asked only for what is found.
        apart: names that are not to be offered themselves, only their parts.
    """
    if step.device != "cuda":
        return ()
    idle = max(0.0, step.step_us - step.busy_us)
    found = []
    waiting = [_tree(records)]
    while waiting:
        part = waiting.pop(0)
        gain = _gain(part, step, idle)
        if part.fqn in apart or part.waits or not part.calls or gain < _NOTICEABLE * step.step_us:
            waiting = part.children + waiting
            continue
        found.append(_finding(part, gain, step, sites, ceilings_of))
    return tuple(found)


def _gain(part: _Part, step: Step, idle: float) -> float:
    saved = part.host_us - part.device_us
    if not part.host_us or saved < LAUNCH_BOUND * part.host_us:
        return 0.0
    left = max(part.device_us, REPLAY_US[step.mode] * part.calls)
    return min(part.host_us - left, idle)


def _tree(records: Iterable[Record]) -> _Part:
    """Every module that the records name, with the times of all it holds."""
    root = _Part("")
    parts = {"": root}
    for r in records:
        names = r.fqn.split(".") if r.fqn else []
        part = root
        part.add(r)
        for i in range(len(names)):
            fqn = ".".join(names[: i + 1])
            if fqn not in parts:
                parts[fqn] = _Part(fqn)
                part.children.append(parts[fqn])
            part = parts[fqn]
            part.add(r)
        part.module_class = r.module_class
        if r.op == PYTHON and r.direction == "forward":
            part.calls += r.calls
    return root


def _finding(
    part: _Part,
    gain: float,
    step: Step,
    sites: tuple[LinearSite, ...],
    ceilings_of: CeilingsOf,
) -> Finding:
    cost, floors = Cost(0.0, 0.0), defaultdict(float)
    for site in sites:
        inside = site.fqn == part.fqn or site.fqn.startswith(f"{part.fqn}.")
        if inside and site.calls and site.rows and site.dtype in ITEM_BYTES:
            one = linear_cost(site, step.mode)
            cost += one
            floors[site.fqn] = floor_us(one, ceilings_of(site.dtype, step.precision))
    return Finding(
        code=CODE,
        fqn=part.fqn,
        title=f"Launch-bound part: {part.module_class}",
        message=(
            f"In one step the host spends {part.host_us:.0f} µs on its {part.launches} launches, "
            f"the device {part.device_us:.0f} µs on their work. As CUDA graphs (fl.graphed, or "
            "optimize_ with Config(graphs=True) or --graphs) it would take about "
            f"{gain:.0f} µs less; graphs take memory."
        ),
        measured_us=part.host_us,
        floor_us=sum(floors.values()),
        predicted_gain_us=gain,
        flops=cost.flops,
        bytes=cost.bytes,
        bound="launch",
        details={
            "offer": OFFER,
            "share": 1.0 - part.device_us / part.host_us,
            "class": part.module_class,
            "calls": part.calls,
            "launches": part.launches,
            "host_us": part.host_us,
            "device_us": part.device_us,
        },
    )
