"""The family record of unequal_linear: its backends, analytic order and least cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, Family, deferred, register_family
from fastlinear.families.grouped.unequal.cpu import cpp
from fastlinear.families.grouped.unequal.problem import NAME, SPACE, STEP, problem
from fastlinear.kernels import CPP_SOURCES, CUDA_SOURCES

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

PIECES = ("forward", STEP)
_HERE = "fastlinear.families.grouped.unequal.spec"
# Most operations of a group, on average. Measured with gradients, 26 groups: of 2.7 billion each
# 1845 µs on an H100 where a loop takes 2132 on an H200, and of 330 million whose rows begin
# anywhere 691 where it takes 1348.
_MOST_FLOPS, _MOST_FLOPS_UNALIGNED, _MOST_FLOPS_SINGLE = 3_000_000_000, 400_000_000, 400_000_000
# K·N of a group on the CPU, on average, up to which it wins over MKL's and oneDNN's products
_MOST_WEIGHTS = {"float32": 1 << 17, "bfloat16": 1 << 18}
_FEW_GROUPS = 4  # that a GPU computes one after the other as fast
_SOURCES = (
    *("families/grouped/unequal/autograd.py", "families/grouped/unequal/layout.py"),
    *("families/grouped/unequal/cuda", "families/grouped/unequal/cpu", "families/grouped/cpu"),
    *(*CUDA_SOURCES, *CPP_SOURCES),
)


def _always(_: Problem) -> str | None:
    return None


def _reason_not_together(p: Problem) -> str | None:
    if p.device != "cuda":
        return cpp.reason_not(p)
    from fastlinear.families.grouped.unequal.cuda import backend

    return backend.reason_not(p)


def _prefer(p: Problem) -> tuple[str, ...]:
    """Analytic order, used only where no measurement covers the Problem: all groups together
    where single products are too small to fill the machine."""
    return ("together", "eager") if _pays(p) else ("eager", "together")


def _pays(p: Problem) -> bool:
    groups, weights = p.dim("G"), p.dim("KN")
    if p.device != "cuda":
        return groups > 1 and weights <= _MOST_WEIGHTS.get(p.dtype, 0)
    most = _MOST_FLOPS if p.option("rows") == "aligned" else _MOST_FLOPS_UNALIGNED
    if p.dtype == "float32":
        most = _MOST_FLOPS_SINGLE
    return groups >= _FEW_GROUPS and 2 * p.dim("M") * weights <= most * groups


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, groups of half to one and a half the mean sizes."""
    groups, dtype, act = p.dim("G"), FLOAT_DTYPES[p.dtype], p.option("activation")
    generator = torch.Generator(device=device).manual_seed(seed)
    unit = 8 if p.option("rows") == "aligned" else 1

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    def sizes(mean: int, unit: int, turn: int) -> list[int]:
        half = mean // 2 if groups > 1 else 0
        spread = [mean + half * ((g + turn) % 3 - 1) for g in range(groups)]
        return [max(unit, size // unit * unit) for size in spread]

    ks, ns = sizes(p.dim("K"), unit, 0), sizes(p.dim("N"), unit, 1)
    ms = sizes(max(1, p.dim("M") // groups), 1, 2)
    weights = tuple(draw(n, k, scale=k**-0.5) for k, n in zip(ks, ns, strict=True))
    biases: Any = None
    if p.option("bias") != "no":
        some = p.option("bias") == "some"
        biases = tuple(None if some and g % 2 else draw(n) for g, n in enumerate(ns))
    xs = tuple(draw(m, k) for m, k in zip(ms, ks, strict=True))
    if p.piece == "forward":
        return xs, weights, biases, act
    if act in KINKED:
        held = biases or (None,) * groups
        xs = tuple(_clear(*group, draw) for group in zip(xs, weights, held, strict=True))
    return xs, weights, biases, act, tuple(draw(m, n) for m, n in zip(ms, ns, strict=True))


def _clear(x: Tensor, weight: Tensor, bias: Tensor | None, draw: Any) -> Tensor:
    """x whose pre-activations stay away from 0, where rounding would choose the gradient."""

    def pre_activations(rows: Tensor) -> tuple[Tensor]:
        b = None if bias is None else bias.to(rows.dtype)
        return (torch.nn.functional.linear(rows, weight.to(rows.dtype), b),)

    return clear_of_kinks(x, pre_activations, lambda rows: draw(rows, x.shape[1]))[0]


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    return next(b for b in FAMILY.candidates(p.piece) if b.name == "eager").load()(*inputs)


def cost(p: Problem) -> Cost:
    """Least flops and bytes of groups of the mean size: every tensor once."""
    m, groups, k, n = (p.dim(name) for name in ("M", "G", "K", "N"))
    size = FLOAT_DTYPES[p.dtype].itemsize
    parameters = groups * (p.dim("KN") + n * (p.option("bias") != "no"))
    flops = 2.0 * m * p.dim("KN")
    if p.piece == "forward":
        return Cost(flops, size * (m * (k + n) + parameters))
    return Cost(3 * flops, size * (m * (3 * k + 2 * n) + 3 * parameters))


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    return {"": problem("forward", 512, 8, 256, 256, **facts)}


FAMILY = register_family(
    Family(
        name=NAME,
        pieces=PIECES,
        backends=tuple(
            Backend(NAME, piece, name, f"{_HERE}:{name}_{piece}", reason_not, sources)
            for piece in PIECES
            for name, reason_not, sources in (
                ("eager", _always, ()),
                ("together", _reason_not_together, _SOURCES),
            )
        ),
        prefer=_prefer,
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        examples=_examples,
        space=SPACE,
        command="fastlinear.families.grouped.unequal.command:COMMAND",
        cold=True,
        timed=deferred("fastlinear.families.grouped.unequal.spec:timed"),
    )
)
