"""How much memory is free, and a limit on what a trial may take of it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path

import torch

_CPU_ALLOCATOR = "can't allocate memory"
SAID = (torch.OutOfMemoryError.__name__, _CPU_ALLOCATOR)
"""What a line about memory that ran out holds one of."""


def free_bytes(device: torch.device) -> int | None:
    """Bytes free on the device, or of the machine for a CPU; None where the system is silent."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def held_bytes(device: torch.device) -> int:
    """Bytes that torch's allocator holds on a CUDA device, those of recorded graphs included."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


def give_back(device: torch.device) -> None:
    """Return to the device what nothing refers to any more."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def ran_out(error: BaseException | None) -> bool:
    """Whether an exception, or what it was raised from, says that memory ran out."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError | MemoryError):
            return True
        if isinstance(error, RuntimeError) and _CPU_ALLOCATOR in str(error):
            return True
        error = error.__cause__
    return False


@dataclass(frozen=True)
class _Limit:
    device: torch.device
    before: int
    most: int


_limit: ContextVar[_Limit | None] = ContextVar("limit", default=None)


@contextmanager
def limited(device: torch.device, share: float) -> Iterator[None]:
    """Inside it, ``check`` lets at most this share of the memory be taken that is free now.

    Memory that nothing refers to is given back before and afterwards.
    """
    give_back(device)
    free = free_bytes(device)
    limit = None if free is None else _Limit(device, held_bytes(device), int(share * free))
    token = _limit.set(limit)
    try:
        yield
    finally:
        _limit.reset(token)
        give_back(device)


def check() -> None:
    """Raise OutOfMemoryError where more than the limit is held; without a limit do nothing."""
    limit = _limit.get()
    if limit is None:
        return
    taken = held_bytes(limit.device) - limit.before
    if taken > limit.most:
        raise torch.OutOfMemoryError(
            f"the trial holds {taken >> 20} MiB, more than the {limit.most >> 20} MiB that "
            "Config.trial_memory allows it of what was free"
        )
