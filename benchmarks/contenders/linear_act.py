"""The contenders of linear_act: who takes part in which case, and why not."""

from __future__ import annotations

import torch

from benchmarks.contenders import bare, quack
from benchmarks.contenders import forwards as by
from benchmarks.contenders.dispatched import forced
from benchmarks.harness.case import Case
from benchmarks.harness.peer import (
    OURS,
    RECORDED,
    Peer,
    compiler_missing,
    cuda_only,
    forward_only,
    no_compiler,
    no_reduce_overhead,
)
from benchmarks.harness.work import Forward, Work
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.mlp import backends as chains

__all__ = ["OURS", "Peer", "chain_of", "peers", "problem_of"]


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a linear_act case, able to take part or not."""
    return (
        Peer("eager", lambda w: w.unit(by.eager(w))),
        Peer("eager_kn", lambda w: w.unit(by.eager_kn(w)), forward_only),
        Peer("compile", lambda w: w.unit(by.compiled(w)), compiler_missing, precompile=True),
        Peer(
            "compile_max_autotune",
            lambda w: w.unit(by.max_autotune(w)),
            no_compiler,
            precompile=True,
            tunes=True,
        ),
        Peer(
            "compile_reduce_overhead",
            lambda w: w.unit(by.reduce_overhead(w)),
            no_reduce_overhead,
            ("wall",),
            precompile=True,
        ),
        Peer("cuda_graph", lambda w: by.graphed(w, w.unit(by.eager(w))), cuda_only, ("wall",)),
        Peer("cublaslt", lambda w: w.unit(by.cublaslt), no_cublaslt),
        Peer("onednn", lambda w: w.unit(by.onednn(w, pack=False)), no_onednn),
        Peer("onednn_prepacked", lambda w: w.unit(by.onednn(w, pack=True)), no_onednn),
        Peer("quack", quack.build, quack.reason_not, ("device", "wall", "peak_memory")),
        Peer(OURS, lambda w: w.unit(_best(w))),
        Peer(f"{OURS}_layers", lambda w: w.unit(by.ours(w, None)), _one_layer),
        Peer(
            RECORDED,
            lambda w: by.graphed(w, w.unit(_best(w))),
            cuda_only,
            ("wall",),
        ),
        *forced(
            linear_act.NAME,
            problem_of,
            lambda name, why: Peer(
                f"{OURS}[{name}]",
                lambda w: w.unit(by.ours(w, name)),
                why,
                precompile=name == "triton",
            ),
        ),
        Peer(f"{OURS}_bare_products", bare.step, bare.reason_not, reference=bare.reference),
    )


def problem_of(case: Case, piece: str = "forward") -> Problem:
    """The Problem dispatch sees for one layer of a case."""
    return linear_act.problem(
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


def chain_of(case: Case) -> Problem:
    """The Problem dispatch sees for the forward of a case of several layers, as one chain."""
    return chains.problem(
        "forward",
        case.dim("M"),
        (case.dim("K"), *(case.dim("N"),) * case.dim("L")),
        dtype=case.dtype,
        device=case.device,
        activation=case.option("activation"),
        final_activation=case.option("activation"),
        bias="no" if case.option("bias") == "no" else "yes",
        needs_grad=case.needs_grad,
        precision=matmul_precision(FLOAT_DTYPES[case.dtype]),
    )


def _best(work: Work) -> Forward:
    """What a user gets: one call of linear_act, or the chain that ``optimize_`` puts in place."""
    return by.ours(work, None) if work.case.dim("L") == 1 else by.ours_as_chain(work)


def _one_layer(case: Case) -> str | None:
    return "one layer: the same as fastlinear" if case.dim("L") == 1 else None


# --------------------------------------------------------------------------------------------
# Why not


def no_cublaslt(case: Case) -> str | None:
    """Why cuBLASLt's epilogue takes no part, or None."""
    if case.device != "cuda":
        return "cuBLASLt runs on CUDA devices only"
    if case.needs_grad:
        return "torch's entry point to the epilogue has no backward"
    if case.option("activation") not in ("relu", "gelu_tanh"):
        return "the epilogue knows relu and gelu_tanh only"
    return "the entry point requires a bias" if case.option("bias") == "no" else None


def no_onednn(case: Case) -> str | None:
    """Why oneDNN's operator with a fused activation takes no part, or None."""
    if case.device != "cpu":
        return "oneDNN runs on the CPU only"
    if case.needs_grad:
        return "torch's entry point to oneDNN has no backward"
    if case.option("activation") not in by.POST_OPS:
        return f"oneDNN has no post-op for {case.option('activation')}"
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return "this build of torch lacks mkldnn._linear_pointwise"
    return None
