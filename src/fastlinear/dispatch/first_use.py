"""Tuning at first use, where the user asks for it, as ``torch.backends.cudnn.benchmark`` does.

The first call of a kind that nobody tuned measures its backends before it runs; what is found is
kept in the cache. Nothing is measured inside CUDA graphs and compiled code, for a forced backend,
while a library still compiles, or where a few rounds would take longer than is allowed.
"""

from __future__ import annotations

import contextvars
import threading
import warnings
from collections.abc import Callable
from functools import partial

import torch

from fastlinear.core import settings
from fastlinear.core.device import device_facts
from fastlinear.core.errors import CacheWarning, InputError
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import BASELINE, predictions
from fastlinear.dispatch.steps import tuning_order
from fastlinear.dispatch.tune import tune

_SECONDS = 0.5
_RUNS = 40  # of PyTorch's ops, about as long as verifying backends and a few rounds of each take
_LEAST_S = 0.02  # of interleaved measurement
_DEVICES = ("cpu", "cuda")

_seen: set[tuple[str, str]] = set()  # (device, Problem) looked at since the cache last changed
cache.on_change(_seen.clear)


def tune_at_first_use(enabled: bool = True, *, seconds: float = _SECONDS) -> None:
    """Have the first call of each kind measure its backends, for the rest of the process.

    The variable ``FASTLINEAR_TUNE_AT_FIRST_USE`` says the same from outside: a number of seconds,
    0 for off. C++ that has to be compiled first, once a machine, comes on top.

    Args:
        enabled: False leaves choices to predictions again; what was measured stays.
        seconds: about how long each choice may be measured for. A training call has several.

    Raises:
        InputError: ``enabled`` is no bool, or ``seconds`` no number above 0.
    """
    if not isinstance(enabled, bool):
        raise InputError(
            "tune_at_first_use",
            "enabled to be True or False",
            f"enabled={enabled!r}",
            "Write tune_at_first_use(seconds=...) to say how long.",
        )
    if not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise InputError(
            "tune_at_first_use",
            "a number of seconds above 0",
            f"seconds={seconds!r}",
            "Leave it out for half a second, or give enabled=False.",
        )
    settings.allow_first_use(float(seconds) if enabled else 0.0)
    cache.changed()  # kinds of calls that were seen before have a first use again


def measure(p: Problem) -> None:
    """Tune what decides about a call, unless that is known, not allowed, or takes too long."""
    seconds = settings.first_use_s()
    if not seconds or p.captured or p.device not in _DEVICES or settings.batch_invariant():
        return
    where = device_facts(p.device).slug
    for asked in tuning_order(p):
        if (where, asked.key()) in _seen:
            continue
        _seen.add((where, asked.key()))
        if error := _apart(partial(_measure, asked, seconds)):
            warnings.warn(
                f"{asked.describe()} could not be tuned at first use ({type(error).__name__}: "
                f"{str(error).strip()[:200]}); the prediction stands.",
                CacheWarning,
                stacklevel=2,
            )


def _measure(p: Problem, seconds: float) -> None:
    candidates = [b for b in family(p.family).candidates(p.piece) if b.reason_not(p) is None]
    if any(b.why_not_ready(p) is not None for b in candidates):
        return  # a decision without one of them would stand for good
    if len(candidates) < 2 or cache.tuned(p, candidates) is not None:
        return
    told = predictions(p, candidates).get(BASELINE)
    left = seconds - (0.0 if told is None else _RUNS * told.us * 1e-6)
    if left >= _LEAST_S:
        tune(p, rounds=5, budget_s=left, draws=1)


def _apart(run: Callable[[], None]) -> Exception | None:
    """Run in a thread of its own and wait for it; its exception, or None.

    Hooks on saved tensors, autocast, inference and function modes are the caller's thread's: a
    checkpoint would count what tuning saves.
    """
    failed: list[Exception] = []
    context = contextvars.copy_context()
    context.run(settings.first_use_off.set, True)  # what tuning calls is no first use
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def inside() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            context.run(run)
        except Exception as error:  # noqa: BLE001 - the caller's thread says what it was
            failed.append(error)
            if isinstance(error, torch.OutOfMemoryError):
                torch.cuda.empty_cache()

    thread = threading.Thread(target=inside, name="fastlinear first use", daemon=True)
    thread.start()
    thread.join()
    return failed[0] if failed else None
