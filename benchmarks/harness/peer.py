"""A contender of any experiment, and the reasons several of them share for taking no part."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.case import METRICS, Case
from benchmarks.harness.work import Unit

OURS = "fastlinear"
RECORDED = f"{OURS}_cuda_graph"  # its call recorded as the peers' graphs are: same memory each time
TOO_SLOW = "left out of this case: it takes too long to prepare"


@dataclass(frozen=True)
class Told:
    """A unit of work together with what its contender chose for it (published as ``chosen``)."""

    unit: Unit
    chosen: Mapping[str, str]


@dataclass(frozen=True)
class Peer:
    """One contender.

    Attributes:
        name: as published.
        build: Work → one unit of work on the set of a given index.
        reason_not: why it cannot take part in a case, or None.
        metrics: the metrics that make sense for it.
        reference: (Work, dtype) → what plain PyTorch gives, for a contender that computes
            something else than ``Work.reference``.
        names: Work → names of the tensors it returns, where those are not all of ``Work.names``.
        gathered: (Work, what a unit returned) → the tensors of ``Work.names``, for a contender
            whose results lie in a form of their own.
        error_growth: Work → how many times the common limit its error may be.
        saving: Work → how many times fewer multiplications it does than are counted: so many times
            faster than the roofline it may be.
        precompile: whether what its first call compiles stays on disk, where other processes find
            it.
        tunes: whether that call times kernels for the case's products, whatever their number.
    """

    name: str
    build: Callable[[Any], Unit | Told]
    reason_not: Callable[[Case], str | None] = lambda _: None
    metrics: tuple[str, ...] = METRICS
    reference: Callable[[Any, torch.dtype], tuple[Tensor, ...]] | None = None
    names: Callable[[Any], tuple[str, ...]] = lambda work: work.names
    gathered: Callable[[Any, tuple[Tensor, ...]], tuple[Tensor, ...]] = lambda _, found: found
    error_growth: Callable[[Any], float] = lambda _: 1.0
    saving: Callable[[Any], float] = lambda _: 1.0
    precompile: bool = False
    tunes: bool = False

    @property
    def ours(self) -> bool:
        """Whether this is fastlinear rather than a peer."""
        return self.name.startswith(OURS)

    def why_not(self, case: Case) -> str | None:
        """Why it cannot take part in a case or is left out of it, or None."""
        if case.left_out:
            return case.left_out
        return TOO_SLOW if self.name in case.without else self.reason_not(case)


# --------------------------------------------------------------------------------------------
# Why not


def forward_only(case: Case) -> str | None:
    """Reason of a contender measured without gradients only."""
    return "measured in the forward direction only" if case.needs_grad else None


def cuda_only(case: Case) -> str | None:
    """Reason of a contender that needs a GPU."""
    return None if case.device == "cuda" else "needs a CUDA device"


def too_slow(case: Case) -> str | None:
    """Reason of a contender that is left out of light cases."""
    return TOO_SLOW if case.light else None


def compiler_missing(case: Case) -> str | None:
    """Why torch.compile cannot run for a case's device, or None."""
    names = (os.environ.get("CXX"), "g++", "c++", "clang++")
    if case.device == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "torch.compile on CUDA needs the package triton"
        names = (os.environ.get("CC"), "gcc", "cc", "clang")
    if any(name and shutil.which(name) for name in names):
        return None
    return "torch.compile needs a C++ compiler, none was found"


def no_compiler(case: Case) -> str | None:
    """Why torch.compile takes no part where it takes long, or None."""
    return too_slow(case) or compiler_missing(case)


def no_reduce_overhead(case: Case) -> str | None:
    """Why torch.compile's reduce-overhead takes no part, or None."""
    return cuda_only(case) or forward_only(case) or no_compiler(case)
