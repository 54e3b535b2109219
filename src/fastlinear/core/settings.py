"""Settings: the inspectable configuration object and the few environment variables."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from fastlinear.core.errors import InputError

MODES = ("inference", "train")


@dataclass(frozen=True)
class Config:
    """What ``optimize_`` and ``apply_`` may do. Immutable; every field has a stated meaning.

    Attributes:
        mode: ``"inference"`` (forward under ``no_grad``) or ``"train"`` (forward and backward).
        families: which families may rewrite; ``None`` means all.
        backends: restrict choices per family, for example ``{"linear_act": "onednn"}``.
        min_speedup: keep a rewrite only if its paired speed-up's 95% interval lies above this.
        draws: how many input draws verification uses (the first is the given input).
        optimizer_steps: how many optimizer steps are compared in train mode.
        tune: time the backends on each site's own Problem before choosing.
        graphs: replay a launch-bound model, or else its launch-bound parts, as CUDA graphs where
            that is faster; they take memory.
        compile: try the model through ``torch.compile`` as well, with the rewrites inside and
            without them, and keep it where that is faster; compiling takes a while.
        allow_fast_matmul: let Strassen-class algorithms compete (norm-wise stable only).
        time_budget_s: an upper bound on the time spent measuring, in seconds.
        seed: seed of every random draw.
    """

    mode: str = "inference"
    families: tuple[str, ...] | None = None
    backends: dict[str, str] = field(default_factory=dict)
    min_speedup: float = 1.0
    draws: int = 3
    optimizer_steps: int = 3
    tune: bool = True
    graphs: bool = False
    compile: bool = False
    allow_fast_matmul: bool = False
    time_budget_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise InputError(
                "Config",
                expected=f"mode to be one of {', '.join(MODES)}",
                received=f"mode={self.mode!r}",
                remedy="Use 'train' where gradients matter, else 'inference'.",
            )
        if self.draws < 1 or self.optimizer_steps < 1:
            raise InputError(
                "Config",
                expected="draws and optimizer_steps of at least 1",
                received=f"draws={self.draws}, optimizer_steps={self.optimizer_steps}",
                remedy="Leave them out for 3 each.",
            )
        if not self.time_budget_s > 0:
            raise InputError(
                "Config",
                expected="time_budget_s above 0 seconds",
                received=f"time_budget_s={self.time_budget_s}",
                remedy="Leave it out for 60 seconds.",
            )
        if not 0 < self.min_speedup < float("inf"):
            raise InputError(
                "Config",
                expected="min_speedup to be a finite ratio above 0",
                received=f"min_speedup={self.min_speedup}",
                remedy="1.0 keeps whatever is measured faster.",
            )
        if isinstance(self.families, str):
            raise InputError(
                "Config",
                expected="families to be a tuple of names, or None for all",
                received=f"families={self.families!r}",
                remedy=f"Write families=({self.families!r},).",
            )


def cache_dir() -> Path:
    """Folder of the tuned cache: ``$FASTLINEAR_CACHE_DIR`` or the user's cache folder."""
    override = os.environ.get("FASTLINEAR_CACHE_DIR")
    return Path(override) if override else Path(platformdirs.user_cache_dir("fastlinear"))
