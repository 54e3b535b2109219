"""What became of a model, as plain data."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from fastlinear.core.compare import Verdict
from fastlinear.core.plain_text import one_line
from fastlinear.core.timing import Ratio
from fastlinear.profile.records import Finding, NotFollowed
from fastlinear.profile.report import ProfileReport
from fastlinear.rewrite.plan import Plan
from fastlinear.rewrite.site_outcome import STATUSES, SiteOutcome


@dataclass(frozen=True, eq=False)
class Outcome:
    """What ``optimize_`` or ``apply_`` did to one model, as plain data.

    Attributes:
        model_class, mode, device: what was optimized, and how.
        sites: one outcome for every linear of the model, in ``named_modules`` order, and for every
            module tried as a grouped layer by itself (route ``"own"``); where CUDA
            graphs were asked for, more of them (rule ``"graphed"``) for the model as a whole and,
            where that is not kept, for its launch-bound parts; where compiling was asked for, more
            of them (rule ``"compiled"``) for the model compiled and for its blocks.
        verdicts: every comparison of the kept rewrite with the oracle, pooled over the draws.
        before_us, after_us: median wall time of one step.
        speedup: paired before / after of one step with its 95% interval.
        samples: raw step times, ``{"before": [...], "after": [...]}``.
        plan: what was kept, as data.
        profile: the profile it started from.
        not_followed: the profile's, less what a site accounts for: a module tried as a grouped
            layer, a layer of a foreign class, what is rewritten already.
        notes: what a reader should know of how it was verified and measured.
    """

    model_class: str
    mode: str
    device: str
    sites: tuple[SiteOutcome, ...]
    verdicts: tuple[Verdict, ...]
    before_us: float
    after_us: float
    speedup: Ratio
    samples: dict[str, list[float]]
    plan: Plan
    profile: ProfileReport
    notes: tuple[str, ...]
    not_followed: tuple[NotFollowed, ...] = ()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The profile's findings."""
        return tuple(self.profile.findings)

    def summary(self) -> dict[str, int]:
        """How many sites ended in each status."""
        counts = Counter(site.status for site in self.sites)
        return {status: counts.get(status, 0) for status in STATUSES}

    @property
    def kept(self) -> int:
        """Sites rewritten and kept."""
        return self.summary()["kept"]

    @property
    def rejected(self) -> int:
        """Sites tried and put back: slower or less accurate."""
        return self.summary()["rejected"]

    @property
    def refused(self) -> int:
        """Sites that must not be touched."""
        return self.summary()["refused"]

    @property
    def undecided(self) -> int:
        """Sites left as they were, because no sound measurement says what is faster."""
        return self.summary()["undecided"]

    @property
    def nothing_to_do(self) -> int:
        """Sites that are as fast as they get."""
        return self.summary()["nothing_to_do"]

    def to_json(self) -> dict[str, Any]:
        """Everything as a JSON-ready dict of kind ``"optimize"``."""
        return {
            "kind": "optimize",
            "format": 1,
            "fastlinear": self.plan.fastlinear,
            "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "environment": self.plan.environment,
            "model": self.plan.model,
            "mode": self.mode,
            "device": self.device,
            "step": {
                "before_us": self.before_us,
                "after_us": self.after_us,
                "speedup": asdict(self.speedup),
                "samples": self.samples,
            },
            "profile": self.profile.to_json(),
            "sites": [site.to_json() for site in self.sites],
            "verdicts": [
                {
                    "name": v.name,
                    "error": v.error,
                    "torch_error": v.torch_error,
                    "limit": v.limit,
                    "passed": v.passed,
                    "numbers": v.numbers,
                    "not_finite": v.not_finite,
                }
                for v in self.verdicts
            ],
            "summary": self.summary(),
            "not_followed": [one.to_json() for one in self.not_followed],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        counts = ", ".join(
            f"{n} {status.replace('_', ' ')}" for status, n in self.summary().items()
        )
        open_ = " (within noise)" if self.speedup.within_noise else ""
        speed = f"{self.speedup}x{open_}" if self.kept else "the model is as it was"
        return f"{one_line(self.model_class)} ({self.mode}, {self.device}): {counts}; {speed}"
