"""Experiment ``groups``: y_g = act(x_g W_gᵀ + b_g) by every way that models compute it.

Each contender has x, dy and its results in the layout that suits it best; they are laid out before
the clock starts. ``eager`` is the loop over a ``ModuleList`` with chunk and cat.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders.dispatched import dispatched, forced
from benchmarks.harness.case import Case
from benchmarks.harness.peer import OURS, Peer, no_compiler, too_slow
from benchmarks.harness.work import AnyWork, Unit, drawing, rotated
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import KINKED, silent_at_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import choices_of, tuning_order
from fastlinear.families.grouped.op import grouped_linear
from fastlinear.families.grouped.problem import NAME, problem

# Name of a layout → how tokens (M, G, features) lie in it.
_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "tokens": lambda t: t,  # (M, G, F), which is (M, G·F)
    "groups": lambda t: t.transpose(0, 1),  # (G, M, F)
    "channels": lambda t: t.permute(1, 2, 0).flatten(0, 1)[None],  # (1, G·F, M)
    "sequences": lambda t: _sequences(t).flatten(1, 2),  # (B, G·F, M / B)
    "positions": lambda t: t.flatten(1)[..., None],  # (M, G·F, 1)
    "pages": lambda t: t.permute(1, 2, 0)[None],  # (1, G, F, M)
}

_SEQUENCES = 8  # B, where they divide the tokens


def _sequences(t: Tensor) -> Tensor:
    """Tokens (M, G, F) as sequences (B, G, F, M / B)."""
    return t.unflatten(0, (math.gcd(_SEQUENCES, t.shape[0]), -1)).permute(0, 2, 3, 1)


Forward = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(x in its layout, weight (G, N, K), bias (G, N)) → the pre-activation in that layout."""


@dataclass(frozen=True)
class Groups:
    """One input set, tokens first: x (M, G, K), weight (G, N, K), bias (G, N), dy (M, G, N)."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor

    @property
    def bytes(self) -> int:
        """Bytes of all four."""
        return sum(t.nbytes for t in (self.x, self.weight, self.bias, self.dy))

    def to(self, dtype: torch.dtype) -> Groups:
        """The same numbers in another dtype."""
        return Groups(*(t.detach().to(dtype) for t in (self.x, self.weight, self.bias, self.dy)))


@dataclass(frozen=True)
class GroupsWork(AnyWork):
    """The tensors of a case and how a unit of work runs over them."""

    case: Case
    stacks: tuple[Groups, ...]
    cold: bool

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors a unit returns."""
        grads = ("grad.x", "grad.weight", "grad.bias")
        return ("output", *grads) if self.case.needs_grad else ("output",)

    def unit(self, forward: Forward, layout: str) -> Unit:
        """Drive a contender's forward, activation included, on tensors in its layout."""
        lay = _LAYOUTS[layout]
        sets = []
        for given in self.stacks:
            x, dy = (lay(t.detach()).contiguous() for t in (given.x, given.dy))
            x, weight, bias = (
                t.detach().requires_grad_(self.case.needs_grad)
                for t in (x, given.weight, given.bias)
            )
            sets.append((x, weight, bias, dy))
        if not self.case.needs_grad:
            return lambda i: (forward(*sets[i][:3]),)

        def run(i: int) -> tuple[Tensor, ...]:
            *given, dy = sets[i]
            y = forward(*given)
            return (y, *torch.autograd.grad(y, given, dy))

        return run

    def reference(self, dtype: torch.dtype, layout: str = "tokens") -> tuple[Tensor, ...]:
        """What a loop over the groups gives on the first set in ``dtype``, in a layout; the oracle
        in float64."""
        work = replace(self, stacks=(self.stacks[0].to(dtype),))
        value = activation_of(self.case.option("activation")).value
        with work.mode():
            y, *grads = work.unit(lambda *t: value(_loop(*t)), "tokens")(0)
        lay = _LAYOUTS[layout]
        turned = [lay(t.detach()) for t in (y, *grads[:1])]
        return (*turned, *grads[1:])

    def cost(self) -> Cost:
        """Each outer tensor moved once; with gradients, read or written once more for its own."""
        given, passes = self.stacks[0], 2 if self.case.needs_grad else 1
        m = given.x.shape[0]
        products = (3 if self.case.needs_grad else 1) * 2.0 * m * given.weight.numel()
        return Cost(products, float(passes * given.bytes))

    def outer(self) -> dict[str, Tensor]:
        """The tensors of one set, tokens first."""
        given = self.stacks[0]
        return {"x": given.x, "weight": given.weight, "dy": given.dy}


def make_work(case: Case, device: torch.device) -> GroupsWork:
    """Draw the tensors of a case."""
    return GroupsWork(case, *rotated(case, device, _draw, lambda given: given.bytes))


def _draw(case: Case, device: torch.device, index: int) -> Groups:
    m, groups, k, n = (case.dim(name) for name in ("M", "G", "K", "N"))
    draw = drawing(case, device, index)
    weight, bias = draw(groups, n, k, scale=k**-0.5), draw(groups, n)
    x, dy = draw(m, groups, k), draw(m, groups, n)
    if index == 0 and case.needs_grad and case.option("activation") in KINKED:  # what is judged
        exact = _loop(x.double(), weight.double(), bias.double())
        dy = silent_at_kinks(dy, exact, _loop(x, weight, bias))
    return Groups(x, weight, bias, dy)


# --------------------------------------------------------------------------------------------
# How each computes it


def _loop(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A loop of nn.Linear over chunks, as models hold it; x (M, G, K)."""
    m, groups, k = x.shape
    parts = x.view(m, groups * k).chunk(groups, -1)
    layers = zip(parts, weight.unbind(0), bias.unbind(0), strict=True)
    return torch.cat([F.linear(p, w, b) for p, w, b in layers], -1).view(m, groups, -1)


def _chunked(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The same for torch.jit.script."""
    outputs = [F.linear(x[:, g], weight[g], bias[g]) for g in range(weight.size(0))]
    return torch.stack(outputs, 1)


def _conv(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    groups, n, k = weight.shape
    return F.conv1d(x, weight.view(groups * n, k, 1), bias.flatten(), groups=groups)


def _bmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.bmm(x, weight.transpose(1, 2)) + bias[:, None]


def _baddbmm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.baddbmm(bias[:, None], x, weight.transpose(1, 2))


def _multichannel(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """The document's MultichannelLinear, with a bias; x (1, G, K, M)."""
    product = torch.matmul(x.transpose(2, 3), weight.transpose(1, 2)) + bias[:, None]
    return product.transpose(2, 3)


def _einsum(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.einsum("mgk,gnk->mgn", x, weight) + bias


def _vmap(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    y: Tensor = torch.vmap(F.linear, in_dims=(1, 0, 0), out_dims=1)(x, weight, bias)
    return y


def _grouped_mm(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch._grouped_mm(x, weight.transpose(1, 2)) + bias[:, None]


def _ours(backend: str | None, layout: str) -> Callable[[Case], Forward]:
    channels = "b (g k) ..."
    names = {"tokens": "... g k", "groups": "g ... k", "channels": channels, "sequences": channels}
    name = names[layout]

    def of(case: Case) -> Forward:
        activation = case.option("activation")
        return lambda x, w, b: grouped_linear(
            x, w, b, activation=activation, layout=name, backend=backend
        )

    return of


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a case, able to take part or not."""
    return (
        _peer("eager", _loop, "tokens"),
        _peer("loop_scripted", _chunked, "tokens", too_slow, torch.jit.script),
        _peer("conv1d", _conv, "channels"),
        _peer("conv1d_sequences", _conv, "sequences"),
        _peer("conv1d_positions", _conv, "positions"),
        _peer("bmm", _bmm, "groups"),
        _peer("baddbmm", _baddbmm, "groups"),
        _peer("multichannel", _multichannel, "pages"),
        _peer("einsum", _einsum, "tokens"),
        _peer("vmap", _vmap, "tokens"),
        _peer("grouped_mm", _grouped_mm, "groups", _no_grouped_mm),
        _compiled("compile_bmm", _baddbmm, "groups"),
        _compiled("compile_einsum", _einsum, "tokens"),
        _own(OURS, None, "tokens"),
        _own(f"{OURS}_groups", None, "groups"),
        _own(f"{OURS}_channels", None, "channels"),
        _own(f"{OURS}_sequences", None, "sequences"),
        *forced(
            NAME,
            problem_of,
            lambda name, why: _own(f"{OURS}[{name}]", name, "tokens", why),
            without=("eager", "conv"),
        ),
    )


def _peer(
    name: str,
    forward: Forward,
    layout: str,
    reason_not: Callable[[Case], str | None] = lambda _: None,
    prepare: Callable[[Forward], Any] = lambda f: f,
) -> Peer:
    def build(work: GroupsWork) -> Unit:
        value, run = activation_of(work.case.option("activation")).value, prepare(forward)
        return work.unit(lambda *t: value(run(*t)), layout)

    return Peer(name, build, reason_not, reference=_reference(layout))


def _compiled(name: str, forward: Forward, layout: str) -> Peer:
    def build(work: GroupsWork) -> Unit:
        value = activation_of(work.case.option("activation")).value

        def whole(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            return value(forward(x, weight, bias))

        return work.unit(torch.compile(whole, dynamic=False, fullgraph=True), layout)

    return Peer(name, build, no_compiler, reference=_reference(layout), precompile=True)


def _own(
    name: str,
    backend: str | None,
    layout: str,
    reason_not: Callable[[Case], str | None] = lambda _: None,
) -> Peer:
    of = _ours(backend, layout)
    return Peer(
        name,
        lambda w: w.unit(of(w.case), layout),
        reason_not,
        reference=_reference(layout),
        precompile=backend in (None, "triton", "wide"),
    )


def _reference(layout: str) -> Callable[[GroupsWork, torch.dtype], tuple[Tensor, ...]]:
    return lambda work, dtype: work.reference(dtype, layout)


def _no_grouped_mm(case: Case) -> str | None:
    if case.device != "cuda" or case.dtype != "bfloat16":
        return "PyTorch's grouped_mm serves bfloat16 on CUDA only"
    if case.dim("K") % 8 or case.dim("N") % 8:
        return "PyTorch's grouped_mm needs rows of a multiple of 16 bytes"
    return None


# --------------------------------------------------------------------------------------------
# What dispatch makes of it


def problem_of(case: Case) -> Problem:
    """The Problem dispatch sees for the forward of a case, tokens first."""
    return problem(
        "forward",
        *(case.dim(name) for name in ("M", "G", "K", "N")),
        dtype=case.dtype,
        device=case.device,
        activation=case.option("activation"),
        bias=case.option("bias") != "no",
        needs_grad=case.needs_grad,
        precision=matmul_precision(FLOAT_DTYPES[case.dtype]),
    )


chosen, tune = dispatched(problem_of, choices_of, tuning_order)
