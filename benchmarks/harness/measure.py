"""Measuring one case: verify every contender, time the valid ones interleaved, publish all."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.harness import rows as rows_of
from benchmarks.harness.case import Case
from benchmarks.harness.ceilings import ceilings_for, measured_again
from benchmarks.harness.kernels import kernels_of
from benchmarks.harness.kinds import KINDS
from benchmarks.harness.peer import OURS, Peer, Told
from benchmarks.harness.rows import Row
from benchmarks.harness.settings import Settings
from benchmarks.harness.work import Unit, Work
from fastlinear.core.compare import DEFAULT_FACTOR, Verdict, judge
from fastlinear.core.cost import Ceilings
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.timing import (
    Samples,
    first_call_us,
    interleave,
    peak_memory_bytes,
    recorded,
)
from fastlinear.fastpath import lookup

_MOST_KEPT = 0.25  # of a GPU's memory between cases: freeing and asking again takes time


@dataclass(frozen=True)
class _Ready:
    """A contender that took part: its unit of work, verdicts, first call, its own choices, and how
    many times the roofline it may reach."""

    peer: Peer
    unit: Unit
    verdicts: list[Verdict]
    first_us: float
    chosen: Mapping[str, str] | None
    highest: float

    @property
    def valid(self) -> bool:
        return all(v.passed for v in self.verdicts)


def run_case(case: Case, settings: Settings, contenders: Sequence[Peer] | None = None) -> list[Row]:
    """All rows of one case."""
    try:
        return _rows_of(case, settings, contenders)
    finally:
        release(settings.device)


def _rows_of(case: Case, settings: Settings, contenders: Sequence[Peer] | None) -> list[Row]:
    kind = KINDS[case.family]
    if settings.tune:
        kind.tune(case, settings.device)
    work = kind.make_work(case, settings.device)
    facts = settings.facts() | {
        "shapes": work.shapes(),
        "strides": work.strides(),
        "input_sets": len(work.stacks),
        "cold_l2": work.cold,
    }
    oracle = work.reference(torch.float64)
    theirs = work.reference(FLOAT_DTYPES[case.dtype])
    rows: list[Row] = []
    ready: list[_Ready] = []
    for peer in kind.peers(case) if contenders is None else contenders:
        why = settings.why_not(peer, case)
        if why is not None:
            rows.append(skipped(case, peer.name, why, facts))
            continue
        try:
            ready.append(_prepare(peer, work, settings.device, oracle, theirs))
        except Exception as error:  # noqa: BLE001 - a contender that breaks is itself a result
            reason = f"failed: {type(error).__name__}: {first_line(error)}"
            rows.append(skipped(case, peer.name, reason, facts))
    del oracle, theirs
    lookup.settle()
    chosen = {metric: kind.chosen(case, work, metric == "device") for metric in case.metrics}
    for one in ready:
        if not one.valid:
            row = rows_of.blank(case, one.peer.name, case.metrics[0], facts)
            rows.append(rows_of.judged(row, one.verdicts))
    valid = [one for one in ready if one.valid]
    for metric in case.metrics:
        rows += _measured(case, work, valid, metric, settings, facts, {OURS: chosen[metric]})
    return rows


def release(device: torch.device, kept: float = _MOST_KEPT) -> None:
    """Forget what was compiled and what is held in cycles; give memory back beyond ``kept``.

    Compiled modules share the code they were compiled from, and PyTorch compiles no more than a
    few for the same code: the next case must not find those of the last.
    """
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device)
        if held > kept * torch.cuda.get_device_properties(device).total_memory:
            torch.cuda.empty_cache()


def build_and_call(peer: Peer, work: Any) -> None:
    """Build a contender and call it once, for what that leaves behind."""
    built = peer.build(work.private())
    unit = built.unit if isinstance(built, Told) else built
    with work.mode():
        unit(0)


def _prepare(
    peer: Peer,
    work: Work,
    device: torch.device,
    oracle: tuple[torch.Tensor, ...],
    theirs: tuple[torch.Tensor, ...],
) -> _Ready:
    """Build a contender, take its first call, judge it, and rehearse the calls to come."""
    own = work.private()
    built = peer.build(own)
    unit, chosen = (built.unit, built.chosen) if isinstance(built, Told) else (built, None)
    if peer.reference is not None:
        oracle = peer.reference(work, torch.float64)
        theirs = peer.reference(work, FLOAT_DTYPES[work.case.dtype])
    results: list[tuple[torch.Tensor, ...]] = []
    with work.mode():
        first = first_call_us(lambda: results.append(unit(0)), device)
        found = {"": results.pop()}
        if peer.ours and device.type == "cuda" and "device" in peer.metrics:
            # calls in a CUDA graph have choices of their own
            graph = recorded(lambda: results.append(unit(0)), device)
            found |= {} if graph is None else {" in a CUDA graph": results.pop()}
            results.clear()
        factor = DEFAULT_FACTOR * peer.error_growth(work)
        verdicts = [
            judge(f"{name}{where}", ours, torchs, exact, factor=factor)
            for where, result in found.items()
            for name, ours, torchs, exact in zip(
                peer.names(work), peer.gathered(work, result), theirs, oracle, strict=True
            )
        ]
        for i in range(len(work.stacks)):
            unit(i)
    return _Ready(peer, unit, verdicts, first, chosen, peer.saving(work))


def _measured(
    case: Case,
    work: Work,
    ready: list[_Ready],
    metric: str,
    settings: Settings,
    facts: Mapping[str, Any],
    chosen: Mapping[str, Any],
) -> list[Row]:
    """Rows of one metric for the contenders it makes sense for."""
    ready = [one for one in ready if metric in one.peer.metrics]
    rows = []
    for one in ready:
        row = rows_of.blank(case, one.peer.name, metric, facts)
        row["chosen"] = one.chosen or chosen.get(one.peer.name)
        rows.append(rows_of.judged(row, one.verdicts))
    if metric == "first_call":
        return [
            row | {"median_us": one.first_us, "samples_us": [one.first_us], "how": "clock"}
            for row, one in zip(rows, ready, strict=True)
        ]
    arms = {one.peer.name: _rotating(one.unit, len(work.stacks)) for one in ready}
    with work.mode():
        if metric == "kernels":
            found = [kernels_of(arm, settings.device) for arm in arms.values()]
            return [row | {"kernels": names} for row, names in zip(rows, found, strict=True)]
        if metric == "peak_memory":
            peaks = [peak_memory_bytes(arm, settings.device) for arm in arms.values()]
            return [row | {"peak_bytes": peak} for row, peak in zip(rows, peaks, strict=True)]
        samples = interleave(
            arms,
            device=settings.device,
            metric=metric,
            rounds=settings.rounds,
            budget_s=settings.budget_s,
        )
    return _placed(rows, samples, work, settings, {one.peer.name: one.highest for one in ready})


def _placed(
    rows: list[Row],
    samples: Mapping[str, Samples],
    work: Work,
    settings: Settings,
    highest: Mapping[str, float],
) -> list[Row]:
    cost = work.cost()
    where = (settings.device, work.case.dtype, cost.bytes, work.cold)

    def place(limits: Ceilings) -> list[Row]:
        return [
            rows_of.timed(row, samples[name], cost, limits, highest[name])
            for row in rows
            for name in [row["contender"]]
        ]

    limits = ceilings_for(*where)
    placed = place(limits)
    if any(row["roofline_error"] for row in placed):
        placed = place(measured_again(limits, *where))
    return rows_of.compared(placed, samples)


def _rotating(unit: Unit, sets: int) -> Callable[[], Any]:
    """A call without arguments that takes the next input set each time."""
    if sets == 1:
        return lambda: unit(0)
    state = [0]

    def call() -> Any:
        state[0] = (state[0] + 1) % sets
        return unit(state[0])

    return call


def skipped(case: Case, name: str, why: str, facts: Mapping[str, Any]) -> Row:
    """The row of a contender that takes no part, with its reason."""
    return rows_of.blank(case, name, case.metrics[0], facts) | {"skipped": why}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
