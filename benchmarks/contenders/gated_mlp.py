"""Experiment ``gated-mlp``: (act(x Wgᵀ) ∘ (x Wuᵀ)) Wdᵀ by every way that models compute it.

Each contender has its weights in the layout that suits it best, laid out before the clock starts.
``eager`` is what transformers runs. ``fastlinear_bare_products`` is no contender but the floor: the
matrix products alone, by PyTorch, with nothing elementwise between them.
"""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.dispatched import dispatched, forced
from benchmarks.contenders.gated_work import Forward, GatedWork, eager, make_work
from benchmarks.harness.case import Case
from benchmarks.harness.peer import OURS, Peer, compiler_missing, no_compiler, too_slow
from benchmarks.harness.work import Unit
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import choices_of, tuning_order
from fastlinear.families.gated.op import call
from fastlinear.families.gated.problem import NAME, problem
from fastlinear.families.gated.stacking import Biases, Weights

__all__ = ["chosen", "make_work", "peers", "problem_of", "tune"]

_LIGER = {
    "silu": ("swiglu", "LigerSiLUMulFunction"),
    "gelu_tanh": ("geglu", "LigerGELUMulFunction"),
}
_QUACK = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu", "sigmoid": "glu"}


# --------------------------------------------------------------------------------------------
# How each computes it


def _stacked(case: Case) -> Forward:
    value = activation_of(case.option("activation")).value

    def forward(x: Tensor, w: Weights, b: Biases) -> Tensor:
        assert w.down is not None
        gate, up = F.linear(x, w.gate, b.gate).chunk(2, -1)
        return F.linear(value(gate) * up, w.down, b.down)

    return forward


def _liger(case: Case) -> Forward:
    package, name = _LIGER[case.option("activation")]
    function = getattr(importlib.import_module(f"liger_kernel.ops.{package}"), name)

    def forward(x: Tensor, w: Weights, b: Biases) -> Tensor:
        assert w.up is not None
        assert w.down is not None
        h = function.apply(F.linear(x, w.gate, b.gate), F.linear(x, w.up, b.up))
        return F.linear(h, w.down, b.down)

    return forward


def _quack(case: Case, tuned: bool) -> Forward:
    # It tells epilogues apart by all that their functions refer to; of the logger that those of
    # CuTe-DSL refer to it knows no key, and asks for this method.
    logging.Logger.__quack_semantic_key__ = lambda self: self.name  # type: ignore[attr-defined]
    from quack.mlp import mlp_func

    name = _QUACK[case.option("activation")]

    def forward(x: Tensor, w: Weights, b: Biases) -> Tensor:
        y: Tensor = mlp_func(x, w.gate, w.down, name, b.gate, b.down, tuned=tuned)
        return y

    return forward


def _ours(case: Case, backend: str | None, recompute: int | None, order: str = "apart") -> Forward:
    activation = case.option("activation")
    return lambda x, w, b: call(x, w, b, activation, order, recompute, backend)


class _Products(torch.autograd.Function):
    """The products of forward and backward, y = (x Wgᵀ) Wdᵀ, with a third product beside them."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor, up: Tensor, down: Tensor, down_bias: Tensor | None
    ) -> Tensor:
        h = F.linear(x, gate)
        F.linear(x, up)
        ctx.save_for_backward(x, gate, up, down, h)
        return F.linear(h, down, down_bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, gate, up, down, h = ctx.saved_tensors
        dh = dy @ down
        dx = torch.addmm(dh @ gate, dh, up)
        return dx, dh.t() @ x, dh.t() @ x, dy.t() @ h, None


def _bare(x: Tensor, w: Weights, b: Biases) -> Tensor:
    y: Tensor = _Products.apply(x, *w, b.down)
    return y


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a case, able to take part or not."""
    return (
        _peer("eager", eager),
        _peer("eager_stacked", _stacked, order="gate_up"),
        _compiled("compile", eager, "apart"),
        _compiled("compile_stacked", _stacked, "gate_up"),
        _compiled("compile_max_autotune", eager, "apart", "max-autotune-no-cudagraphs"),
        _peer("liger", _liger, _no_liger),
        _peer("quack", partial(_quack, tuned=True), _no_tuned_quack, order="interleaved"),
        _peer("quack_untuned", partial(_quack, tuned=False), _no_quack, order="interleaved"),
        _own(OURS, None),
        _own(f"{OURS}_stacked", None, order="gate_up"),
        _own(f"{OURS}_recomputing", None, recompute=1, reason_not=_trains),
        Peer(
            f"{OURS}_bare_products",
            lambda w: w.unit(_bare),
            _no_bias,
            reference=lambda w, dtype: w.reference(dtype, _bare),
        ),
        Peer(
            f"{OURS}_without_biases",
            lambda w: w.without_biases().unit(_ours(case, None, None)),
            _has_biases,
            reference=lambda w, dtype: w.without_biases().reference(dtype),
            names=lambda w: w.without_biases().names,
            precompile=True,
        ),
        *forced(NAME, problem_of, lambda name, why: _own(f"{OURS}[{name}]", name, reason_not=why)),
    )


def _peer(
    name: str,
    of: Callable[[Case], Forward],
    reason_not: Callable[[Case], str | None] = lambda _: None,
    order: str = "apart",
) -> Peer:
    return Peer(name, lambda w: w.unit(of(w.case), order), reason_not)


def _compiled(
    name: str, of: Callable[[Case], Forward], order: str, mode: str | None = None
) -> Peer:
    def build(work: GatedWork) -> Unit:
        run = torch.compile(of(work.case), dynamic=False, fullgraph=True, mode=mode)
        return work.unit(run, order)

    why_not = compiler_missing if mode is None else no_compiler
    return Peer(name, build, why_not, precompile=True, tunes=mode is not None)


def _own(
    name: str,
    backend: str | None,
    recompute: int | None = None,
    order: str = "apart",
    reason_not: Callable[[Case], str | None] = lambda _: None,
) -> Peer:
    return Peer(
        name,
        lambda w: w.unit(_ours(w.case, backend, recompute, order), order),
        reason_not,
        precompile=backend in (None, "triton", "elementwise"),
    )


# --------------------------------------------------------------------------------------------
# Why not


def _trains(case: Case) -> str | None:
    return None if case.needs_grad else "without gradients nothing is kept"


def _no_bias(case: Case) -> str | None:
    return "the floor is measured without biases" if case.option("bias") == "yes" else None


def _has_biases(case: Case) -> str | None:
    return "the case itself is without biases" if case.option("bias") == "no" else None


def _no_liger(case: Case) -> str | None:
    if case.device != "cuda":
        return "Liger-Kernel runs on CUDA devices only"
    if importlib.util.find_spec("liger_kernel") is None:
        return "the package liger-kernel is not installed"
    if case.option("activation") not in _LIGER:
        return f"Liger-Kernel has no {case.option('activation')}"
    return None


def _no_quack(case: Case) -> str | None:
    if case.device != "cuda":
        return "QuACK runs on CUDA devices only"
    if importlib.util.find_spec("quack") is None:
        return "the package quack-kernels is not installed"
    if case.dtype not in ("bfloat16", "float16"):
        return "QuACK's GEMMs take 16-bit dtypes"
    if case.option("activation") not in _QUACK:
        return f"QuACK has no {case.option('activation')}"
    if case.needs_grad and case.option("bias") == "yes":
        return "QuACK's MLP has no gradients with biases"
    return None


def _no_tuned_quack(case: Case) -> str | None:
    return too_slow(case) or _no_quack(case)


# --------------------------------------------------------------------------------------------
# What dispatch makes of it


def problem_of(case: Case) -> Problem:
    """The Problem dispatch sees for the forward of a case."""
    return problem(
        "forward",
        *(case.dim(name) for name in ("M", "K", "H", "N")),
        dtype=case.dtype,
        device=case.device,
        activation=case.option("activation"),
        bias=case.option("bias"),
        needs_grad=case.needs_grad,
        precision=matmul_precision(FLOAT_DTYPES[case.dtype]),
    )


chosen, tune = dispatched(problem_of, choices_of, tuning_order)
