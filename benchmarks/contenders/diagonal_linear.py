"""The contenders of experiment ``pseudo-linear``: a diagonal layer by each way to write it.

``linear`` is the full layer that the diagonal one is held against; it computes something else, and
is the yardstick of time only. ``eager`` multiplies, then adds; the others fuse, record or compile
that.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders import diagonal_model as model
from benchmarks.contenders import forwards as by
from benchmarks.contenders.diagonal_machine import LINEAR
from benchmarks.contenders.diagonal_work import (
    Diagonal,
    DiagonalWork,
    Forward,
    eager,
    make_work,
    problem_of,
)
from benchmarks.contenders.dispatched import dispatched, forced
from benchmarks.harness.case import Case
from benchmarks.harness.peer import (
    OURS,
    Peer,
    Told,
    compiler_missing,
    cuda_only,
    no_reduce_overhead,
)
from benchmarks.harness.work import Unit
from fastlinear.activations.reference import activation as activation_of
from fastlinear.dispatch.steps import choices_of, tuning_order
from fastlinear.families.diagonal import backends
from fastlinear.families.diagonal.op import diagonal_linear

__all__ = ["chosen", "make_work", "peers", "problem_of", "tune"]

chosen, tune = dispatched(problem_of, choices_of, tuning_order)


# --------------------------------------------------------------------------------------------
# Contenders


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a case, able to take part or not."""
    wall = ("wall",)
    return (
        Peer(LINEAR, _linear, _layer_only, reference=_as_it_is),
        Peer(
            f"{LINEAR}_cuda_graph",
            lambda w: by.graphed(w, _full(w)),
            lambda c: _layer_only(c) or cuda_only(c),
            wall,
            reference=_as_it_is,
        ),
        Peer("eager", lambda w: w.unit(eager(case))),
        Peer("addcmul", lambda w: w.unit(_multiply_add), _branch_only),
        Peer("addcmul_out", lambda w: w.unit(_multiply_add_into(w)), _plain_forward_only),
        Peer("torchscript", lambda w: w.unit(_scripted(w))),
        Peer("compile", lambda w: w.unit(_compiled(w)), compiler_missing, precompile=True),
        Peer(
            "compile_reduce_overhead",
            lambda w: w.unit(_compiled(w, mode="reduce-overhead")),
            no_reduce_overhead,
            wall,
            precompile=True,
        ),
        Peer(
            "graphed_callable",
            lambda w: w.unit(_graphed_callable(w)),
            lambda c: _layer_only(c) or cuda_only(c),
            wall,
        ),
        Peer("cuda_graph", lambda w: by.graphed(w, w.unit(eager(case))), cuda_only, wall),
        Peer(OURS, _ours_told),
        Peer(f"{OURS}_out", lambda w: w.unit(_into_out(w)), _forward_only),
        Peer(f"{OURS}_bare_copy", _copy, _forward_only, reference=_as_x),
        Peer(
            f"{OURS}_cuda_graph",
            lambda w: by.graphed(w, w.unit(_ours(case, None))),
            cuda_only,
            wall,
        ),
        *forced(
            backends.NAME,
            problem_of,
            lambda name, why: Peer(
                f"{OURS}[{name}]",
                lambda w: w.unit(_ours(w.case, name)),
                why,
                precompile=name == "triton",
            ),
        ),
    )


def _layer_only(case: Case) -> str | None:
    return "the yardstick is a layer, no branch" if case.option("residual") == "yes" else None


def _branch_only(case: Case) -> str | None:
    branch = case.option("residual") == "yes" and case.option("activation") == "none"
    return None if branch else "one op of PyTorch's for a scaled branch"


def _plain_forward_only(case: Case) -> str | None:
    if case.option("activation") != "none" or case.option("bias") != "yes":
        return "one op of PyTorch's for a product and a sum"
    return _forward_only(case)


def _multiply_add(s: Diagonal) -> Tensor:
    assert s.residual is not None
    return torch.addcmul(s.residual, s.x, s.weight)


def _multiply_add_into(work: DiagonalWork) -> Forward:
    outs = [torch.empty_like(s.x) for s in work.stacks]

    def forward(s: Diagonal) -> Tensor:
        assert s.bias is not None
        return torch.addcmul(s.bias, s.x, s.weight, out=outs[s.index])

    return forward


def _copy(work: DiagonalWork) -> Unit:
    """PyTorch's copy of x into memory that is there, the measure of a forward into ``out``."""
    outs = [torch.empty_like(s.x) for s in work.stacks]
    return lambda i: (outs[i].copy_(work.stacks[i].x),)


def _as_x(work: DiagonalWork, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return (work.stacks[0].x.detach().to(dtype),)


def _forward_only(case: Case) -> str | None:
    return "out= is for calls without gradients" if case.needs_grad else None


def _ours(case: Case, backend: str | None) -> Forward:
    name = case.option("activation")

    def forward(s: Diagonal) -> Tensor:
        return diagonal_linear(s.x, s.weight, s.bias, name, s.residual, backend=backend)

    return forward


def _ours_told(work: DiagonalWork) -> Told:
    """With the backends taken, and the time the model expects."""
    told = chosen(work.case, work, False)
    if _layer_only(work.case) is None:
        told |= model.told(work, OURS)
    return Told(work.unit(_ours(work.case, None)), told)


def _into_out(work: DiagonalWork) -> Forward:
    name = work.case.option("activation")
    outs = [torch.empty_like(s.x) for s in work.stacks]

    def forward(s: Diagonal) -> Tensor:
        return diagonal_linear(s.x, s.weight, s.bias, name, s.residual, out=outs[s.index])

    return forward


def _linear(work: DiagonalWork) -> Told:
    return Told(_full(work), model.told(work, LINEAR))


def _full(work: DiagonalWork) -> Unit:
    """``nn.Linear`` with a full weight (K, K), and its gradients."""
    case, x = work.case, work.stacks[0].x
    k = case.dim("K")
    value = activation_of(case.option("activation")).value
    generator = torch.Generator(device=x.device).manual_seed(case.seed + 1)
    weight = torch.empty(k, k, dtype=x.dtype, device=x.device)
    weight.normal_(std=k**-0.5, generator=generator).requires_grad_(case.needs_grad)

    def run(i: int) -> tuple[Tensor, ...]:
        s = work.stacks[i]
        y = value(F.linear(s.x, weight, s.bias))
        if not case.needs_grad:
            return (y,)
        assert s.bias is not None
        return (y, *torch.autograd.grad(y, (s.x, weight, s.bias), s.dy))

    return run


def _as_it_is(work: DiagonalWork, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The yardstick is PyTorch's own layer: its results stand for themselves, in any dtype."""
    with work.mode():
        return tuple(t.detach().to(dtype) for t in _full(work)(0))


def _mul_add(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return x * weight + bias


def _mul_add_relu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.relu(x * weight + bias)


def _mul_add_gelu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.gelu(x * weight + bias)


def _mul_add_silu(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.silu(x * weight + bias)


def _scaled_branch(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual + x * weight


_FUNCTIONS = {
    ("none", ""): _mul_add,
    ("relu", ""): _mul_add_relu,
    ("gelu", ""): _mul_add_gelu,
    ("silu", ""): _mul_add_silu,
    ("none", "yes"): _scaled_branch,
}


def _function(case: Case) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The layer as a model writes it, or a branch that is scaled and added."""
    return _FUNCTIONS[case.option("activation"), case.option("residual")]


def _arguments(s: Diagonal) -> tuple[Tensor, Tensor, Tensor]:
    last = s.bias if s.residual is None else s.residual
    assert last is not None
    return s.x, s.weight, last


def _scripted(work: DiagonalWork) -> Forward:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        run = torch.jit.script(_function(work.case))
    return lambda s: run(*_arguments(s))


def _compiled(work: DiagonalWork, **how: Any) -> Forward:
    run = torch.compile(_function(work.case), dynamic=False, fullgraph=True, **how)
    marks = how.get("mode") == "reduce-overhead"

    def forward(s: Diagonal) -> Tensor:
        if marks:
            torch.compiler.cudagraph_mark_step_begin()
        return run(*_arguments(s))

    return forward


class _PseudoLinear(nn.Module):
    """The document's module, over these very parameters."""

    def __init__(self, stack: Diagonal, run: Callable[..., Tensor]) -> None:
        super().__init__()
        self.run = run
        self.weight = stack.weight
        self.bias = stack.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x, self.weight, self.bias)


def _graphed_callable(work: DiagonalWork) -> Forward:
    """Forward and backward recorded apart, x copied into the graph's own memory at every call."""
    made: list[Any] = []
    for s in work.stacks:
        module = _PseudoLinear(s, _function(work.case))
        sample = s.x.detach().clone().requires_grad_(s.x.requires_grad)
        made.append(torch.cuda.make_graphed_callables(module, (sample,)))
    return lambda s: made[s.index](s.x)
