"""The family record of ragged_linear: its backends, analytic order and least cost.

A training call is chosen as one step: a backward takes the sizes as its own forward left them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import KINKED
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, Family, deferred, is_installed, register_family
from fastlinear.families.grouped.ragged import products
from fastlinear.families.grouped.ragged.cpu import cpp
from fastlinear.families.grouped.ragged.problem import NAME, SPACE, STEP, problem
from fastlinear.families.grouped.triton import config
from fastlinear.kernels import CPP_SOURCES, TRITON_SOURCES

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

PIECES = ("forward", STEP)
MAX_GROUPS = 65535
"""Groups that a launch of Triton's kernels serves."""
_HERE = "fastlinear.families.grouped.ragged.spec"
_TRITON_SOURCES = (
    *("families/grouped/ragged/formula.py", "families/grouped/ragged/triton"),
    *("families/grouped/triton", *TRITON_SOURCES),
)
_CPP_SOURCES = (
    *("families/grouped/ragged/formula.py", "families/grouped/ragged/cpu"),
    *("families/grouped/cpu", *CPP_SOURCES),
)


def _always(_: Problem) -> str | None:
    return None


def _reason_not_triton(p: Problem) -> str | None:
    if p.device != "cuda":
        return "its kernels run on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not is_installed("triton"):
        return "the package triton is not installed"
    groups = p.dim("G")
    if groups > MAX_GROUPS:
        return f"serves at most {MAX_GROUPS} groups, the call has {groups}"
    sizes, capability = (p.dim("M"), 1, p.dim("K"), p.dim("N")), torch.cuda.get_device_capability()
    return config.reason_not(*sizes, FLOAT_DTYPES[p.dtype], capability)


def _prefer(p: Problem) -> tuple[str, ...]:
    """Analytic order, used only where no measurement covers the Problem."""
    cpp_first = p.dtype == "float32" or p.dim("N") * p.dim("K") <= cpp.MOST_HALF
    return ("triton", "cpp", "eager") if p.device == "cuda" or cpp_first else ("eager", "cpp")


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece; the sizes of the groups vary, and few rows have none."""
    m, groups, k, n = (p.dim(name) for name in ("M", "G", "K", "N"))
    dtype, act = FLOAT_DTYPES[p.dtype], p.option("activation")
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator, device=device) * scale).to(dtype)

    shares = torch.rand(groups, generator=generator, device=device)
    sizes = (shares / shares.sum() * m).long().clamp_(max=m)
    weight, bias = draw(groups, n, k, scale=k**-0.5), None
    if p.option("bias") == "yes":
        bias = draw(groups, n)
    x, dy = draw(m, k), draw(m, n)
    if p.piece == "forward":
        return x, weight, (sizes, bias), act
    if act in KINKED:
        x = products.clear_of_kinks(x, weight, sizes, bias, lambda rows: draw(rows, k))
    return x, weight, (sizes, bias), act, dy


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    return next(b for b in FAMILY.candidates(p.piece) if b.name == "eager").load()(*inputs)


def cost(p: Problem) -> Cost:
    """Least flops and bytes: every tensor once."""
    m, groups, k, n = (p.dim(name) for name in ("M", "G", "K", "N"))
    size = FLOAT_DTYPES[p.dtype].itemsize
    parameters = groups * n * (k + (p.option("bias") == "yes"))
    if p.piece == "forward":
        return Cost(2.0 * m * k * n, size * (m * (k + n) + parameters))
    return Cost(6.0 * m * k * n, size * (m * (3 * k + 2 * n) + 3 * parameters))


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
                ("eager", _always, ("families/grouped/ragged/products.py",)),
                ("triton", _reason_not_triton, _TRITON_SOURCES),
                ("cpp", cpp.reason_not, _CPP_SOURCES),
            )
        ),
        prefer=_prefer,
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        examples=_examples,
        space=SPACE,
        command="fastlinear.families.grouped.ragged.command:COMMAND",
        cold=True,
        timed=deferred("fastlinear.families.grouped.ragged.spec:timed"),
    )
)
