"""Settings: the inspectable configuration object and the few environment variables."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import platformdirs

from fastlinear.core import deprecated
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
        rows: further numbers of rows (of the tensor a linear is given, all leading dimensions
            multiplied) to tune what was kept for, each for the power of two nearest to it; what is
            tuned otherwise is the inputs' own.
        graphs: replay a launch-bound model, or else its launch-bound parts, as CUDA graphs where
            that is faster; they take memory.
        compile: try the model through ``torch.compile`` as well, with the rewrites inside and
            without them, and keep it where that is faster; compiling takes a while.
        allow_fast_matmul: deprecated, without effect; True warns once.
        time_budget_s: seconds for what may be left out: tuning, comparing layers, chains, graphs
            and the model before and after, with what of it is compiled first or waited for. What it
            does not reach stays as it is, and a note says so. Not in it: the profile, the
            verification of what is to be kept (one draw, and as long again for further ones), and
            what has begun when it ends: a compilation, the five rounds of a comparison.
        trial_memory: the share of the device's free memory, above 0 and at most 1, that one trial
            of CUDA graphs or compiled code may take; one that takes more, and any trial that runs
            out of memory, ends with a note.
        seed: seed of every random draw.
    """

    mode: str = "inference"
    families: tuple[str, ...] | None = None
    backends: dict[str, str] = field(default_factory=dict)
    min_speedup: float = 1.0
    draws: int = 3
    optimizer_steps: int = 3
    tune: bool = True
    rows: tuple[int, ...] = ()
    graphs: bool = False
    compile: bool = False
    allow_fast_matmul: bool = False
    time_budget_s: float = 60.0
    trial_memory: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        _check(
            self.mode in MODES,
            f"mode to be one of {', '.join(MODES)}",
            f"mode={self.mode!r}",
            "Use 'train' where gradients matter, else 'inference'.",
        )
        for name in ("draws", "optimizer_steps"):
            value = getattr(self, name)
            _check(
                _is_whole(value) and value >= 1,
                "draws and optimizer_steps of at least 1, both whole",
                f"{name}={value!r}",
                "Leave them out for 3 each.",
            )
        _check(
            _is_whole(self.seed), "seed to be a whole number", f"seed={self.seed!r}", "0 is one."
        )
        _check(
            _is_number(self.time_budget_s) and self.time_budget_s > 0,
            "time_budget_s above 0 seconds",
            f"time_budget_s={self.time_budget_s!r}",
            "Leave it out for 60 seconds.",
        )
        _check(
            _is_number(self.min_speedup) and 0 < self.min_speedup < float("inf"),
            "min_speedup to be a finite ratio above 0",
            f"min_speedup={self.min_speedup!r}",
            "1.0 keeps whatever is measured faster.",
        )
        _check(
            _is_number(self.trial_memory) and 0 < self.trial_memory <= 1,
            "trial_memory to be a share above 0 and at most 1",
            f"trial_memory={self.trial_memory!r}",
            "Leave it out for half of what is free.",
        )
        for name in ("tune", "graphs", "compile"):
            value = getattr(self, name)
            said = f"{name}={value!r}"
            _check(isinstance(value, bool), f"{name} to be True or False", said, "Write it so.")
        if self.allow_fast_matmul is not False:
            deprecated.fast_matmul(self.allow_fast_matmul, "Config", stacklevel=4)
        rows: object = self.rows
        _check(
            isinstance(rows, tuple | list) and all(_is_whole(n) and n >= 1 for n in rows),
            "rows to be a tuple of whole numbers of at least 1",
            f"rows={rows!r}",
            f"Write rows=({rows!r},)." if _is_whole(rows) else "For example rows=(1, 64, 1024).",
        )
        _check(
            self.tune or not rows,
            "tune=True where rows are to be tuned for",
            f"tune=False, rows={rows!r}",
            "Leave one of them out.",
        )
        families: object = self.families
        _check(
            families is None or (isinstance(families, tuple | list) and _are_names(families)),
            "families to be a tuple of names, or None for all",
            f"families={families!r}",
            f"Write families=({families!r},)."
            if isinstance(families, str)
            else "`fastlinear doctor` lists them.",
        )
        backends: object = self.backends
        _check(
            isinstance(backends, Mapping) and _are_names([*backends, *backends.values()]),
            "backends to be a dict from a family's name to a backend's",
            f"backends={backends!r}",
            "For example backends={'linear_act': 'onednn'}.",
        )


def _check(holds: bool, expected: str, received: str, remedy: str) -> None:
    if not holds:
        raise InputError("Config", expected, received, remedy)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_names(values: Iterable[object]) -> bool:
    return all(isinstance(v, str) for v in values)


def cache_dir() -> Path:
    """Folder of the caches: ``$FASTLINEAR_CACHE_DIR``, where ``~`` is home, or the user's own."""
    override = os.environ.get("FASTLINEAR_CACHE_DIR")
    return Path(override or platformdirs.user_cache_dir("fastlinear")).expanduser()


def kept_bytes() -> int:
    """Most bytes of free large CPU results to keep: ``$FASTLINEAR_KEEP_MIB``, by default a
    sixteenth of the machine's memory. From 64 MiB on malloc keeps as much of smaller ones,
    up to 1 GiB.

    Raises:
        InputError: the variable is no whole number of at least 0.
    """
    said = os.environ.get("FASTLINEAR_KEEP_MIB")
    if said:
        if not said.isdecimal():
            raise InputError(
                "FASTLINEAR_KEEP_MIB",
                "a whole number of MiB, at least 0",
                repr(said),
                "0 keeps none; leave it out for a sixteenth of the machine's memory.",
            )
        return int(said) << 20
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 16
    except (AttributeError, OSError, ValueError):  # a system that does not tell
        return 0


BATCH_INVARIANT = "batch_invariant"
"""The backend whose rows do not depend on other rows."""
_batch_invariant: bool | None = None  # None where the environment decides


def allow_batches(invariant: bool | None) -> None:
    """Have ``batch_invariant`` return this from here on; None leaves it to the environment."""
    global _batch_invariant
    _batch_invariant = invariant


def batch_invariant() -> bool:
    """Whether calls that name no backend take the one of that name: what the program said, else
    ``$FASTLINEAR_BATCH_INVARIANT``.

    Raises:
        InputError: the variable is neither 0 nor 1.
    """
    if _batch_invariant is not None:
        return _batch_invariant
    said = os.environ.get("FASTLINEAR_BATCH_INVARIANT") or "0"
    if said not in ("0", "1"):
        raise InputError(
            "FASTLINEAR_BATCH_INVARIANT",
            "1 or 0",
            repr(said),
            "1 takes backends whose rows do not depend on other rows.",
        )
    allow_batches(said == "1")  # every call asks
    return said == "1"


def asked(backend: str | None) -> str | None:
    """The backend that a caller named, or that a setting names for all calls."""
    return BATCH_INVARIANT if backend is None and batch_invariant() else backend


_first_use_s: float | None = None  # None where the environment decides
first_use_off: ContextVar[bool] = ContextVar("first_use_off", default=False)
"""Whether calls come from compiled code, or from tuning: nothing is measured for them."""


def allow_first_use(seconds: float) -> None:
    """Have ``first_use_s`` return this from here on."""
    global _first_use_s
    _first_use_s = seconds


def first_use_s() -> float:
    """Seconds that a choice may be measured for at the first call of its kind: what the program
    said, else ``$FASTLINEAR_TUNE_AT_FIRST_USE``; 0.0 where nothing is measured.

    Raises:
        InputError: the variable is no number of at least 0.
    """
    if first_use_off.get():
        return 0.0
    if _first_use_s is not None:
        return _first_use_s
    said = os.environ.get("FASTLINEAR_TUNE_AT_FIRST_USE", "0")
    try:
        seconds = float(said or "0")
    except ValueError:
        seconds = -1.0
    if not 0.0 <= seconds < float("inf"):
        raise InputError(
            "FASTLINEAR_TUNE_AT_FIRST_USE",
            "a number of seconds, at least 0",
            repr(said),
            "0.5 is usual; 0 or nothing leaves choices to predictions.",
        )
    return seconds
