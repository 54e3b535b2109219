"""Experiment ``gated-mlp``: (act(x Wgᵀ) ∘ (x Wuᵀ)) Wdᵀ by every way that models compute it.

Each contender has its weights in the layout that suits it best, laid out before the clock starts.
``eager`` is what transformers runs. ``fastlinear_bare_products`` is no contender but the floor: the
matrix products alone, by PyTorch, with nothing elementwise between them.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.bench.case import Case
from fastlinear.bench.peer import OURS, Peer, compiler_missing, no_max_autotune, too_slow
from fastlinear.bench.work import Unit
from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.device import device_facts
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.tune import tune as tune_problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.gated_mlp.op import call
from fastlinear.ops.gated_mlp.problem import NAME, problem
from fastlinear.ops.gated_mlp.selection import choices_of, tuning_order
from fastlinear.ops.gated_mlp.stacking import Biases, Weights, halves

_MAX_SETS = 64
_LIGER = {
    "silu": ("swiglu", "LigerSiLUMulFunction"),
    "gelu_tanh": ("geglu", "LigerGELUMulFunction"),
}
_QUACK = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu", "sigmoid": "glu"}
Forward = Callable[[Tensor, Weights, Biases], Tensor]


@dataclass(frozen=True)
class Gated:
    """One input set: x (M, K), gate and up apart, biases or None, dy (M, N)."""

    x: Tensor
    weights: Weights
    biases: Biases
    dy: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All there are but dy."""
        return tuple(t for t in (self.x, *self.weights, *self.biases) if t is not None)

    @property
    def bytes(self) -> int:
        """Bytes of all of them."""
        return sum(t.nbytes for t in (*self.tensors, self.dy))

    def to(self, dtype: torch.dtype) -> Gated:
        """The same numbers in another dtype."""

        def one(t: Any) -> Any:
            return None if t is None else t.detach().to(dtype)

        weights, biases = Weights(*map(one, self.weights)), Biases(*map(one, self.biases))
        return Gated(one(self.x), weights, biases, one(self.dy))


@dataclass(frozen=True)
class GatedWork:
    """The tensors of a case and how a unit of work runs over them."""

    case: Case
    stacks: tuple[Gated, ...]
    cold: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a unit returns."""
        if not self.case.needs_grad:
            return ("output",)
        kinds = ("gate", "up", "down")
        given = self.stacks[0]
        held = [k for k, b in zip(kinds, given.biases, strict=True) if b is not None]
        weights = (f"grad.{k}_weight" for k in kinds)
        return ("output", "grad.x", *weights, *(f"grad.{k}_bias" for k in held))

    def mode(self) -> AbstractContextManager[Any]:
        """The gradient mode of every call."""
        return torch.enable_grad() if self.case.needs_grad else torch.no_grad()

    def unit(self, forward: Forward, order: str = "apart") -> Unit:
        """Drive a contender's forward on weights in its order; gradients of a stack are told apart
        as views."""
        grad = self.case.needs_grad
        sets = [(_laid(given, order, grad), given.dy) for given in self.stacks]
        if not grad:
            return lambda i: (forward(*sets[i][0]),)

        def run(i: int) -> tuple[Tensor, ...]:
            (x, weights, biases), dy = sets[i]
            given = [t for t in (x, *weights, *biases) if t is not None]
            y = forward(x, weights, biases)
            found = iter(torch.autograd.grad(y, given, dy))
            dx = next(found)
            dw, db = ([None if t is None else next(found) for t in ts] for ts in (weights, biases))
            for grads in (dw, db):
                if order != "apart" and grads[0] is not None:
                    grads[:2] = halves(grads[0], None, order, 0)
            return (y, dx, *(g for g in (*dw, *db) if g is not None))

        return run

    def private(self) -> GatedWork:
        """This work: no unit changes its parameters."""
        return self

    def reference(self, dtype: torch.dtype, forward: Forward | None = None) -> tuple[Tensor, ...]:
        """What PyTorch's layers give on the first set in ``dtype``; the oracle in float64."""
        work = replace(self, stacks=(self.stacks[0].to(dtype),))
        with work.mode():
            return tuple(t.detach() for t in work.unit(forward or _eager(self.case))(0))

    def cost(self) -> Cost:
        """Each outer tensor moved once; with gradients, read or written once more for its own."""
        given, passes = self.stacks[0], 2 if self.case.needs_grad else 1
        numbers = sum(w.numel() for w in given.weights if w is not None)
        products = (3 if self.case.needs_grad else 1) * 2.0 * given.x.shape[0] * numbers
        return Cost(products, float(passes * given.bytes))

    def shapes(self) -> dict[str, list[int]]:
        """Shapes of the tensors of one set."""
        return {name: list(t.shape) for name, t in self._named().items()}

    def strides(self) -> dict[str, list[int]]:
        """Strides of the same."""
        return {name: list(t.stride()) for name, t in self._named().items()}

    def _named(self) -> dict[str, Tensor]:
        given = self.stacks[0]
        kinds = (f"{kind}_weight" for kind in ("gate", "up", "down"))
        held = {k: w for k, w in zip(kinds, given.weights, strict=True) if w is not None}
        return {"x": given.x, **held, "dy": given.dy}


def make_work(case: Case, device: torch.device) -> GatedWork:
    """Draw the tensors of a case; on CUDA as many sets as exceed the L2 cache twice together."""
    first = _draw(case, device, 0)
    sets, cold = 1, False
    if device.type == "cuda":
        wanted = math.ceil(2 * device_facts(device).l2_bytes / first.bytes)
        sets, cold = max(1, min(_MAX_SETS, wanted)), wanted <= _MAX_SETS
    return GatedWork(case, (first, *(_draw(case, device, i) for i in range(1, sets))), cold)


def _draw(case: Case, device: torch.device, index: int) -> Gated:
    m, k, h, n = (case.dim(name) for name in ("M", "K", "H", "N"))
    generator = torch.Generator(device=device).manual_seed(case.seed * 1000 + index)
    dtype, bias = FLOAT_DTYPES[case.dtype], case.option("bias") == "yes"

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, device=device, generator=generator) * scale).to(dtype)

    weights = Weights(*(draw(o, i, scale=i**-0.5) for o, i in ((h, k), (h, k), (n, h))))
    biases = Biases(*(draw(size) if bias else None for size in (h, h, n)))
    x = draw(m, k)
    if index == 0 and case.needs_grad and case.option("activation") in KINKED:

        def gates(rows: Tensor) -> tuple[Tensor]:
            b = None if biases.gate is None else biases.gate.to(rows.dtype)
            return (F.linear(rows, weights.gate.to(rows.dtype), b),)

        x, _ = clear_of_kinks(x, gates, lambda rows: draw(rows, k))
    return Gated(x, weights, biases, draw(m, n))


def _laid(given: Gated, order: str, grad: bool) -> tuple[Tensor, Weights, Biases]:
    """The tensors of a set as leaves, gate and up in an order."""

    def leaf(t: Tensor | None) -> Any:
        return None if t is None else t.detach().requires_grad_(grad)

    def stacked(one: Tensor | None, other: Tensor | None) -> Tensor | None:
        if one is None or other is None:
            return None
        both = torch.stack([one, other], 1) if order == "interleaved" else torch.stack([one, other])
        return both.flatten(0, 1)

    w, b = given.weights, given.biases
    if order != "apart":
        assert order in ("gate_up", "interleaved")
        w = Weights(stacked(w.gate, w.up), None, w.down)  # type: ignore[arg-type]
        b = Biases(stacked(b.gate, b.up), None, b.down)
    return leaf(given.x), Weights(*map(leaf, w)), Biases(*map(leaf, b))


# --------------------------------------------------------------------------------------------
# How each computes it


def _eager(case: Case) -> Forward:
    value = activation_of(case.option("activation")).value

    def forward(x: Tensor, w: Weights, b: Biases) -> Tensor:
        assert w.up is not None
        assert w.down is not None
        h = value(F.linear(x, w.gate, b.gate)) * F.linear(x, w.up, b.up)
        return F.linear(h, w.down, b.down)

    return forward


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
    forced = [b for b in family(NAME).candidates("forward") if b.name != "eager"]
    return (
        _peer("eager", _eager),
        _peer("eager_stacked", _stacked, order="gate_up"),
        _compiled("compile", _eager, "apart"),
        _compiled("compile_stacked", _stacked, "gate_up"),
        _compiled("compile_max_autotune", _eager, "apart", "max-autotune-no-cudagraphs"),
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
        *(_forced(b.name) for b in forced),
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

    why_not = compiler_missing if mode is None else no_max_autotune
    return Peer(name, build, why_not, ahead=True, tunes=mode is not None)


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
        ahead=backend in (None, "triton", "elementwise"),
    )


def _forced(backend: str) -> Peer:
    def reason_not(case: Case) -> str | None:
        (record,) = (b for b in family(NAME).candidates("forward") if b.name == backend)
        return record.reason_not(problem_of(case))

    return _own(f"{OURS}[{backend}]", backend, reason_not=reason_not)


# --------------------------------------------------------------------------------------------
# Why not


def _trains(case: Case) -> str | None:
    return None if case.needs_grad else "without gradients nothing is kept"


def _no_bias(case: Case) -> str | None:
    return "the floor is measured without biases" if case.option("bias") == "yes" else None


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


def chosen(case: Case, work: GatedWork, captured: bool) -> dict[str, str]:
    """Piece → backend and source: what dispatch takes, in a CUDA graph or not."""
    p = replace(problem_of(case), captured=captured and case.device == "cuda")
    return {c.problem.piece: f"{c.backend.name} ({c.source})" for c in choices_of(p)}


def tune(case: Case, device: torch.device) -> None:
    """Tune all pieces, on a GPU inside CUDA graphs as well."""
    forward = problem_of(case)
    for p in (forward, forward.other_regime()):
        for piece in () if p is None else tuning_order(p):
            tune_problem(piece, device=device)
