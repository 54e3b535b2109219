"""The family record of grouped_linear: its pieces, backends, analytic order and least cost.

Light on purpose: backends are named here and imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, Family, is_installed, register_family
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.hopper import FILES as HOPPER_FILES
from fastlinear.ops.grouped_linear import (
    cpp,
    reference,
    resident,
    strips,
    strips_backward,
    torch_backends,
    triton_config,
    wide_backward,
)
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.defaults import prefer
from fastlinear.ops.grouped_linear.problem import NAME, PIECES, SPACE, STEP, problem, tokens_of

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

_HERE = "fastlinear.ops.grouped_linear"
_TRITON_SOURCES = (
    *("triton.py", "triton_kernels.py", "triton_tiles.py", "triton_config.py"),
    *("triton_tensors.py", "triton_backward_kernels.py", "layout.py", "sign_mask.py"),
    *("../common/activations_triton.py", "../common/triton_launch.py", "../common/early_launch.py"),
)
_CPP_SOURCES = (
    *("cpp.py", "grouped.cpp", "grouped_call.h", "grouped_rows.h", "grouped_product.h"),
    *("grouped_single.h", "grouped_half.h", "grouped_tiles.h", "layout.py", "reference.py"),
    *("../common/activations.h", "../common/vectors.h", "../common/threads.h"),
    *("../common/large_pages.h", "../common/cpp_build.py"),
)
_STRIPS_SHARED = (
    *("strips_tiles.py", "strips_tiles.h", "strips_instructions.h"),
    *("sign_mask.py", "strips_sign_mask.h", "derivatives.h"),
    *("../common/hopper_words.h", "../common/cuda_activations.h", "layout.py"),
)
_STRIPS_SOURCES = (
    *("strips.py", "strips_config.py", "strips.cu", "strips_float32.py", "strips_float32.cu"),
    *("strips_float32.h", "one_launch.py", "../common/hopper.py"),
    *_STRIPS_SHARED,
)
_STRIPS_BACKWARD_SOURCES = (
    *("strips_backward.py", "strips_backward_config.py", "strips_backward.cu", "one_pass.py"),
    *("strips_backward_float32.py", "strips_backward_float32.cu"),
    *("strips_float32.py", "strips_float32.h"),
    *_STRIPS_SHARED,
)
_WIDE_SOURCES = ("triton_wide.py", "triton_wide_kernels.py", *_TRITON_SOURCES)
_BOXES_SHARED = (
    *("wide_instructions.h", "derivatives.h", "group_map.py", "strips_tiles.py"),
    *("layout.py", *(f"../common/{name}" for name in ("cuda_driver.py", *HOPPER_FILES))),
)
_RESIDENT_SOURCES = (
    *("resident.py", "resident_config.py", "resident.cu", "one_launch.py", *_BOXES_SHARED),
)
_WIDE_BACKWARD_SOURCES = (
    *("wide_backward.py", "wide_backward_config.py", "wide_backward.cu"),
    *("wide_backward.h", "wide_backward_tiles.h"),
    *("one_pass.py", "strips_backward.py"),
    *_BOXES_SHARED,
)
_PIECES_SOURCES = (
    *("autograd.py",),
    *("reference.py", "torch_backends.py", "triton_backward.py"),
    *(f"../common/{name}" for name in ("fastpath_node.h", "tape.h", "recorder.py", "prepared.py")),
    *("triton_wide.py", "triton_wide_kernels.py", *_STRIPS_SOURCES, *_STRIPS_BACKWARD_SOURCES),
    *_RESIDENT_SOURCES,
    *_WIDE_BACKWARD_SOURCES,
    *_CPP_SOURCES,
    *_TRITON_SOURCES,
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
    dtype, capability = FLOAT_DTYPES[p.dtype], torch.cuda.get_device_capability()
    sizes = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    return triton_config.reason_not(*sizes, dtype, capability)


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
    if not triton_config.fits(p.dim("K"), p.dim("N")):
        return "serves K in multiples of 64 and N of 128, from 128 on"
    return None


def _reason_not_pieces(p: Problem) -> str | None:
    return "float64 is left to PyTorch's own ops" if p.dtype == "float64" else None


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, scaled so that pre-activations are near unit size."""
    batch, length = tokens_of(p)
    groups, k, n = p.dim("G"), p.dim("K"), p.dim("N")
    dtype, order = FLOAT_DTYPES[p.dtype], p.option("order")
    act = activation_of(p.option("activation"))
    generator = torch.Generator(device=device).manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator, device=device)
        return (values * scale).to(dtype)

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
        return _STEP_EAGER.load()(*inputs)
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


def _whatever_bias(p: Problem) -> Problem:
    options = tuple((k, "yes" if k == "bias" else v) for k, v in p.options)
    return replace(p, options=options)


def _whatever_activation(p: Problem) -> Problem:
    """An epilogue costs about the same for all activations but none."""
    options = tuple(
        (k, "some" if k == "activation" and v != "none" else v)
        for k, v in _whatever_bias(p).options
    )
    return replace(p, options=options)


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    group = partial(problem, "forward")
    return {
        "": group(64, 8, 64, 64, **facts),
        "groups of 128 features and more": group(64, 8, 128, 128, **facts),
        "channels first": group(64, 8, 64, 64, order="channels", length=16, **facts),
    }


_STEP_EAGER = Backend(NAME, STEP, "eager", f"{_HERE}.spec:eager", _always)
FAMILY = register_family(
    Family(
        name=NAME,
        pieces=(*PIECES, STEP),
        backends=(
            _STEP_EAGER,
            Backend(
                NAME, STEP, "pieces", f"{_HERE}.spec:pieces", _reason_not_pieces, _PIECES_SOURCES
            ),
            *(Backend(NAME, p, "eager", f"{_HERE}.reference:{p}", _always) for p in PIECES),
            Backend(
                NAME,
                "forward",
                "triton",
                f"{_HERE}.triton:forward",
                _reason_not_triton,
                _TRITON_SOURCES,
            ),
            Backend(
                NAME,
                "backward",
                "triton",
                f"{_HERE}.triton_backward:backward",
                _reason_not_triton,
                _TRITON_SOURCES,
            ),
            Backend(
                *(NAME, "forward", "strips", f"{_HERE}.strips:forward", strips.reason_not),
                _STRIPS_SOURCES,
            ),
            Backend(
                *(NAME, "backward", "strips", f"{_HERE}.strips_backward:backward"),
                *(strips_backward.reason_not, _STRIPS_BACKWARD_SOURCES),
            ),
            Backend(
                *(NAME, "forward", "wide", f"{_HERE}.triton_wide:forward", _reason_not_wide),
                _WIDE_SOURCES,
            ),
            Backend(
                *(NAME, "forward", "resident", f"{_HERE}.resident:forward", resident.reason_not),
                _RESIDENT_SOURCES,
            ),
            Backend(
                *(NAME, "backward", "wide", f"{_HERE}.wide_backward:backward"),
                *(wide_backward.reason_not, _WIDE_BACKWARD_SOURCES),
            ),
            *(
                Backend(NAME, piece, "cpp", f"{_HERE}.cpp:{piece}", cpp.reason_not, _CPP_SOURCES)
                for piece in PIECES
            ),
            Backend(NAME, "forward", "baddbmm", f"{_HERE}.torch_backends:baddbmm_forward", _always),
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
        ),
        prefer=prefer,
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        examples=_examples,
        space=SPACE,
        command=f"{_HERE}.command:COMMAND",
        akin=(_whatever_bias, _whatever_activation),
        cold=True,
    )
)
