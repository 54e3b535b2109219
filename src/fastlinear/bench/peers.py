"""The contenders of linear_act: who takes part in which case, and why not."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fastlinear.bench import forwards as by
from fastlinear.bench.case import METRICS, Case
from fastlinear.bench.work import Unit
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.ops.linear_act import backends

OURS = "fastlinear"


@dataclass(frozen=True)
class Peer:
    """One contender.

    Attributes:
        name: as published.
        build: Work → one unit of work on the set of a given index.
        reason_not: why it cannot take part in a case, or None.
        metrics: the metrics that make sense for it.
    """

    name: str
    build: Callable[[Any], Unit]
    reason_not: Callable[[Case], str | None] = lambda _: None
    metrics: tuple[str, ...] = METRICS

    @property
    def ours(self) -> bool:
        """Whether this is fastlinear rather than a peer."""
        return self.name.startswith(OURS)


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a linear_act case, able to take part or not."""
    forced = [b.name for b in family(case.family).candidates("forward") if b.name != "eager"]
    return (
        Peer("eager", lambda w: w.unit(by.eager(w))),
        Peer("eager_kn", lambda w: w.unit(by.eager_kn(w)), _forward_only),
        Peer("compile", lambda w: w.unit(by.compiled(w)), compiler_missing),
        Peer("compile_max_autotune", lambda w: w.unit(by.max_autotune(w)), _not_max_autotune),
        Peer(
            "compile_reduce_overhead",
            lambda w: w.unit(by.reduce_overhead(w)),
            _not_reduce_overhead,
            ("wall",),
        ),
        Peer("cuda_graph", lambda w: by.graphed(w, w.unit(by.eager(w))), _cuda_only, ("wall",)),
        Peer("cublaslt", lambda w: w.unit(by.cublaslt), _not_cublaslt),
        Peer("onednn", lambda w: w.unit(by.onednn(w, pack=False)), _not_onednn),
        Peer("onednn_prepacked", lambda w: w.unit(by.onednn(w, pack=True)), _not_onednn),
        Peer("quack", lambda w: w.unit(by.quack()), _not_quack),
        Peer(OURS, lambda w: w.unit(by.ours(w, None))),
        Peer(
            f"{OURS}_cuda_graph",
            lambda w: by.graphed(w, w.unit(by.ours(w, None))),
            _cuda_only,
            ("wall",),
        ),
        *(_forced(name) for name in forced),
    )


def problem_of(case: Case, piece: str = "forward") -> Problem:
    """The Problem dispatch sees for one layer of a case."""
    return backends.problem(
        piece,
        case.dim("M"),
        case.dim("K"),
        case.dim("N"),
        dtype=case.dtype,
        device=case.device,
        activation=case.option("activation"),
        bias=case.option("bias") != "no",
        needs_grad=case.needs_grad,
        precision=matmul_precision(FLOAT_DTYPES[case.dtype]),
    )


def _forced(backend: str) -> Peer:
    def reason_not(case: Case) -> str | None:
        candidates = family(case.family).candidates("forward")
        (record,) = (b for b in candidates if b.name == backend)
        return record.reason_not(problem_of(case))

    return Peer(f"{OURS}[{backend}]", lambda w: w.unit(by.ours(w, backend)), reason_not)


# --------------------------------------------------------------------------------------------
# Why not


def _forward_only(case: Case) -> str | None:
    return "measured in the forward direction only" if case.needs_grad else None


def _cuda_only(case: Case) -> str | None:
    return None if case.device == "cuda" else "needs a CUDA device"


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


def _not_max_autotune(case: Case) -> str | None:
    return _too_slow(case) or compiler_missing(case)


def _not_reduce_overhead(case: Case) -> str | None:
    return _cuda_only(case) or _forward_only(case) or _too_slow(case) or compiler_missing(case)


def _too_slow(case: Case) -> str | None:
    return "left out of this case: it takes too long to prepare" if case.light else None


def _not_cublaslt(case: Case) -> str | None:
    if case.device != "cuda":
        return "cuBLASLt runs on CUDA devices only"
    if case.needs_grad:
        return "torch's entry point to the epilogue has no backward"
    if case.option("activation") not in ("relu", "gelu_tanh"):
        return "the epilogue knows relu and gelu_tanh only"
    return "the entry point requires a bias" if case.option("bias") == "no" else None


def _not_onednn(case: Case) -> str | None:
    if case.device != "cpu":
        return "oneDNN runs on the CPU only"
    if case.needs_grad:
        return "torch's entry point to oneDNN has no backward"
    if case.option("activation") not in by.POST_OPS:
        return f"oneDNN has no post-op for {case.option('activation')}"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch lacks mkldnn._linear_pointwise"
    return None


def _not_quack(case: Case) -> str | None:
    if case.device != "cuda":
        return "QuACK runs on CUDA devices only"
    if importlib.util.find_spec("quack") is None:
        return "the package quack-kernels is not installed"
    if case.needs_grad:
        return "measured in the forward direction only"
    if case.dtype == "float32":
        return "QuACK's GEMMs take 16-bit dtypes"
    if case.option("activation") not in by.QUACK_NAMES:
        return f"QuACK has no {case.option('activation')}"
    return None
