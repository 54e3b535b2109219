"""The family record of diagonal_linear: its pieces, backends and least cost.

Light on purpose: backends are named here and imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import KINKED
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import Backend, Family, always, deferred, register_family
from fastlinear.dispatch.drawn import Draw
from fastlinear.families.diagonal import addcmul, batch_invariant, reference
from fastlinear.families.diagonal.cpu import cpp
from fastlinear.families.diagonal.problem import NAME, PIECES, SPACE, STEP, problem
from fastlinear.families.diagonal.triton import config
from fastlinear.kernels import CPP_SOURCES, TRITON_SOURCES

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

_HERE = "fastlinear.families.diagonal"
_TRITON_SOURCES = ("families/diagonal/triton", *TRITON_SOURCES)
_MAX_REDRAWS = 64
_CPP_SOURCES = ("families/diagonal/cpu", *CPP_SOURCES)


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece; differentiated ones clear of an activation's kink."""
    m, k = p.dim("M"), p.dim("K")
    draw = Draw(p, device, seed)

    def laid_out() -> Tensor:
        if p.option("x") == "strided":
            return draw(k, m).t()
        return draw(m, 2 * k + 1)[:, :k] if p.option("x") == "rows_apart" else draw(m, k)

    x, weight = laid_out(), draw(k)
    bias = draw(k) if p.option("bias") == "yes" else None
    residual = laid_out() if p.option("residual") == "yes" else None
    name = p.option("activation")
    if p.piece == "forward":
        return x, weight, bias, name, residual, None
    if name in KINKED:
        x = clear_of_kink(x, weight, bias, lambda: draw(m, k))
    dy = draw(m, k)
    if p.piece == STEP:
        return x, weight, (bias, residual), name, dy
    return dy, x, weight, bias, name, (True, True, bias is not None)


def clear_of_kink(
    x: Tensor, weight: Tensor, bias: Tensor | None, redraw: Callable[[], Tensor]
) -> Tensor:
    """x (M, K) with the elements drawn again at which rounding may decide the sign of x ∘ w + b."""
    reach = 8 * torch.finfo(x.dtype).eps
    w, b = weight.double(), 0.0 if bias is None else bias.double()
    for _ in range(_MAX_REDRAWS):
        product = x.double() * w
        size = product.abs() + (0.0 if bias is None else bias.double().abs())
        near = (product + b).abs() <= reach * size
        if not bool(near.any()):
            break
        x = torch.where(near, redraw(), x)
    return x


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    if p.piece == STEP:
        return _STEP_EAGER.load(p)(*inputs)
    return getattr(reference, p.piece)(*inputs)


def cost(p: Problem) -> Cost:
    """Least bytes: every tensor once. There is no matrix product, hence no flops."""
    if p.piece == STEP:
        parts = [cost(p.with_piece(piece)) for piece in PIECES]
        return Cost(0.0, sum(c.bytes for c in parts))
    m, k = p.dim("M"), p.dim("K")
    size = FLOAT_DTYPES[p.dtype].itemsize
    bias = p.option("bias") == "yes"
    if p.piece == "forward":
        residual = p.option("residual") == "yes"
        return Cost(0.0, size * ((2 + residual) * m * k + (1 + bias) * k))
    read_again = bias and p.option("activation") != "none"
    return Cost(0.0, size * (3 * m * k + (2 + bias + read_again) * k))


def _reason_not_pieces(p: Problem) -> str | None:
    return "float64 is left to PyTorch's own ops" if p.dtype == "float64" else None


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    place = {name: facts[name] for name in ("dtype", "device")}
    return {"": problem("forward", 64, 1024, **place)}


_STEP_EAGER = Backend(NAME, STEP, "eager", f"{_HERE}.spec:eager", always)
_PIECES_SOURCES = (
    *("families/diagonal/autograd.py", "families/diagonal/addcmul.py"),
    *(*_TRITON_SOURCES, *_CPP_SOURCES),
)
FAMILY = register_family(
    Family(
        name=NAME,
        pieces=(*PIECES, STEP),
        backends=(
            _STEP_EAGER,
            Backend(
                NAME, STEP, "pieces", f"{_HERE}.spec:pieces", _reason_not_pieces, _PIECES_SOURCES
            ),
            *(Backend(NAME, p, "eager", f"{_HERE}.reference:{p}", always) for p in PIECES),
            Backend(NAME, "forward", "addcmul", f"{_HERE}.addcmul:forward", addcmul.reason_not),
            *(
                Backend(
                    *(NAME, p, "triton", f"{_HERE}.triton.backend:{p}"),
                    config.reason_not,
                    _TRITON_SOURCES,
                )
                for p in PIECES
            ),
            *(
                Backend(NAME, p, "cpp", f"{_HERE}.cpu.cpp:{p}", cpp.reason_not, _CPP_SOURCES)
                for p in PIECES
            ),
            Backend(
                *(NAME, "forward", BATCH_INVARIANT, f"{_HERE}.batch_invariant:forward"),
                *(batch_invariant.reason_not, (*_CPP_SOURCES, *_TRITON_SOURCES)),
                on_request=True,
            ),
        ),
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        cpu_work=deferred(f"{_HERE}.cpu_work:work"),
        gpu_work=deferred(f"{_HERE}.gpu_work:work"),
        examples=_examples,
        space=SPACE,
        command=f"{_HERE}.command:COMMAND",
        cold=True,
        timed=deferred(f"{_HERE}.spec:timed"),
    )
)
