"""The family record of gated_mlp: its pieces, backends and least cost.

Light on purpose: backends are named here and imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import (
    Backend,
    Family,
    always,
    deferred,
    register_family,
    why_no_gpu,
    why_no_hopper,
    widened_backends,
)
from fastlinear.dispatch.drawn import Draw
from fastlinear.families.gated import batch_invariant, reference
from fastlinear.families.gated.cpu import cpp, gemm, half, onednn
from fastlinear.families.gated.cuda import backend, planes
from fastlinear.families.gated.problem import NAME, PIECES, SPACE, STEP, has_down, problem
from fastlinear.families.gated.stacking import Biases, Weights, split_pre
from fastlinear.families.gated.triton import config
from fastlinear.kernels import CPP_SOURCES, CUDA_SOURCES, TRITON_SOURCES

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

_DEEP = 2048
_HERE = "fastlinear.families.gated"
_CPU_SOURCES = (
    *("families/gated/cpu", "families/gated/products.py", "families/linear/cpu"),
    *CPP_SOURCES,
)
_TRITON_SOURCES = (
    *("families/gated/triton", "families/gated/products.py", "families/gated/layers.py"),
    *("families/linear/triton", "families/linear/cuda", *TRITON_SOURCES, *CUDA_SOURCES),
)
_PLANES_SOURCES = ("families/gated/cuda/planes.py", "families/linear/cuda", *CUDA_SOURCES)
_CUDA_FILES = (
    *("backend.py", "bias_sums.cu", "bias_sums.py", "config.py", "plans.py"),
    *("backward.cu", "dy_sums.h", "forward.cu"),
)
_CUDA_SOURCES = (
    *(f"families/gated/cuda/{name}" for name in _CUDA_FILES),
    *("families/gated/products.py", *CUDA_SOURCES),
)


def _reason_not_triton(fused: bool) -> Callable[[Problem], str | None]:
    """Why a Triton backend cannot serve, whose products are its own or not."""

    def reason_not(p: Problem) -> str | None:
        if (why := why_no_gpu(p, "triton")) is not None:
            return why
        if fused and p.piece == "backward" and not has_down(p):
            return "without a down projection there is no product to hold the gate's derivatives"
        sizes = p.dim("M"), p.dim("K"), p.dim("H"), p.dim("N") if has_down(p) else 0
        capability = torch.cuda.get_device_capability()
        return config.reason_not(*sizes, FLOAT_DTYPES[p.dtype], capability, fused)

    return reason_not


def _reason_not_planes(p: Problem) -> str | None:
    return why_no_hopper(p) or planes.reason_not(p)


def _why_not_deep(p: Problem) -> str | None:
    """oneDNN adds up some thousand products one after the other: gated ones of deep float32 layers
    then are off by up to 2.2 times as much as PyTorch's."""
    deep = p.dtype == "float32" and p.dim("K") >= _DEEP
    if not deep or gemm.reason_not(p) is not None:
        return None
    return "sums of so many products are less exact"


def _reason_not_pieces(p: Problem) -> str | None:
    return "float64 is left to PyTorch's own ops" if p.dtype == "float64" else None


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, scaled so that pre-activations are near unit size."""
    m, k, h = p.dim("M"), p.dim("K"), p.dim("H")
    n = p.dim("N") if has_down(p) else 0
    name, order = p.option("activation"), p.option("order")
    draw = Draw(p, device, seed)

    def matrix(rows: int, columns: int) -> Tensor:
        scale = columns**-0.5
        if p.option("w") == "dense":
            return draw(rows, columns, scale=scale)
        return draw(columns, rows, scale=scale).t()

    def vector(size: int, kind: str) -> Tensor | None:
        held = {"yes": True, "no": False, "some": kind == ("gate" if stacked else "up")}
        return draw(size) if held[p.option("bias")] else None

    stacked = order != "apart"
    rows = 2 * h if stacked else h
    weights = Weights(
        matrix(rows, k), None if stacked else matrix(h, k), matrix(n, h) if n else None
    )
    biases = Biases(
        vector(rows, "gate"),
        None if stacked else vector(h, "up"),
        vector(n, "down") if n else None,
    )
    x = draw(m, k) if p.option("x") == "dense" else draw(k, m).t()
    if p.piece != "forward" and name in KINKED:
        x = _clear_of_kinks(x, weights, biases, order, seed).as_strided(x.shape, (k, 1))
    if p.piece == "forward":
        save = p.needs_grad and p.option("recompute") == "no"
        return x, weights, biases, name, order, save
    dy = draw(m, n or h)
    if p.piece == STEP:
        return x, weights, biases, name, order, dy
    pre = None
    if p.option("recompute") == "no":
        pre = reference.pre_activations(x, weights, biases)
    held = [t is not None for t in (*weights, *biases)]
    return dy, pre, x, weights, biases, name, order, (True, *held)


def _clear_of_kinks(x: Tensor, weights: Weights, biases: Biases, order: str, seed: int) -> Tensor:
    """x (M, K), dense, whose gates stay away from 0, where rounding would choose the gradient."""
    more = torch.Generator(device=x.device).manual_seed(seed + 1)

    def gates(rows: Tensor) -> tuple[Tensor]:
        def wide(t: Any) -> Any:
            return None if t is None else t.to(rows.dtype)

        w, b = Weights(*map(wide, weights)), Biases(*map(wide, biases))
        return (split_pre(reference.pre_activations(rows, w, b), order)[0],)

    def redraw(rows: int) -> Tensor:
        return torch.randn(rows, x.shape[1], generator=more, device=x.device).to(x.dtype)

    return clear_of_kinks(x, gates, redraw)[0].contiguous()


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    at = 3 if p.piece == "backward" else 1
    named = Weights(*inputs[at]), Biases(*inputs[at + 1])  # plain tuples where they were converted
    inputs = (*inputs[:at], *named, *inputs[at + 2 :])
    if p.piece == STEP:
        return _STEP_EAGER.load(p)(*inputs)
    return getattr(reference, p.piece)(*inputs)


def cost(p: Problem) -> Cost:
    """Least flops and bytes: x, y, parameters and their gradients moved once, and what training
    keeps."""
    if p.piece == STEP:
        parts = [cost(p.with_piece(piece)) for piece in PIECES]
        return parts[0] + parts[1]
    m, k, h = p.dim("M"), p.dim("K"), p.dim("H")
    n = p.dim("N") if has_down(p) else 0
    size = FLOAT_DTYPES[p.dtype].itemsize
    recompute = p.option("recompute") == "yes"
    weights = 2 * h * k + n * h
    biases = {"no": 0, "yes": 2 * h + n, "some": 2 * h if p.option("order") != "apart" else h}
    bias = biases[p.option("bias")]
    outer = m * k + m * (n or h)
    first, down = 4.0 * m * h * k, 2.0 * m * h * n
    if p.piece == "forward":
        pre = 2 * m * h if p.needs_grad and not recompute else 0
        return Cost(first + down, size * (outer + weights + bias + pre))
    pre = 0 if recompute else 2 * m * h
    flops = 2 * (first + down) + (first if recompute else 0.0)
    down_bias = n if p.option("bias") == "yes" else 0
    read_bias = bias - down_bias if recompute else 0
    return Cost(flops, size * (outer + m * k + 2 * weights + bias + read_bias + pre))


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    return {"": problem("forward", 64, 512, 1024, 512, **facts)}


_PIECES_SOURCES = (
    *(f"families/gated/{name}.py" for name in ("autograd", "saved_memory", "reference")),
    "fastpath",
    *(*_CPU_SOURCES, *_CUDA_SOURCES, *_TRITON_SOURCES),
)
_STEP_EAGER = Backend(NAME, STEP, "eager", f"{_HERE}.spec:eager", always)
FAMILY = register_family(
    Family(
        name=NAME,
        pieces=(*PIECES, STEP),
        backends=(
            _STEP_EAGER,
            Backend(
                *(NAME, STEP, "pieces", f"{_HERE}.spec:pieces", _reason_not_pieces),
                _PIECES_SOURCES,
            ),
            *(Backend(NAME, p, "eager", f"{_HERE}.reference:{p}", always) for p in PIECES),
            *(
                Backend(
                    *(NAME, p, "onednn", f"{_HERE}.cpu.onednn:{p}", onednn.reason_not),
                    *(_CPU_SOURCES, _why_not_deep),
                )
                for p in PIECES
            ),
            *(
                Backend(
                    *(NAME, p, "elementwise", f"{_HERE}.triton.backend:elementwise_{p}"),
                    _reason_not_triton(fused=False),
                    _TRITON_SOURCES,
                )
                for p in PIECES
            ),
            *(
                Backend(
                    *(NAME, p, "triton", f"{_HERE}.triton.backend:{p}"),
                    _reason_not_triton(fused=True),
                    _TRITON_SOURCES,
                )
                for p in PIECES
            ),
            *(
                Backend(
                    NAME, p, "cuda", f"{_HERE}.cuda.backend:{p}", backend.reason_not, _CUDA_SOURCES
                )
                for p in PIECES
            ),
            *(
                Backend(
                    *(NAME, p, "planes", f"{_HERE}.cuda.planes:{p}", _reason_not_planes),
                    _PLANES_SOURCES,
                )
                for p in PIECES
            ),
            *(
                Backend(NAME, p, "cpp", f"{_HERE}.cpu.cpp:{p}", cpp.reason_not, _CPU_SOURCES)
                for p in PIECES
            ),
            *(
                Backend(
                    *(NAME, p, "gemm_cpp", f"{_HERE}.cpu.gemm:{p}"),
                    gemm.reason_not,
                    _CPU_SOURCES,
                )
                for p in PIECES
            ),
            Backend(
                *(NAME, "forward", BATCH_INVARIANT, f"{_HERE}.batch_invariant:forward"),
                *(batch_invariant.reason_not, (*_CPU_SOURCES, *_TRITON_SOURCES)),
                on_request=True,
            ),
            Backend(
                *(NAME, "forward", "half_cpp", f"{_HERE}.cpu.half:forward"),
                half.reason_not,
                _CPU_SOURCES,
            ),
            *widened_backends(NAME, *PIECES),
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
        removed={"onednn_packed": "Backend 'onednn' takes the weights where they lie."},
    )
)
