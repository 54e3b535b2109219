"""Tuning at first use, where the user asks for it, as ``torch.backends.cudnn.benchmark`` does.

The first call of a kind that nobody tuned measures its backends before it runs; what is found is
kept in the cache. Nothing is measured inside CUDA graphs and compiled code, for a forced backend,
or where a few rounds would take longer than is allowed.
"""

from __future__ import annotations

import warnings

import torch

from fastlinear.core import settings
from fastlinear.core.errors import CacheWarning, FastlinearError, InputError
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import BASELINE, predictions
from fastlinear.dispatch.steps import tuning_order
from fastlinear.dispatch.tune import tune

_SECONDS = 0.5
_RUNS = 40  # of PyTorch's ops, about as long as verifying backends and a few rounds of each take
_LEAST_S = 0.02  # of interleaved measurement

_seen: set[str] = set()  # Problems looked at in this process


def tune_at_first_use(enabled: bool = True, *, seconds: float = _SECONDS) -> None:
    """Have the first call of each kind measure its backends, for the rest of the process.

    The variable ``FASTLINEAR_TUNE_AT_FIRST_USE`` says the same from outside: a number of seconds,
    0 for off.

    Args:
        enabled: False leaves choices to predictions again; what was measured stays.
        seconds: about how long each choice may be measured for. A training call has several.

    Raises:
        InputError: ``seconds`` is not above 0.
    """
    if not seconds > 0:
        raise InputError(
            "tune_at_first_use",
            "seconds above 0",
            f"seconds={seconds!r}",
            "Leave it out for half a second, or give enabled=False.",
        )
    settings.allow_first_use(float(seconds) if enabled else 0.0)
    _seen.clear()
    cache.changed()  # kinds of calls that were seen before have a first use again


def measure(p: Problem) -> None:
    """Tune what decides about a call, unless that is known, not allowed, or takes too long."""
    seconds = settings.first_use_s()
    if seconds and not p.captured:
        with settings.without_first_use():  # what tuning calls is no first use
            for asked in tuning_order(p):
                _measure(asked, seconds)


def _measure(p: Problem, seconds: float) -> None:
    if p.key() in _seen:
        return
    _seen.add(p.key())
    able = [b for b in family(p.family).candidates(p.piece) if b.why_not_ready(p) is None]
    if len(able) < 2 or cache.tuned(p, able) is not None:
        return
    told = predictions(p, able).get(BASELINE)
    left = seconds - (0.0 if told is None else _RUNS * told.us * 1e-6)
    if left < _LEAST_S:
        return
    try:
        tune(p, rounds=5, budget_s=left)
    except (FastlinearError, RuntimeError) as error:  # no memory for a second call, for example
        warnings.warn(
            f"{p.describe()} could not be tuned at first use ({type(error).__name__}: "
            f"{str(error).strip()[:200]}); the prediction stands.",
            CacheWarning,
            stacklevel=2,
        )
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
