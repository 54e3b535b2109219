"""The family record of linear_act: its pieces, backends, analytic order and least cost.

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
from fastlinear.dispatch.backend import Backend, Family, deferred, is_installed, register_family
from fastlinear.ops.common import door_node, hopper
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import (
    cpp,
    cpp_half,
    cublaslt,
    cuda,
    few_rows_config,
    mkl,
    onednn,
    padded_problem,
    reference,
    triton_config,
)

NAME = "linear_act"
BACKWARD_PIECES = ("grad_pre", "grad_input", "grad_weight")
PIECES = ("forward", *BACKWARD_PIECES)
WHOLE_BACKWARD = "backward"
STEP = "step"
_HERE = "fastlinear.ops.linear_act"
_GPU_FLOPS_PER_S = {"half": 6e14, "float32": 4e13}
_TF32X3_MIN_WORK = 1 << 24
_TF32X3_MIN_DEPTH = 128  # shorter products take plain float32 arithmetic
_EXACT_ROWS = 4  # up to here kernels multiply and add in float32
_FEWEST_ROWS, _FEW_ROWS, _LEAST_DEPTH = 16, 128, 1024
_GPU_BYTES_PER_S = 3.5e12
_STEP_HOST_S = 1.2e-4  # host time of forward and backward of one layer through autograd, about
_TRITON_SOURCES = (
    "triton_config.py",
    "triton_gemm_config.py",
    "triton_single_config.py",
    "triton_product.py",
    "triton_gemm.py",
    "triton_elementwise.py",
    "triton_few_rows.py",
    "triton_tiles_backward.py",
    "columns.cu",
    "columns.py",
    "../common/hopper_words.h",
    "../common/activations_triton.py",
    "../common/triton_launch.py",
)
_CUDA_SOURCES = (
    *("gemm.cu", "cuda_config.py", "../common/cuda_driver.py"),
    *(f"../common/{name}" for name in hopper.FILES),
)
_FEW_ROWS_SOURCES = (
    *("few_rows.cu", "few_rows_single.cu", "few_rows_half.cu", "few_rows_config.py"),
    *("../common/cuda_driver.py", "../common/hopper.py", "../common/hopper_words.h"),
)
_CPP_SOURCES = tuple(
    f"../common/{name}" for name in ("elementwise.cpp", "cpp_elementwise.py", "cpp_build.py")
)
_HALF_SOURCES = tuple(
    f"../common/{name}" for name in ("half.cpp", "cpp_half.py", "vectors.h", "threads.h")
)
_PACKED = tuple(f"../common/{name}" for name in ("packed.py", "weight_hash.py", "weight_hash.cpp"))
_PADDED = ("padded_problem.py", "cuda.py", "triton.py", *_TRITON_SOURCES, *_CUDA_SOURCES)
PIECES_SOURCES = (
    *(f"../common/{name}" for name in ("door_node.h", "door_program.h")),
    *(
        "autograd.py",
        "op.py",
        "plans.py",
        "programs.py",
        "onednn.py",
        "cpp.py",
        "cublaslt.py",
        "padded.py",
        "padded_problem.py",
        "triton.py",
        "cuda.py",
    ),
    "triton_backward.py",
    *_TRITON_SOURCES,
    *_CUDA_SOURCES,
    *_CPP_SOURCES,
)


def problem(
    piece: str,
    m: int,
    k: int,
    n: int,
    *,
    dtype: str,
    device: str,
    activation: str = "none",
    bias: bool = True,
    needs_grad: bool = False,
    x_layout: str = "rows",
    w_layout: str = "nk",
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """A linear_act Problem: M rows of x, K in features, N out features.

    Args:
        x_layout: ``"rows"`` (unit stride along K, rows dense or a multiple of 16 bytes apart),
            ``"rows_odd"`` (unit stride along K, other row strides: expanded and overlapping rows as
            well) or ``"strided"``.
        w_layout: ``"nk"`` (contiguous, as in nn.Linear), ``"kn"`` (a transposed view, as in
            transformers' Conv1D) or ``"strided"``.
    """
    options = (
        ("activation", activation),
        ("bias", "yes" if bias else "no"),
        ("x", x_layout),
        ("w", w_layout),
    )
    dims = (("M", m), ("K", k), ("N", n))
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)


def x_layout_of(rows: Tensor) -> str:
    """The x layout of ``problem`` for x seen as its rows (M, K), by strides alone."""
    m, k = rows.shape
    if rows.stride(1) != 1 and k != 1:
        return "strided"
    if m <= 1 or rows.stride(0) == k:
        return "rows"
    aligned = rows.stride(0) > k and rows.stride(0) * rows.itemsize % 16 == 0
    return "rows" if aligned else "rows_odd"


def saves_pre(activation: str) -> bool:
    """Whether the backward of this activation reads the pre-activation."""
    return activation_of(activation).saved == "pre"


def _always(_: Problem) -> str | None:
    return None


def _reason_not_gpu(p: Problem) -> str | None:
    if p.device != "cuda":
        return "its kernels run on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if p.dtype == "float64":
        return "no kernel for float64"
    return None


def _reason_not_triton(p: Problem) -> str | None:
    why = _reason_not_gpu(p)
    if why is None and not is_installed("triton"):
        why = "the package triton is not installed"
    if why is None and p.piece in ("forward", "grad_input", WHOLE_BACKWARD):
        why = _reason_not_precise(p)
    return why or triton_config.reason_not(
        p.dim("M"),
        p.dim("K"),
        p.dim("N"),
        FLOAT_DTYPES[p.dtype],
        p.option("activation"),
        *_strides(p),
        torch.cuda.get_device_capability(),
    )


def _reason_not_precise(p: Problem) -> str | None:
    """Why three TF32 products of few rows would be less accurate than PyTorch's float32.

    H200: their error is 2.2e-7 to 2.5e-7 at any depth. PyTorch's is 0.7e-7 to 1.2e-7 up to 16 rows
    or a depth of 512, 1.8e-7 from a depth of 1024 on.
    """
    if p.dtype != "float32" or p.precision != "highest":
        return None
    depth = p.dim("K" if p.piece == "forward" else "N")
    few = _EXACT_ROWS < p.dim("M") <= _FEW_ROWS and depth >= _TF32X3_MIN_DEPTH
    if few and (p.dim("M") <= _FEWEST_ROWS or depth < _LEAST_DEPTH):
        return "three TF32 products of so few rows are less accurate than PyTorch's float32"
    return None


def _reason_not_padded(p: Problem) -> str | None:
    return _reason_not_gpu(p) or padded_problem.reason_not(p)


def _reason_not_cuda(p: Problem) -> str | None:
    why = _reason_not_gpu(p)
    return why or cuda.reason_not(
        p.dim("M"),
        p.dim("K"),
        p.dim("N"),
        FLOAT_DTYPES[p.dtype],
        *_strides(p),
        torch.cuda.get_device_capability(),
    )


def _reason_not_few_rows(p: Problem) -> str | None:
    why = _reason_not_gpu(p)
    return why or few_rows_config.reason_not(
        p.dim("M"),
        p.dim("K"),
        p.dim("N"),
        FLOAT_DTYPES[p.dtype],
        *_strides(p),
        torch.cuda.get_device_capability(),
        p.needs_grad,
    )


def _reason_not_triton_backward(p: Problem) -> str | None:
    why = _reason_not_triton(p)
    if why is not None:
        return why
    most = triton_config.max_backward_rows(torch.cuda.get_device_capability())
    if p.dim("M") > most:
        return f"serves at most {most} rows of x here, the call has {p.dim('M')}"
    return None


def _strides(p: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Strides of x and weight that stand for the Problem's layouts."""
    k, n = p.dim("K"), p.dim("N")
    x = {"rows": (k, 1), "rows_odd": (2 * k + 1, 1), "strided": (2 * k + 1, 2)}[p.option("x")]
    w = {"nk": (k, 1), "kn": (1, n), "strided": (2 * k + 1, 2)}[p.option("w")]
    return x, w


def _prefer(p: Problem) -> tuple[str, ...]:
    """Analytic order, used only where no measurement covers the Problem."""
    if p.piece == STEP:
        # without nodes in C++ the formula is Python's, which asks more of the host
        slow_host = p.device == "cuda" and not p.captured and door_node.reason_not() is not None
        own_autograd = slow_host and _launch_bound(p)
        return ("eager", "pieces") if own_autograd else ("pieces", "eager")
    if p.piece == WHOLE_BACKWARD:
        m, k, n = (p.dim(name) for name in ("M", "K", "N"))
        pays = triton_config.whole_backward_pays(m, k, n, FLOAT_DTYPES[p.dtype])
        one_launch = p.device == "cuda" and pays and (m <= 64 or padded_problem.aligned(p))
        first = ("triton",) if one_launch else ("padded",) if padded_problem.pays(p) else ()
        return (*first, "pieces", "eager")
    if p.device == "cpu":
        if cpp_half.pays(p):
            return ("half_cpp", "eager")
        own = p.piece == "forward" and onednn.is_heavy(p) and cpp.pays(p)
        return (*(("cpp",) if own else ()), *(("onednn",) if onednn.pays(p) else ()), "eager")
    first = ("triton",) if _triton_pays(p) else ()
    m, k, n = (p.dim(name) for name in ("M", "K", "N"))
    if p.piece == "forward" and few_rows_config.pays(m, k, n, FLOAT_DTYPES[p.dtype]):
        first = ("few_rows", *first)
    if p.piece != "grad_pre" and not padded_problem.aligned(p):
        first = ("padded",) if padded_problem.pays(p) else ("triton",) if _few_odd_rows(p) else ()
        if p.piece == "forward" and "padded" in first:
            first = ("cuda", *first)  # where K is even enough its kernel needs no copies
    return (*first, "cublaslt", "eager") if p.piece == "forward" else (*first, "eager")


def _few_odd_rows(p: Problem) -> bool:
    """Whether Triton's kernels, without wide loads, still take less than the libraries' do."""
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    return p.piece == "forward" and m <= 64 and k >= 128 and m * k * n < 1 << 27


def _triton_pays(p: Problem) -> bool:
    """Whether three TF32 products beat torch's exact float32 by far: on the data-centre chips,
    whose matrix units are many times as fast as their float32 units."""
    if p.dtype != "float32" or p.precision != "highest" or p.piece == "grad_pre":
        return False
    depth = p.dim({"forward": "K", "grad_input": "N", "grad_weight": "M"}[p.piece])
    if depth < 128 or p.dim("M") * p.dim("K") * p.dim("N") < _TF32X3_MIN_WORK:
        return False
    fast = triton_config.FAST_TF32
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() in fast


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, scaled so that pre-activations are near unit size."""
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    dtype = FLOAT_DTYPES[p.dtype]
    act = activation_of(p.option("activation"))
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=generator) if device.type == "cpu" else None
        if values is None:
            on_device = torch.Generator(device=device).manual_seed(seed + len(shape) * 7 + shape[0])
            values = torch.randn(shape, generator=on_device, device=device)
        return (values * scale).to(dtype)

    if p.option("w") == "kn":
        weight = draw(k, n, scale=k**-0.5).t()
    else:
        weight = draw(n, k, scale=k**-0.5)
    x = draw(k, m).t() if p.option("x") == "strided" else draw(m, k)
    bias = draw(n) if p.option("bias") == "yes" else None
    if p.piece == STEP and act.name in KINKED and p.option("x") == "rows":
        more = torch.Generator(device=device).manual_seed(seed + 1)

        def pre_activations(rows: Tensor) -> tuple[Tensor]:
            b = None if bias is None else bias.to(rows.dtype)
            return (torch.nn.functional.linear(rows, weight.to(rows.dtype), b),)

        def redraw(rows: int) -> Tensor:
            return torch.randn(rows, k, generator=more, device=device).to(dtype)

        x, _ = clear_of_kinks(x, pre_activations, redraw)
    save_pre = p.needs_grad and act.saved == "pre"
    if p.piece == "forward":
        return x, weight, bias, act.name, save_pre
    y, pre = reference.forward(x, weight, bias, act.name, act.saved == "pre")
    saved = {"none": None, "output": y, "pre": pre}[act.saved]
    dy = draw(m, n)
    if p.piece == STEP:
        return x, weight, bias, act.name, dy
    if p.piece == WHOLE_BACKWARD:
        return dy, saved, x, weight, act.name, (True, True, bias is not None)
    if p.piece == "grad_pre":
        return dy, saved, act.name, bias is not None
    if p.piece == "grad_input":
        return dy, weight
    return dy, x


def _reference(p: Problem, inputs: tuple[Any, ...]) -> Any:
    if p.piece == STEP:
        return _STEP_EAGER.load()(*inputs)
    return getattr(reference, p.piece)(*inputs)


def cost(p: Problem) -> Cost:
    """Least flops and bytes of one piece; saved tensors are counted where they are needed."""
    if p.piece == STEP:
        parts = [cost(p.with_piece(piece)) for piece in PIECES]
        return Cost(sum(c.flops for c in parts), sum(c.bytes for c in parts))
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    size = FLOAT_DTYPES[p.dtype].itemsize
    bias = n if p.option("bias") == "yes" else 0
    kept = activation_of(p.option("activation")).saved
    gemm = 2.0 * m * k * n
    saved = 0 if kept == "none" else m * n
    if p.piece == "forward":
        pre = m * n if p.needs_grad and kept == "pre" else 0
        return Cost(gemm, size * (m * k + n * k + bias + m * n + pre))
    if p.piece == WHOLE_BACKWARD:  # dpre need not be written
        return Cost(2 * gemm, size * (m * n + saved + 2 * m * k + 2 * n * k + bias))
    if p.piece == "grad_pre":
        return Cost(0.0, size * (2 * m * n + saved + bias))
    return Cost(gemm, size * (m * k + n * k + m * n))


def _launch_bound(p: Problem) -> bool:
    """Whether a training step of this layer on a GPU takes less time than its launches.

    Then the host decides, and PyTorch's own autograd asks least of it. A guess at the rates of an
    H200, for calls that no measurement covers.
    """
    least = cost(p.with_piece(STEP))
    compute = least.flops / _GPU_FLOPS_PER_S["float32" if p.dtype == "float32" else "half"]
    return max(compute, least.bytes / _GPU_BYTES_PER_S) < _STEP_HOST_S


_STEP_EAGER = Backend(NAME, STEP, "eager", f"{_HERE}.step:eager", _always)


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


def _reason_not_pieces(p: Problem) -> str | None:
    return "float64 is left to PyTorch's own ops" if p.dtype == "float64" else None


FAMILY = register_family(
    Family(
        name=NAME,
        pieces=(*PIECES, WHOLE_BACKWARD, STEP),
        backends=(
            *(
                Backend(NAME, p, "eager", f"{_HERE}.reference:{p}", _always)
                for p in (*PIECES, WHOLE_BACKWARD)
            ),
            _STEP_EAGER,
            Backend(
                NAME, STEP, "pieces", f"{_HERE}.step:pieces", _reason_not_pieces, PIECES_SOURCES
            ),
            Backend(
                NAME,
                WHOLE_BACKWARD,
                "pieces",
                f"{_HERE}.step:backward",
                _reason_not_pieces,
                PIECES_SOURCES,
            ),
            Backend(
                NAME,
                WHOLE_BACKWARD,
                "padded",
                f"{_HERE}.padded:backward",
                _reason_not_padded,
                _PADDED,
            ),
            Backend(
                NAME,
                WHOLE_BACKWARD,
                "triton",
                f"{_HERE}.triton_backward:backward",
                _reason_not_triton_backward,
                ("triton.py", *_TRITON_SOURCES),
            ),
            Backend(NAME, "forward", "cublaslt", f"{_HERE}.cublaslt:forward", cublaslt.reason_not),
            *(
                Backend(
                    NAME, p, "triton", f"{_HERE}.triton:{p}", _reason_not_triton, _TRITON_SOURCES
                )
                for p in ("forward", "grad_pre", "grad_input", "grad_weight")
            ),
            Backend(
                NAME, "forward", "cuda", f"{_HERE}.cuda:forward", _reason_not_cuda, _CUDA_SOURCES
            ),
            Backend(
                *(NAME, "forward", "few_rows", f"{_HERE}.few_rows:forward"),
                _reason_not_few_rows,
                _FEW_ROWS_SOURCES,
            ),
            *(
                Backend(NAME, p, "padded", f"{_HERE}.padded:{p}", _reason_not_padded, _PADDED)
                for p in ("forward", "grad_input", "grad_weight")
            ),
            Backend(NAME, "forward", "onednn", f"{_HERE}.onednn:forward", onednn.reason_not),
            Backend(
                *(NAME, "forward", "onednn_packed", f"{_HERE}.onednn:forward_packed"),
                onednn.reason_not_packed,
                (*_PACKED, *_CPP_SOURCES),
            ),
            Backend(
                *(NAME, "forward", "mkl_packed", f"{_HERE}.mkl:forward"),
                mkl.reason_not,
                (*_PACKED, *_CPP_SOURCES),
            ),
            Backend(
                *(NAME, "forward", "cpp", f"{_HERE}.cpp:forward"),
                cpp.reason_not_forward,
                _CPP_SOURCES,
            ),
            Backend(
                *(NAME, "forward", "half_cpp", f"{_HERE}.cpp_half:forward"),
                cpp_half.reason_not,
                _HALF_SOURCES,
            ),
            Backend(
                *(NAME, "grad_pre", "cpp", f"{_HERE}.cpp:grad_pre"),
                cpp.reason_not_grad_pre,
                _CPP_SOURCES,
            ),
            Backend(NAME, "grad_input", "onednn", f"{_HERE}.onednn:grad_input", onednn.reason_not),
            Backend(
                NAME, "grad_weight", "onednn", f"{_HERE}.onednn:grad_weight", onednn.reason_not
            ),
        ),
        prefer=_prefer,
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        akin=(_whatever_bias, _whatever_activation),
        cold=True,
        timed=deferred(f"{_HERE}.caller:timed"),
    )
)
