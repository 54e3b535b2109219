"""Measuring one family: rewritten, verified, and timed beside its peers, as one row."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks.harness.case import Case
from benchmarks.harness.peer import OURS, Peer
from benchmarks.harness.work import Unit
from benchmarks.suite import callers, outcomes, verify
from benchmarks.suite.family import Family
from benchmarks.suite.work import ASKED, SuiteWork, case_of, contenders, make_work
from fastlinear.core.environment import environment
from fastlinear.core.timing import Samples, interleave, paired_ratio
from fastlinear.fastpath import lookup

Row = dict[str, Any]
MEASURED = "measured"
FACTS = ("family", "kind", "mode", "device_type", "dtype", "seed")
"""Keys of a row that say what is measured."""
_CALLS_BEFORE = 3  # calls are recorded at the second of a kind


@dataclass(frozen=True)
class How:
    """How families are measured.

    Attributes:
        device, dtype, mode, seed: where and what.
        seconds: what ``optimize_`` may take for what can be left out.
        rounds, timed_s: limits of the interleaved measurement.
        skip: contenders to leave out.
        command: what repeats the run.
    """

    device: str = "cpu"
    dtype: str = "float32"
    mode: str = "inference"
    seed: int = 0
    seconds: float = 8.0
    rounds: int = 15
    timed_s: float = 3.0
    skip: tuple[str, ...] = ()
    command: str = ""


@dataclass
class Clock:
    """Seconds by stage, and the stage that is under way."""

    stage: str = "start"
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timing(self, stage: str) -> Iterator[None]:
        """Count what is done inside to ``stage``."""
        self.stage, begin = stage, time.monotonic()
        try:
            yield
        finally:
            spent = self.seconds.get(stage, 0.0) + time.monotonic() - begin
            self.seconds[stage] = round(spent, 2)


def blank(family: Family, how: How) -> Row:
    """The row of a family with every key present and nothing measured."""
    return {
        "experiment": "suite",
        "contender": OURS,
        "metric": "wall",
        "family": family.name,
        "kind": family.kind,
        "needs": family.needs,
        "mode": how.mode,
        "device_type": torch.device(how.device).type,
        "dtype": how.dtype,
        "seed": how.seed,
        "status": MEASURED,
        "error": None,
        "parameters": None,
        "sites": [],
        "outcomes": {},
        "flops": {},
        "reasons": [],
        "callers": [],
        "calibration": [],
        "verified": None,
        "verdicts": 0,
        "wrong": [],
        "oracle": None,
        "whole": [],
        "arms": {},
        "failed": {},
        "ours": None,
        "best_peer": None,
        "ratio_to_best": None,
        "ratio_ci95": None,
        "ratio_to_eager": None,
        "seconds": {},
        "notes": [],
        "command": how.command,
    }


def dated(row: Row, device: torch.device) -> Row:
    """The row with its environment and time."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return row | {"env": environment(device), "created": now}


def measure(family: Family, how: How, clock: Clock) -> Row:
    """The row of a family.

    Raises whatever the model, ``optimize_`` or eager mode raise; ``clock.stage`` says where. A peer
    that fails is told in the row.
    """
    device = torch.device(how.device)
    case = case_of(family, device.type, how.dtype, how.mode, how.seed)
    row = blank(family, how)
    with clock.timing("build"):
        work = make_work(family, case, device, how.seconds)
    with clock.timing("run"):
        known = verify.before(work, device)
    row["parameters"] = sum(p.numel() for p in work.model.parameters())
    row["oracle"] = known.oracle.name
    with clock.timing("trace"):
        row["callers"] = callers.untraced(work.model, work.given(), how.mode)
    units = _units(work, case, how, clock, known, row)
    row["whole"] = outcomes.whole_of(work.whole)
    with clock.timing("measure"), work.mode():
        for unit in units.values():
            for _ in range(_CALLS_BEFORE):
                unit(0)
        lookup.settle()
        calls = {name: (lambda unit=unit: unit(0)) for name, unit in units.items()}
        limits: dict[str, Any] = {"rounds": how.rounds, "budget_s": how.timed_s}
        samples = interleave(calls, device=device, metric="wall", **limits)
    return dated(row | compared(samples) | {"seconds": dict(clock.seconds)}, device)


def _units(
    work: SuiteWork, case: Case, how: How, clock: Clock, known: verify.Before, row: Row
) -> dict[str, Unit]:
    """The contenders that run and are right; the row gets what is to say of them."""
    units = {}
    for peer in contenders(case, frozenset(how.skip)):
        with clock.timing("optimize" if peer.name == OURS else peer.name):
            unit = _built(peer, work, row)
        if peer.name == OURS:
            _tell(row, work)
        with clock.timing("verify"):
            right = unit is not None and _right(peer, work, known, row, how.seconds)
        if unit is not None and right:
            units[peer.name] = unit
    return units


def _built(peer: Peer, work: SuiteWork, row: Row) -> Unit | None:
    """A contender's unit of work, once it has run; None where it fails, which the row then says."""
    try:
        unit: Any = peer.build(work)
        with work.mode():
            unit(0)
    except Exception as error:
        if peer.name in ("eager", OURS):
            raise
        row["failed"][peer.name] = told(error)
        return None
    return unit  # type: ignore[no-any-return]


def _right(peer: Peer, work: SuiteWork, known: verify.Before, row: Row, seconds: float) -> bool:
    """Whether a contender computes what the model does; the row says what is wrong."""
    if peer.name == "eager":
        return True
    if peer.name == OURS:
        verdicts = verify.rewritten(known, work.rewritten[0], work.result[0], seconds)
        row["verdicts"] = len(verdicts)
    else:
        verdicts = verify.outputs(known, work.model, work.built[-1])
    wrong = [str(v) for v in verdicts if not v.passed and not v.unproven]
    if peer.ours:
        row["verified"] = row["verified"] is not False and not wrong
        row["wrong"] += [f"{peer.name}: {text}" for text in wrong]
    elif wrong:
        row["failed"][peer.name] = f"less accurate than allowed: {wrong[0]}"
    return not wrong


def _tell(row: Row, work: SuiteWork) -> None:
    result = work.result[0]
    sites = outcomes.sites_of(result)
    row |= {
        "sites": sites,
        "outcomes": outcomes.counts(sites),
        "flops": outcomes.flops_of(sites, result),
        "reasons": outcomes.reasons(sites),
        "calibration": outcomes.calibration(sites),
        "notes": list(result.notes),
    }


def compared(samples: Mapping[str, Samples]) -> Row:
    """The part of a row that interleaved times make: every arm, and ours against the fastest peer.

    Ours is what ``optimize_`` kept with all its options, else with none of them.
    """
    own = next((name for name in (ASKED, OURS) if name in samples), None)
    arms = {
        name: {"us": round(s.median_us, 3), "samples_us": [round(us, 3) for us in s.us]}
        for name, s in samples.items()
    }
    peers = [name for name in samples if not name.startswith(OURS)]
    if own is None or not peers:
        return {"arms": arms, "ours": own}
    best = min(peers, key=lambda name: samples[name].median_us)
    ratio = paired_ratio(samples[own], samples[best])
    return {
        "arms": arms,
        "ours": own,
        "best_peer": best,
        "ratio_to_best": ratio.median,
        "ratio_ci95": [ratio.low, ratio.high],
        "ratio_to_eager": paired_ratio(samples[own], samples["eager"]).median,
    }


def told(error: BaseException) -> str:
    """An error in one line."""
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:500]}"


def finite(value: Any) -> Any:
    """The same data with numbers that JSON cannot express replaced by None."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: finite(v) for k, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value
