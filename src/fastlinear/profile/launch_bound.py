"""The finding that the host sets the pace, and whether CUDA graphs could change that."""

from __future__ import annotations

from typing import Any

from fastlinear.core.cost import Cost, floor_us
from fastlinear.profile.attribute import ENGINE, PYTHON
from fastlinear.profile.records import Finding, LinearSite, Record
from fastlinear.profile.site_cost import ITEM_BYTES, CeilingsOf, Step, linear_cost

OFFER = "graphed"
"""``details["offer"]`` of a finding that CUDA graphs could remove."""

LAUNCH_BOUND = 0.3  # of the step without a kernel
WAITS = frozenset(
    {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}
    | {"aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"}
)  # sizes or branches come from the device's values: no CUDA graph can hold that
REPLAY_US = {"inference": 30.0, "train": 300.0}  # host time of a replay, 8 layers on an H200


def launch_bound(
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

    On CUDA the finding offers ``fl.graphed`` (``details["offer"]``) unless the step's ops show that
    the host waits for values of the device; the gain is then what a replay would leave.
    """
    ops = sum(r.calls for r in records if r.op not in (PYTHON, ENGINE))
    waste = step.step_us - step.busy_us if step.device == "cuda" else ops * step.op_us
    waste = min(max(0.0, waste), step.step_us)
    share = waste / step.step_us if step.step_us else 0.0
    if share < LAUNCH_BOUND:
        return None
    real = [s for s in sites if s.calls and s.rows and s.dtype in ITEM_BYTES]
    cost, floor = Cost(0.0, 0.0), 0.0
    for site in real:
        one = linear_cost(site, step.mode)
        cost += one
        floor += floor_us(one, ceilings_of(site.dtype, step.precision))
    gain = waste
    details: dict[str, Any] = {
        "share": share,
        "ops": ops,
        "op_us": step.op_us,
        "busy_us": step.busy_us,
    }
    if step.device == "cuda":
        waits = sorted({r.op for r in records} & WAITS)
        if waits:
            details["no_graph"] = f"The host waits for a value of the device ({waits[0]})."
        else:
            details["offer"] = OFFER
            gain = max(0.0, step.step_us - max(step.busy_us, REPLAY_US[step.mode]))
    how = (
        f"no kernel runs for {waste:.0f} of {step.step_us:.0f} µs"
        if step.device == "cuda"
        else f"starting {ops:.0f} ops costs about {waste:.0f} of {step.step_us:.0f} µs"
    )
    remedy = "Larger batches or"
    if "offer" in details:
        remedy = "CUDA graphs (fl.graphed, or optimize_ with graphs=True), larger batches or"
    return Finding(
        code="launch_bound",
        fqn="",
        title=f"Launch-bound: {share:.0%} of the step",
        message=f"In one step {how}. {remedy} fewer, larger ops would save up to that.",
        measured_us=step.step_us,
        floor_us=floor,
        predicted_gain_us=gain,
        flops=cost.flops,
        bytes=cost.bytes,
        bound="launch",
        details=details,
    )
