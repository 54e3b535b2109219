"""Experiment ``graphed``: one module by every way of replaying CUDA graphs, as callers see it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.contenders import forwards as by
from benchmarks.harness import work as linears
from benchmarks.harness.case import Case
from benchmarks.harness.peer import OURS, Peer, cuda_only, no_compiler
from benchmarks.harness.work import LEARNING_RATE, AnyWork, Unit
from fastlinear import nn as fl_nn
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.cuda_graphs.graphed import graphed

Module = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A pre-norm transformer block: x (B, T, width) plus attention, plus a gelu MLP of 4 widths."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(b, t, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, heads, T, width / heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, width))
        h = F.gelu(self.up(self.norm_2(x)), approximate="tanh")
        result: Tensor = x + self.down(h)
        return result


@dataclass(frozen=True)
class Sample:
    """One input: x (B, T, width), and the target of a training step."""

    x: Tensor
    target: Tensor


@dataclass(frozen=True)
class BlockWork(AnyWork):
    """A stack of blocks and one input; a unit of work is a forward or a training step.

    Attributes:
        case: what is measured.
        model: on the device, in the case's dtype.
        stacks: the one input: nothing rotates, a model runs over and over.
        cold: False.
    """

    case: Case
    model: nn.Module
    stacks: tuple[Sample]
    cold: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a unit returns."""
        if not self.case.needs_grad:
            return ("output",)
        return ("output", *(f"grad.{name}" for name, _ in self.model.named_parameters()))

    def unit(self, forward: Callable[[Any], Tensor]) -> Unit:
        """One forward; or forward, mean squared error, backward and SGD."""
        (sample,) = self.stacks
        if not self.case.needs_grad:
            return lambda _: (forward(sample),)
        parameters = list(self.model.parameters())
        optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)

        def step(_: int) -> tuple[Tensor, ...]:
            optimizer.zero_grad(set_to_none=True)
            y = forward(sample)
            F.mse_loss(y, sample.target).backward()
            optimizer.step()
            return (y, *(p.grad for p in parameters if p.grad is not None))

        return step

    def private(self) -> Self:
        """The same work on a model of its own: a training step changes its parameters."""
        return replace(self, model=copy.deepcopy(self.model))

    def reference(self, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """What plain PyTorch gives in ``dtype``; the oracle in float64."""
        (sample,) = self.stacks
        model = copy.deepcopy(self.model).to(dtype)
        as_dtype = Sample(sample.x.to(dtype), sample.target.to(dtype))
        work = replace(self, model=model, stacks=(as_dtype,))
        with work.mode():
            return tuple(t.detach() for t in work.unit(lambda s: model(s.x))(0))

    def cost(self) -> Cost:
        """Flops of all matrix products as torch counts them; inputs, results and parameters moved
        once, in a step read and written."""
        from torch.utils.flop_counter import FlopCounterMode

        work = self.private()
        with work.mode(), FlopCounterMode(display=False) as counter:
            work.unit(lambda s: work.model(s.x))(0)
        (sample,) = self.stacks
        size = sum(p.nbytes for p in self.model.parameters())
        moved = (2 if self.case.needs_grad else 1) * (size + sample.x.nbytes)
        return Cost(counter.get_total_flops(), float(moved))

    def outer(self) -> dict[str, Tensor]:
        """The input."""
        return {"x": self.stacks[0].x}


def make_work(case: Case, device: torch.device) -> Any:
    """A chain of linears as in the other experiments, or blocks with random weights."""
    if case.option("model") != "block":
        return linears.make_work(case, device)
    torch.manual_seed(case.seed)
    width, dtype = case.dim("H"), FLOAT_DTYPES[case.dtype]
    model = nn.Sequential(*(Block(width, width // 64) for _ in range(case.dim("L"))))
    model = model.to(device, dtype).requires_grad_(case.needs_grad)
    generator = torch.Generator().manual_seed(case.seed)

    def draw() -> Tensor:
        values = torch.randn(case.dim("B"), case.dim("T"), width, generator=generator)
        return values.to(device, dtype)

    return BlockWork(case, model, (Sample(draw(), draw()),))


def peers(case: Case) -> tuple[Peer, ...]:
    """Eager, PyTorch's two ways into CUDA graphs, and ours over the module and over its MLP."""
    return (
        Peer("eager", lambda w: _unit(w, module_of(w))),
        Peer("compile_reduce_overhead", _compiled, _no_compile, precompile=True),
        Peer("make_graphed_callables", _pytorchs, cuda_only),
        Peer(OURS, lambda w: _unit(w, graphed(module_of(w))), cuda_only),
        Peer(
            f"{OURS}_reusing",
            lambda w: _unit(w, graphed(module_of(w), reuse_outputs=True)),
            cuda_only,
        ),
        Peer(f"{OURS}[mlp]", lambda w: _unit(w, graphed(_mlp(w))), _no_mlp),
    )


def module_of(work: Any) -> nn.Module:
    """The module under test, over the work's own parameters."""
    return work.model if isinstance(work, BlockWork) else by.sequential(work.stacks[0])


def _unit(work: Any, module: Module) -> Unit:
    unit: Unit = work.unit(lambda stack: module(stack.x))
    return unit


def _mlp(work: Any) -> nn.Module:
    return fl_nn.MLP.from_sequential(by.sequential(work.stacks[0]))


def _pytorchs(work: Any) -> Unit:
    make: Any = torch.cuda.make_graphed_callables
    return _unit(work, make(module_of(work), (work.stacks[0].x,)))


def _compiled(work: Any) -> Unit:
    run = torch.compile(module_of(work), dynamic=False, mode="reduce-overhead")

    def forward(x: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        y: Tensor = run(x)
        return y

    return _unit(work, forward)


def _no_compile(case: Case) -> str | None:
    return cuda_only(case) or no_compiler(case)


def _no_mlp(case: Case) -> str | None:
    if case.option("model") == "block":
        return "attention and norms are no chain of linear layers"
    return cuda_only(case)
