"""What holds for every case of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import torch

from benchmarks.harness.case import Case
from benchmarks.harness.peer import Peer
from fastlinear.core.environment import environment

LEFT_OUT = "left out by the caller"
_FRESH_S = 5.0  # a GPU's clocks are asked for in a process of their own


@dataclass(frozen=True)
class Settings:
    """What holds for every case of a run.

    Attributes:
        device: where to run.
        rounds, budget_s: limits of each interleaved measurement.
        skip: contenders to leave out.
        only: the contenders to keep, or None for all.
        tune: tune fastlinear for each case first.
        command: the command that repeats the run.
    """

    device: torch.device
    rounds: int
    budget_s: float
    skip: frozenset[str] = frozenset()
    only: frozenset[str] | None = None
    tune: bool = False
    command: str = ""
    _read: dict[float, dict[str, Any]] = field(default_factory=dict, init=False, compare=False)

    def why_not(self, peer: Peer, case: Case) -> str | None:
        """Why a contender takes no part in a case, or None."""
        unwanted = self.only is not None and peer.name not in self.only
        return LEFT_OUT if unwanted or peer.name in self.skip else peer.why_not(case)

    def environment(self) -> dict[str, Any]:
        """Facts about the process and the device; those of a GPU at most 5 seconds old."""
        now = time.monotonic()
        for when, facts in self._read.items():
            if now - when < _FRESH_S:
                return facts
        facts = environment(self.device)
        if self.device.type == "cuda":
            self._read.clear()
            self._read[now] = facts
        return facts

    def facts(self) -> dict[str, Any]:
        """What every row of a case carries about the run, read at the time of the case."""
        return {
            "env": self.environment(),
            "command": self.command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
