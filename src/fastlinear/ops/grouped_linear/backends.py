"""The family record of grouped_linear: its pieces, backends, analytic order and least cost.

Light on purpose: backends are named here and imported on first use.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import KINKED, clear_of_kinks
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, Family, is_installed, register_family
from fastlinear.ops.common import door_node
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.hopper import FILES as HOPPER_FILES
from fastlinear.ops.grouped_linear import (
    cpp,
    group_map,
    reference,
    resident,
    resident_config,
    strips,
    strips_backward,
    strips_backward_float32,
    strips_config,
    strips_tiles,
    triton_config,
    ways,
    wide_backward,
    wide_backward_config,
)
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.problem import NAME, PIECES, STEP, problem, tokens_of
from fastlinear.ops.grouped_linear.signs import ACTIVATIONS, has_place

__all__ = ["FAMILY", "NAME", "PIECES", "cost", "problem"]

_HERE = "fastlinear.ops.grouped_linear"
_TRITON_SOURCES = (
    *("triton.py", "triton_kernels.py", "triton_tiles.py", "triton_config.py"),
    *("triton_tensors.py", "triton_backward_kernels.py", "layout.py", "signs.py"),
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
    *("signs.py", "strips_signs.h"),
    *("../common/hopper_words.h", "../common/hopper_activations.h", "layout.py"),
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
_TOKENS_ONE_BY_ONE = 768
_FEW_TOKENS = 1 << 12  # of all groups: no more than that is too few for kernels that keep weights
_LEAST_SEQUENCE = 48  # tokens of a sequence of channels, for tiles of 64
_LEAST_STRIP = 192  # bytes of its width from which `strips` is taken
_HOPPER_UNITS = 132  # multiprocessors
_HOST_BOUND = 1 << 25  # numbers of x and y below which a GPU waits for a training call's Python
_WIDE_SOURCES = ("triton_wide.py", "triton_wide_kernels.py", *_TRITON_SOURCES)
_BOXES_SHARED = (
    *("wide_instructions.h", "group_map.py", "strips_tiles.py"),
    *("layout.py", *(f"../common/{name}" for name in ("cuda_driver.py", *HOPPER_FILES))),
)
_RESIDENT_SOURCES = (
    *("resident.py", "resident_config.py", "resident.cu", "one_launch.py", *_BOXES_SHARED),
)
_WIDE_BACKWARD_SOURCES = (
    *("wide_backward.py", "wide_backward_config.py", "wide_backward.cu"),
    *("one_pass.py", "strips_backward.py"),
    *_BOXES_SHARED,
)
_PIECES_SOURCES = (
    *("autograd.py", "plans.py", "programs.py", "operands.py", "eager.py"),
    *("reference.py", "ways.py", "triton_backward.py"),
    *(f"../common/{name}" for name in ("door_node.h", "door_program.h", "door_launch.py")),
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


def _prefer(p: Problem) -> tuple[str, ...]:
    """Analytic order, used only where no measurement covers the Problem."""
    if p.piece == STEP:
        # without nodes in C++ the formula is Python's, which asks more of the host: 430 to 620 us
        # a call, PyTorch's own 270 to 440
        numbers = p.dim("M") * p.dim("G") * (p.dim("K") + p.dim("N"))
        slow_host = p.device == "cuda" and not p.captured and door_node.reason_not() is not None
        own_autograd = slow_host and numbers < _HOST_BOUND
        return ("eager", "pieces") if own_autograd else ("pieces", "eager")
    if p.device != "cuda":
        return ("cpp", "eager") if cpp.pays(p) else ("eager",)
    # measured on an H200 and an H100, over the sizes in README.md
    if p.piece == "backward":
        return _prefer_backward(p)
    if _worth_strips(p) or _keeps_signs(p):
        return ("strips", "triton", "eager")
    widest, least = max(p.dim("K"), p.dim("N")), min(p.dim("K"), p.dim("N"))
    if widest <= 128 and (least <= 112 or p.dtype == "float32"):
        return ("triton", "eager")
    config = resident_config.resident_config(p.dim("K"), p.dim("N"))
    if config is not None and p.dim("M") * p.dim("G") <= _FEW_TOKENS:
        return ("triton", "eager")
    first = ("resident",) if config is not None and _worth_keeping(p, config) else ()
    if config is not None and _worth_wide_strips(p, config):
        first = ("strips", *first)
    return (*first, *(("wide",) if _fills_wide(p) else ()), "triton", "eager")


def _prefer_backward(p: Problem) -> tuple[str, ...]:
    """``_prefer`` for a backward on a GPU."""
    k, n, m = p.dim("K"), p.dim("N"), p.dim("M")
    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    one_pass = max(k, n) <= (128 if hopper else 32)
    copies = tokens_of(p)[0] > 1  # PyTorch's batched products take no sequences of channels
    if p.dtype == "float32":
        # PyTorch's batched product adds up a group's tokens one by one: of 1024 and more dW is less
        # exact than a loop's by more than the rule allows, whatever the size of the groups
        ours = m >= 512 if copies else max(k, n) <= 32 or m >= _TOKENS_ONE_BY_ONE
        first = ("strips",) if hopper and _fills_strips_of_float32(p) else ()
        return (*first, *(("triton", "eager") if ours else ("eager",)))
    if one_pass and _worth_strips_backward(p):
        return ("strips", "triton", "eager")
    if one_pass:
        return ("triton", "eager")
    if not wide_backward_config.serves(k, n):
        # PyTorch's batched products lose where rows do not begin at 16 bytes
        return ("triton", "eager") if copies or k % 8 or n % 8 else ("eager",)
    if copies and (not hopper or not _fills_boxes(p)):
        return ("triton", "eager")
    # of few tokens a group what is read and written is weights, and padding what is multiplied
    filled = 4 * k * n >= 3 * group_map.padded(k, 128) * group_map.padded(n)
    few = m * p.dim("G") < _FEW_TOKENS or m < (group_map.TOKENS if filled else 128)
    if not hopper or few or not _fills_boxes(p):
        return ("triton", "eager") if copies else ("eager",)
    by_triton, by_pytorch = _triton_derives_sooner(p), _pytorch_derives_sooner(p) and not copies
    return ("eager",) if by_pytorch else ("triton", "eager") if by_triton else ("wide", "eager")


def _fills_boxes(p: Problem) -> bool:
    """Whether sequences of channels are so long that the tiles of ``resident`` and ``wide`` are not
    for the most part empty."""
    length = tokens_of(p)[1]
    return p.option("order") != "channels" or (length % 8 == 0 and length >= _LEAST_SEQUENCE)


def _triton_derives_sooner(p: Problem) -> bool:
    """Whether Triton's backward of groups of 136 to 256 features takes less time than ``wide``:
    without an activation, where it has no launch for the derivative, of few tokens a group.

    H100, 21 sizes of 144 to 256 features in each order.
    """
    m, groups = p.dim("M"), p.dim("G")
    if p.option("activation") == "none":
        large = min(p.dim("K"), p.dim("N")) > 192
        return m <= (128 if not large else 1024 if groups >= 64 else 256)
    return p.option("order") == "channels" and m * groups < 3 << 12


def _pytorch_derives_sooner(p: Problem) -> bool:
    """Whether PyTorch's batched products, which channels first need no turning, are the fastest:
    few groups, few tokens."""
    tokens, groups = p.dim("M") * p.dim("G"), p.dim("G")
    if p.option("order") != "channels":
        return False
    if p.option("activation") == "none":
        return tokens < 1 << 15 and groups <= 32
    return tokens < 3 << 12 and groups <= 16


def _worth_strips(p: Problem) -> bool:
    """Whether ``strips`` is the faster forward of many tokens: Triton's tiles are powers of two,
    and its loads wait for each other where rows do not begin at 16 bytes."""
    k, n, tokens = p.dim("K"), p.dim("N"), p.dim("M") * p.dim("G")
    step = 16 if p.dtype == "float32" else 8
    odd = bool(k % step or n % step)
    if p.dtype == "float32":
        filled = 5 * k * n >= 3 * triton_config.padded(k) * triton_config.padded(n)
        return tokens >= 1 << 15 and k >= 48 and (odd or not filled)
    if odd or max(k, n) > 128:
        return odd and tokens >= 3 << 12
    padded = triton_config.padded(k) * triton_config.padded(n) > k * n
    worth = padded or max(k, n) < 32
    return tokens >= _least_tokens(k, n, 3 << 13, 3 << 14) and worth and _fills_strips(p)


def _worth_wide_strips(p: Problem, config: resident_config.ResidentConfig) -> bool:
    """Whether ``strips`` is the faster forward of what ``resident`` could hold: where that one's
    blocks do not divide evenly among groups, the more where rows do not begin at whole sectors.

    H100, 8 to 37% of its time less; 96 to 232 features.
    """
    k, n, m, groups = p.dim("K"), p.dim("N"), p.dim("M"), p.dim("G")
    parts = groups * -(-n // config.outputs)
    tiles = -(-m // group_map.TOKENS)
    evenly = resident_config.blocks_of(parts, tiles, _HOPPER_UNITS)[1] > 0
    most = 232 if k % 16 or n % 16 else 192 if p.option("order") == "tokens" else 0
    return not evenly and m * groups >= 3 << 13 and min(k, n) >= 96 and 128 < max(k, n) <= most


def _least_tokens(k: int, n: int, wide: int, narrow: int) -> int:
    """Of all groups, from which a kernel with shares of many blocks pays: more of groups of up to
    32 features."""
    return narrow if max(k, n) <= 32 else wide


def _worth_strips_backward(p: Problem) -> bool:
    """Whether ``strips`` is the faster backward of 16-bit numbers of up to 128 features: where an
    activation gives ``triton`` a launch more sooner than where none does."""
    k, n, tokens = p.dim("K"), p.dim("N"), p.dim("M") * p.dim("G")
    activation = p.option("activation")
    if activation == "none":
        filled = min(k, n) >= 64 and triton_config.padded(k) * triton_config.padded(n) == k * n
        return tokens >= 1 << 17 and not filled and _fills_strips(p)
    least = (3 << 13, 3 << 15) if activation in ACTIVATIONS else (1 << 15, 3 << 14)
    return tokens >= _least_tokens(k, n, *least) and _fills_strips(p)


def _keeps_signs(p: Problem) -> bool:
    """Whether a training call keeps a bit for each output, which costs its forward a twentieth and
    saves its backward a pass over the outputs."""
    if not p.needs_grad or p.dtype == "float32" or p.option("activation") not in ACTIVATIONS:
        return False
    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    sizes = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    return _worth_strips_backward(p) and has_place(p.option("order"), *sizes)


def _fills_strips(p: Problem) -> bool:
    """Whether groups of 16-bit numbers lie side by side so that a strip of them is ``_LEAST_STRIP``
    bytes wide, or of as many groups as the kernels take."""
    side = strips_tiles.side_by_side(p.option("order"), p.dim("M"), p.dim("G"))
    k, n = p.dim("K"), p.dim("N")
    if strips_config.strips_config(side, k, n, True) is None:
        return False
    groups = strips_config.widest(side, k, n)
    return 2 * groups * max(k, n) >= _LEAST_STRIP or groups == 8


def _fills_strips_of_float32(p: Problem) -> bool:
    """Whether the backward of float32 strips is served, with tiles for all teams of its blocks."""
    if strips_backward.reason_not(p) is not None:
        return False
    m, groups, k, n = p.dim("M"), p.dim("G"), p.dim("K"), p.dim("N")
    config = strips_backward_float32.float32_backward_config(k, n)
    assert config is not None
    tiles = -(-m // strips_tiles.ROWS)
    busy = tiles >= 2 * config.teams or groups <= _HOPPER_UNITS
    return busy and m * groups >= (_FEW_TOKENS << 2 if max(k, n) <= 32 else _FEW_TOKENS >> 3)


def _fills_wide(p: Problem) -> bool:
    """Whether the forward of ``wide`` has tiles of 128 tokens and outputs for most of a GPU."""
    tiles = p.dim("G") * -(-p.dim("M") // 128) * -(-p.dim("N") // 128)
    return p.option("order") == "tokens" and p.dim("K") > 128 and tiles >= 128


def _worth_keeping(p: Problem, config: resident_config.ResidentConfig) -> bool:
    """Whether most of what ``resident`` multiplies are numbers of the group, and x is read for
    more than a few outputs at a time."""
    k, n = p.dim("K"), p.dim("N")
    parts = -(-n // config.outputs)
    if parts > 1 and config.outputs <= group_map.COLUMNS:
        return False
    filled = 2 * k * n > group_map.padded(k) * config.outputs * parts
    return filled and p.dim("M") >= group_map.TOKENS and _fills_boxes(p)


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


_STEP_EAGER = Backend(NAME, STEP, "eager", f"{_HERE}.step:eager", _always)
FAMILY = register_family(
    Family(
        name=NAME,
        pieces=(*PIECES, STEP),
        backends=(
            _STEP_EAGER,
            Backend(
                NAME, STEP, "pieces", f"{_HERE}.step:pieces", _reason_not_pieces, _PIECES_SOURCES
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
            Backend(NAME, "forward", "baddbmm", f"{_HERE}.ways:baddbmm_forward", _always),
            Backend(NAME, "forward", "loop", f"{_HERE}.ways:loop_forward", ways.reason_not_loop),
            Backend(NAME, "backward", "loop", f"{_HERE}.ways:loop_backward", ways.reason_not_loop),
            Backend(NAME, "forward", "conv", f"{_HERE}.ways:conv_forward", ways.reason_not_conv),
        ),
        prefer=_prefer,
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        akin=(_whatever_bias, _whatever_activation),
        cold=True,
    )
)
