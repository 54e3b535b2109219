"""Measuring one case: verify every contender, time the valid ones interleaved, publish all."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from fastlinear.bench import models
from fastlinear.bench import rows as rows_of
from fastlinear.bench.case import Case
from fastlinear.bench.ceilings import ceilings_for, measured_again
from fastlinear.bench.peers import OURS, Peer, peers, problem_of
from fastlinear.bench.rows import Row
from fastlinear.bench.work import Unit, Work, make_work
from fastlinear.core.compare import Verdict, judge
from fastlinear.core.environment import environment
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.timing import Samples, first_call_us, interleave, peak_memory_bytes
from fastlinear.dispatch.tune import tune as tune_problem
from fastlinear.ops.linear_act.selection import choices, tuning_order


@dataclass(frozen=True)
class Settings:
    """What holds for every case of a run.

    Attributes:
        device: where to run.
        rounds, budget_s: limits of each interleaved measurement.
        skip: contenders to leave out.
        tune: tune fastlinear for each case first.
        command: the command that repeats the run.
    """

    device: torch.device
    rounds: int
    budget_s: float
    skip: frozenset[str] = frozenset()
    tune: bool = False
    command: str = ""

    def facts(self) -> dict[str, Any]:
        """What every row of a case carries about the run, read at the time of the case."""
        return {
            "env": environment(self.device),
            "command": self.command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }


@dataclass(frozen=True)
class _Ready:
    """A contender that took part: its unit of work, verdicts and first call."""

    peer: Peer
    unit: Unit
    verdicts: list[Verdict]
    first_us: float

    @property
    def valid(self) -> bool:
        return all(v.passed for v in self.verdicts)


def run_case(case: Case, settings: Settings, contenders: Sequence[Peer] | None = None) -> list[Row]:
    """All rows of one case."""
    whole = case.family == "model"
    if settings.tune and not whole:
        _tune(case, settings.device)
    work: Any = (models.make_work if whole else make_work)(case, settings.device)
    field = models.peers(case) if whole else peers(case)
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
    for peer in field if contenders is None else contenders:
        why = "left out by the caller" if peer.name in settings.skip else peer.reason_not(case)
        if why is not None:
            rows.append(skipped(case, peer.name, why, facts))
            continue
        try:
            ready.append(_prepare(peer, work, settings.device, oracle, theirs))
        except Exception as error:  # noqa: BLE001 - a contender that breaks is itself a result
            reason = f"failed: {type(error).__name__}: {first_line(error)}"
            rows.append(skipped(case, peer.name, reason, facts))
    del oracle, theirs
    chosen = {
        metric: work.chosen() if whole else _chosen(case, work, metric == "device")
        for metric in case.metrics
    }
    for one in ready:
        if not one.valid:
            row = rows_of.blank(case, one.peer.name, case.metrics[0], facts)
            rows.append(rows_of.judged(row, one.verdicts))
    valid = [one for one in ready if one.valid]
    for metric in case.metrics:
        rows += _measured(case, work, valid, metric, settings, facts, {OURS: chosen[metric]})
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()
    gc.collect()
    if settings.device.type == "cuda":
        torch.cuda.empty_cache()
    return rows


def _prepare(
    peer: Peer,
    work: Work,
    device: torch.device,
    oracle: tuple[torch.Tensor, ...],
    theirs: tuple[torch.Tensor, ...],
) -> _Ready:
    """Build a contender, take its first call, judge it, and rehearse the calls to come."""
    own = work.private()
    unit = peer.build(own)
    results: list[tuple[torch.Tensor, ...]] = []
    with work.mode():
        first = first_call_us(lambda: results.append(unit(0)), device)
        verdicts = [
            judge(name, ours, torchs, exact)
            for name, ours, torchs, exact in zip(
                work.names, results.pop(), theirs, oracle, strict=True
            )
        ]
        for i in range(len(work.stacks)):
            unit(i)
    return _Ready(peer, unit, verdicts, first)


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
        row["chosen"] = chosen.get(one.peer.name)
        rows.append(rows_of.judged(row, one.verdicts))
    if metric == "first_call":
        return [
            row | {"median_us": one.first_us, "samples_us": [one.first_us], "how": "clock"}
            for row, one in zip(rows, ready, strict=True)
        ]
    arms = {one.peer.name: _rotating(one.unit, len(work.stacks)) for one in ready}
    with work.mode():
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
    return _placed(rows, samples, work, settings)


def _placed(
    rows: list[Row], samples: Mapping[str, Samples], work: Work, settings: Settings
) -> list[Row]:
    cost = work.cost()
    where = (settings.device, work.case.dtype, cost.bytes)
    limits = ceilings_for(*where)
    placed = [rows_of.timed(row, samples[row["contender"]], cost, limits) for row in rows]
    if any(row["roofline_error"] for row in placed):
        limits = measured_again(limits, *where)
        placed = [rows_of.timed(row, samples[row["contender"]], cost, limits) for row in rows]
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


def _tune(case: Case, device: torch.device) -> None:
    """Both regimes on a GPU: wall time outside CUDA graphs, device time inside."""
    forward = problem_of(case)
    for p in (forward, forward.other_regime()):
        for piece in () if p is None else tuning_order(p):
            tune_problem(piece, device=device)


def _chosen(case: Case, work: Work, captured: bool) -> dict[str, str]:
    """Piece → backend and source: what dispatch takes for one layer, in a CUDA graph or not."""
    stack = work.stacks[0]
    made = choices(
        stack.x,
        stack.weights[0],
        stack.biases[0],
        stack.activation,
        None,
        case.needs_grad,
        captured and stack.x.is_cuda,
    )
    return {c.problem.piece: f"{c.backend.name} ({c.source})" for c in made}


def skipped(case: Case, name: str, why: str, facts: Mapping[str, Any]) -> Row:
    """The row of a contender that takes no part, with its reason."""
    return rows_of.blank(case, name, case.metrics[0], facts) | {"skipped": why}


def first_line(error: BaseException) -> str:
    """The first line of an error's message, shortened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0][:300] if lines else ""
