"""The family record of grouped_linear: its pieces, backends and least cost.

Light on purpose: backends are named here and imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
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
    widened_backends,
)
from fastlinear.dispatch.drawn import Draw
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import planes, reference, torch_backends
from fastlinear.families.grouped.cpu import cpp
from fastlinear.families.grouped.cuda import (
    packed_groups,
    packed_groups_backward,
    weight_stationary,
    wide_backward,
)
from fastlinear.families.grouped.problem import (
    MULTIPLE,
    NAME,
    PIECES,
    SPACE,
    STEP,
    lies_well,
    problem,
    tokens_of,
)
from fastlinear.families.grouped.triton import config
from fastlinear.families.linear import batch_invariant as layers
from fastlinear.kernels import CPP_SOURCES, CUDA_SOURCES, TRITON_SOURCES

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

_TOKENS_ONE_BY_ONE = 768
_HERE = "fastlinear.families.grouped"
_LAYOUT = tuple(f"families/grouped/{name}.py" for name in ("layout", "sign_mask", "reference"))
_LARGEST_COPY = 1 << 29
_TRITON_SOURCES = ("families/grouped/triton", *TRITON_SOURCES, *_LAYOUT)
_CPP_SOURCES = ("families/grouped/cpu", *CPP_SOURCES, *_LAYOUT)
_CUDA_SOURCES = ("families/grouped/cuda", *CUDA_SOURCES, *_TRITON_SOURCES)
_PLANES_SOURCES = ("families/linear/cuda", *CUDA_SOURCES, *_LAYOUT)
_LINEAR_SOURCES = ("families/linear/batch_invariant.py", "families/linear/cpu", *CPP_SOURCES)
_PIECES_SOURCES = (
    *("families/grouped/autograd.py", "families/grouped/torch_backends.py"),
    "fastpath",
    *(*_CUDA_SOURCES, *_PLANES_SOURCES, *_CPP_SOURCES),
)


def _reason_not_triton(p: Problem) -> str | None:
    if (why := why_no_gpu(p, "triton")) is not None:
        return why
    dtype, capability = FLOAT_DTYPES[p.dtype], torch.cuda.get_device_capability()
    sizes = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    return config.reason_not(*sizes, dtype, capability)


def _reason_not_wide(p: Problem) -> str | None:
    reason = _reason_not_triton(p)
    if reason is not None:
        return reason
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    if torch.cuda.get_device_capability() < (9, 0):
        return "needs compute capability 9.0"
    if (p.option("order"), p.option("x"), p.option("w")) != ("tokens", "dense", "dense"):
        return "serves dense tensors, tokens first"
    if not config.fits(p.dim("K"), p.dim("N")):
        return "serves K in multiples of 64 and N of 128, from 128 on"
    return None


def _reason_not_padded(p: Problem) -> str | None:
    if (why := why_no_gpu(p)) is not None:
        return why
    if p.dtype == "float64":
        return "float64 is left to PyTorch's own ops"
    if lies_well(p):
        return f"K is a multiple of {MULTIPLE} already, and tokens and weights lie well"
    m, groups, k, n = (p.dim(name) for name in ("M", "G", "K", "N"))
    if min(m, groups, k, n) < 1:
        return "nothing is to be computed"
    if groups * max(m * k, m * n, k * n) > _LARGEST_COPY:
        return f"its copies would take more than {_LARGEST_COPY} numbers"
    return None


def _reason_not_pieces(p: Problem) -> str | None:
    return "float64 is left to PyTorch's own ops" if p.dtype == "float64" else None


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, scaled so that pre-activations are near unit size."""
    batch, length = tokens_of(p)
    groups, k, n = p.dim("G"), p.dim("K"), p.dim("N")
    dtype, order = FLOAT_DTYPES[p.dtype], p.option("order")
    act = activation_of(p.option("activation"))
    draw = Draw(p, device, seed)

    def tokens(features: int, strided: bool = False) -> Tensor:
        drawn = draw(batch, length, groups, features)
        made = layouts.empty(drawn.shape, order, drawn, dtype)
        if strided:
            made = layouts.empty((batch, length, groups, 2 * features), order, drawn, dtype)
            made = made[..., ::2]
        return made.copy_(drawn)

    if p.option("w") == "dense":
        weight = draw(groups, n, k, scale=k**-0.5)
    else:
        weight = draw(groups, k, n, scale=k**-0.5).transpose(1, 2)
    bias = draw(groups, n) if p.option("bias") == "yes" else None
    x = tokens(k, p.option("x") != "dense")
    if p.piece == STEP and act.name in KINKED:
        x = _clear_of_kinks(x, weight, bias, order, seed)
    save_pre = p.needs_grad and act.saved == "pre"
    if p.piece == "forward":
        return x, weight, bias, act.name, save_pre, order
    if p.piece == STEP:
        return x, weight, bias, act.name, tokens(n), order
    y, pre = reference.forward(x, weight, bias, act.name, act.saved == "pre", order)
    saved = {"none": None, "output": y, "pre": pre}[act.saved]
    return tokens(n), saved, x, weight, act.name, (True, True, bias is not None), order


def _clear_of_kinks(
    x: Tensor, weight: Tensor, bias: Tensor | None, order: str, seed: int
) -> Tensor:
    """x whose pre-activations stay away from 0, where rounding would choose the gradient."""
    batch, length, groups, k = x.shape
    more = torch.Generator(device=x.device).manual_seed(seed + 1)

    def pre_activations(rows: Tensor) -> tuple[Tensor]:
        wide = rows.view(1, len(rows), groups, k)
        b = None if bias is None else bias.to(rows.dtype)
        pre = reference.forward(wide, weight.to(rows.dtype), b, "none", False, "tokens")[0]
        return (pre.reshape(len(rows), -1),)

    def redraw(rows: int) -> Tensor:
        return torch.randn(rows, groups * k, generator=more, device=x.device).to(x.dtype)

    flat = x.reshape(batch * length, groups * k)
    cleared, _ = clear_of_kinks(flat, pre_activations, redraw)
    return layouts.dense(cleared.view(x.shape), order)


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    if p.piece == STEP:
        return _STEP_EAGER.load(p)(*inputs)
    return getattr(reference, p.piece)(*inputs)


def cost(p: Problem) -> Cost:
    """Least flops and bytes: x, y and their gradients moved once, weights once, what training
    keeps where it is needed."""
    if p.piece == STEP:
        parts = [cost(p.with_piece(piece)) for piece in PIECES]
        return Cost(sum(c.flops for c in parts), sum(c.bytes for c in parts))
    batch, length = tokens_of(p)
    m, groups = batch * length, p.dim("G")
    k, n = p.dim("K") * groups, p.dim("N") * groups
    size = FLOAT_DTYPES[p.dtype].itemsize
    weights = p.dim("K") * n
    bias = n if p.option("bias") == "yes" else 0
    kept = activation_of(p.option("activation")).saved
    product = 2.0 * m * weights
    if p.piece == "forward":
        pre = m * n if p.needs_grad and kept == "pre" else 0
        return Cost(product, size * (m * k + weights + bias + m * n + pre))
    saved = 0 if kept == "none" else m * n
    return Cost(2 * product, size * (m * n + saved + 2 * m * k + 2 * weights + bias))


def _reason_not_invariant(p: Problem) -> str | None:
    why = layers.reason_not(p)
    return why if why is not None or p.device == "cpu" else _reason_not_triton(p)


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    group = partial(problem, "forward")
    return {
        "": group(64, 8, 64, 64, **facts),
        "groups of 128 features and more": group(64, 8, 128, 128, **facts),
        "channels first": group(64, 8, 64, 64, order="channels", length=16, **facts),
    }


def _why_not_by_one(p: Problem) -> str | None:
    """cuBLAS's batched float32 products sum dW over a group's tokens one after the other: of many
    it is less exact than products of single groups, or than sums in parts."""
    exact = p.dtype == "float32" and p.precision == "highest"
    if p.device != "cuda" or not exact or p.dim("M") < _TOKENS_ONE_BY_ONE:
        return None
    served = _reason_not_triton(p.with_piece("backward")) is None
    return "of so many tokens dW is less exact" if served else None


_STEP_EAGER = Backend(
    *(NAME, STEP, "eager", f"{_HERE}.spec:eager", always), why_avoided=_why_not_by_one
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
            Backend(NAME, "forward", "eager", f"{_HERE}.reference:forward", always),
            Backend(
                *(NAME, "backward", "eager", f"{_HERE}.reference:backward", always),
                why_avoided=_why_not_by_one,
            ),
            Backend(
                NAME,
                "forward",
                "triton",
                f"{_HERE}.triton.forward:forward",
                _reason_not_triton,
                _TRITON_SOURCES,
            ),
            Backend(
                NAME,
                "backward",
                "triton",
                f"{_HERE}.triton.backward:backward",
                _reason_not_triton,
                _TRITON_SOURCES,
            ),
            *(
                Backend(
                    *(NAME, piece, "padded", f"{_HERE}.padded:{piece}", _reason_not_padded),
                    (*_TRITON_SOURCES, *_CUDA_SOURCES),
                )
                for piece in PIECES
            ),
            Backend(
                *(
                    NAME,
                    "forward",
                    "packed_groups",
                    f"{_HERE}.cuda.packed_groups:forward",
                    packed_groups.reason_not,
                ),
                _CUDA_SOURCES,
            ),
            Backend(
                *(
                    NAME,
                    "backward",
                    "packed_groups",
                    f"{_HERE}.cuda.packed_groups_backward:backward",
                ),
                *(packed_groups_backward.reason_not, _CUDA_SOURCES),
            ),
            *(
                Backend(
                    *(NAME, piece, "planes", f"{_HERE}.planes:{piece}"),
                    *(planes.reason_not, _PLANES_SOURCES),
                )
                for piece in PIECES
            ),
            Backend(
                *(NAME, "forward", "wide", f"{_HERE}.triton.wide:forward", _reason_not_wide),
                _TRITON_SOURCES,
            ),
            Backend(
                *(
                    NAME,
                    "forward",
                    "weight_stationary",
                    f"{_HERE}.cuda.weight_stationary:forward",
                    weight_stationary.reason_not,
                ),
                _CUDA_SOURCES,
            ),
            Backend(
                *(NAME, "backward", "wide", f"{_HERE}.cuda.wide_backward:backward"),
                *(wide_backward.reason_not, _CUDA_SOURCES),
            ),
            *(
                Backend(
                    NAME, piece, "cpp", f"{_HERE}.cpu.cpp:{piece}", cpp.reason_not, _CPP_SOURCES
                )
                for piece in PIECES
            ),
            Backend(
                *(NAME, "forward", BATCH_INVARIANT, f"{_HERE}.batch_invariant:forward"),
                *(_reason_not_invariant, (*_TRITON_SOURCES, *_LINEAR_SOURCES)),
                on_request=True,
            ),
            Backend(NAME, "forward", "baddbmm", f"{_HERE}.torch_backends:baddbmm_forward", always),
            Backend(
                NAME,
                "forward",
                "loop",
                f"{_HERE}.torch_backends:loop_forward",
                torch_backends.reason_not_loop,
            ),
            Backend(
                NAME,
                "backward",
                "loop",
                f"{_HERE}.torch_backends:loop_backward",
                torch_backends.reason_not_loop,
            ),
            Backend(
                NAME,
                "forward",
                "conv",
                f"{_HERE}.torch_backends:conv_forward",
                torch_backends.reason_not_conv,
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
        renamed={"strips": "packed_groups", "resident": "weight_stationary"},
    )
)
