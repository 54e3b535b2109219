"""Public arguments that are still accepted and no longer have an effect."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch

from fastlinear.core.errors import InputError

_PACKAGE = str(Path(__file__).parents[1])
_warned: set[str] = set()


def fast_matmul(given: object, function: str, stacklevel: int = 3) -> None:
    """Check ``allow_fast_matmul``. True gives one DeprecationWarning a process, at the caller
    ``stacklevel`` frames up.

    Raises:
        InputError: ``given`` is neither True nor False.
    """
    if not isinstance(given, bool):
        raise InputError(
            function,
            "allow_fast_matmul to be True or False",
            f"allow_fast_matmul={given!r}",
            "Leave it out: it has no effect.",
        )
    name = "allow_fast_matmul"
    if not given or torch.compiler.is_compiling() or name in _warned:
        return
    _warned.add(name)
    warnings.warn(
        f"{name} has no effect: Strassen's algorithm is an experiment outside the package "
        "(benchmarks/experiments/strassen). Leave the argument out.",
        DeprecationWarning,
        stacklevel=stacklevel,
    )


def renamed(argument: str, before: str, now: str) -> str:
    """``now``, the new name of a value. Gives one DeprecationWarning a process, at the caller of
    this package."""
    name = f"{argument}={before!r}"
    if not torch.compiler.is_compiling() and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} is now called {argument}={now!r}.",
            DeprecationWarning,
            stacklevel=_levels_up(),
        )
    return now


def _levels_up() -> int:
    """How many frames above its caller the first one lies whose code is not this package's."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, levels = frame.f_back, levels + 1
    return levels
