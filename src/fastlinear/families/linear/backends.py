"""The family record of linear_act: its pieces, backends and least cost.

Light on purpose: backends are named here and imported on first use.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import KINKED
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.dispatch.backend import (
    Backend,
    Family,
    always,
    deferred,
    is_installed,
    register_family,
    why_no_gpu,
    widened_backends,
)
from fastlinear.dispatch.drawn import linear_clear_of_kinks
from fastlinear.families.linear import batch_invariant, cublaslt, padded_problem, reference
from fastlinear.families.linear.cost import cost
from fastlinear.families.linear.cpu import cpp, gemm, half, onednn
from fastlinear.families.linear.cuda import few_rows_config, planes
from fastlinear.families.linear.cuda import gemm as cuda
from fastlinear.families.linear.problem import NAME, PIECES, SPACE, STEP, WHOLE_BACKWARD, problem
from fastlinear.families.linear.triton import config
from fastlinear.kernels import CPP_SOURCES, CUDA_SOURCES, TRITON_SOURCES

_HERE = "fastlinear.families.linear"
_EXACT_ROWS = 4  # up to here kernels multiply and add in float32
_FAST_UNITS = ((8, 0), (9, 0), (10, 0), (10, 3))  # capabilities
_FEWEST_ROWS, _FEW_ROWS, _LEAST_DEPTH = 16, 128, 1024
_TRITON_SOURCES = ("families/linear/triton", "families/linear/cuda", *TRITON_SOURCES, *CUDA_SOURCES)
_CUDA_SOURCES = ("families/linear/cuda", *CUDA_SOURCES)
_CPP_SOURCES = ("families/linear/cpu", *CPP_SOURCES)
_PADDED_SOURCES = ("families/linear/padded_problem.py", *_TRITON_SOURCES)
PIECES_SOURCES = (
    *(f"families/linear/{name}.py" for name in ("autograd", "cublaslt", "padded")),
    "fastpath",
    *(*_PADDED_SOURCES, *_CPP_SOURCES),
)
"""What a training call consists of."""


def _reason_not_gpu(p: Problem) -> str | None:
    return why_no_gpu(p) or ("no kernel for float64" if p.dtype == "float64" else None)


def _reason_not_triton(p: Problem) -> str | None:
    why = _reason_not_gpu(p)
    if why is None and not is_installed("triton"):
        why = "the package triton is not installed"
    if why is None and p.piece in ("forward", "grad_input", WHOLE_BACKWARD):
        why = _reason_not_precise(p)
    return why or _reason_not_sizes(p)


def _reason_not_sizes(p: Problem) -> str | None:
    return config.reason_not(
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
    few = _EXACT_ROWS < p.dim("M") <= _FEW_ROWS and depth >= config.TF32X3_MIN_DEPTH
    if few and (p.dim("M") <= _FEWEST_ROWS or depth < _LEAST_DEPTH):
        return "three TF32 products of so few rows are less accurate than PyTorch's float32"
    return None


def _why_not_three(products: str, p: Problem) -> str | None:
    """Three narrow products beat float32's own only on the data-centre chips, whose matrix units
    are many times as fast as their float32 units."""
    exact = p.dtype == "float32" and p.precision == "highest" and p.piece != "grad_pre"
    if not exact or torch.cuda.get_device_capability() in _FAST_UNITS:
        return None
    return f"three {products} products are no faster than float32 on this GPU"


_why_not_three_tf32 = partial(_why_not_three, "TF32")
_why_not_three_halves = partial(_why_not_three, "float16")


def _reason_not_padded(p: Problem) -> str | None:
    why = _reason_not_gpu(p)
    if why is not None:
        return why
    odd_rows = padded_problem.writes_odd_rows(p, torch.cuda.get_device_capability())
    return padded_problem.reason_not(p, odd_rows)


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


def _reason_not_planes(p: Problem) -> str | None:
    return _reason_not_gpu(p) or planes.reason_not(p)


def _reason_not_triton_planes(p: Problem) -> str | None:
    why = _reason_not_gpu(p)
    if why is None and not is_installed("triton"):
        why = "the package triton is not installed"
    return why or planes.reason_not_exact(p) or planes.why_not_of(*map(p.dim, "MKN"))


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


def _reason_not_invariant(p: Problem) -> str | None:
    why = batch_invariant.reason_not(p)
    return why if why is not None or p.device == "cpu" else _reason_not_sizes(p)


def _reason_not_triton_backward(p: Problem) -> str | None:
    why = _reason_not_triton(p)
    if why is not None:
        return why
    most = config.max_backward_rows(torch.cuda.get_device_capability())
    if p.dim("M") > most:
        return f"serves at most {most} rows of x here, the call has {p.dim('M')}"
    return None


def _strides(p: Problem) -> tuple[tuple[int, int], tuple[int, int]]:
    """Strides of x and weight that stand for the Problem's layouts."""
    k, n = p.dim("K"), p.dim("N")
    x = {"rows": (k, 1), "rows_odd": (2 * k + 1, 1), "strided": (2 * k + 1, 2)}[p.option("x")]
    w = {"nk": (k, 1), "kn": (1, n), "strided": (2 * k + 1, 2)}[p.option("w")]
    return x, w


def _make_inputs(p: Problem, device: torch.device, seed: int) -> tuple[Any, ...]:
    """Random inputs of a Problem's piece, scaled so that pre-activations are near unit size."""
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    dtype = FLOAT_DTYPES[p.dtype]
    act = activation_of(p.option("activation"))
    generator = torch.Generator("cpu").manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        values = (
            torch.randn(shape, generator=generator, device="cpu") if device.type == "cpu" else None
        )
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

        def redraw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=more, device=device).to(dtype)

        x = linear_clear_of_kinks(x, weight, bias, redraw)
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
        return _STEP_EAGER.load(p)(*inputs)
    return getattr(reference, p.piece)(*inputs)


_STEP_EAGER = Backend(NAME, STEP, "eager", f"{_HERE}.spec:eager", always)


def _reason_not_pieces(p: Problem) -> str | None:
    return "float64 is left to PyTorch's own ops" if p.dtype == "float64" else None


def _examples(facts: Mapping[str, Any]) -> Mapping[str, Problem]:
    layer, gelu = partial(problem, "forward"), {**facts, "activation": "gelu_tanh"}
    return {
        "": layer(64, 1024, 1024, **gelu),
        "few rows": layer(8, 1024, 1024, **gelu),
        "rows of odd lengths": layer(512, 1023, 1023, **gelu),
    }


FAMILY = register_family(
    Family(
        name=NAME,
        pieces=(*PIECES, WHOLE_BACKWARD, STEP),
        backends=(
            *(
                Backend(NAME, p, "eager", f"{_HERE}.reference:{p}", always)
                for p in (*PIECES, WHOLE_BACKWARD)
            ),
            _STEP_EAGER,
            Backend(
                NAME, STEP, "pieces", f"{_HERE}.spec:pieces", _reason_not_pieces, PIECES_SOURCES
            ),
            Backend(
                NAME,
                WHOLE_BACKWARD,
                "pieces",
                f"{_HERE}.spec:backward",
                _reason_not_pieces,
                PIECES_SOURCES,
            ),
            Backend(
                NAME,
                WHOLE_BACKWARD,
                "padded",
                f"{_HERE}.padded:backward",
                _reason_not_padded,
                _PADDED_SOURCES,
            ),
            Backend(
                NAME,
                WHOLE_BACKWARD,
                "triton",
                f"{_HERE}.triton.backward:backward",
                _reason_not_triton_backward,
                _TRITON_SOURCES,
                _why_not_three_tf32,
            ),
            Backend(NAME, "forward", "cublaslt", f"{_HERE}.cublaslt:forward", cublaslt.reason_not),
            *(
                Backend(
                    NAME,
                    p,
                    "triton",
                    f"{_HERE}.triton.backend:{p}",
                    _reason_not_triton,
                    _TRITON_SOURCES,
                    _why_not_three_tf32,
                )
                for p in ("forward", "grad_pre", "grad_input", "grad_weight")
            ),
            Backend(
                NAME,
                "forward",
                "cuda",
                f"{_HERE}.cuda.gemm:forward",
                _reason_not_cuda,
                _CUDA_SOURCES,
            ),
            Backend(
                *(NAME, "forward", "few_rows", f"{_HERE}.cuda.few_rows:forward"),
                _reason_not_few_rows,
                _CUDA_SOURCES,
            ),
            *(
                Backend(
                    *(NAME, p, "planes", f"{_HERE}.cuda.planes_backend:{p}"),
                    *(_reason_not_planes, _CUDA_SOURCES),
                )
                for p in ("forward", "grad_input", "grad_weight", WHOLE_BACKWARD)
            ),
            *(
                Backend(
                    *(NAME, p, "triton_planes", f"{_HERE}.triton.planes:{p}"),
                    *(_reason_not_triton_planes, _TRITON_SOURCES),
                    _why_not_three_halves,
                )
                for p in ("forward", "grad_input", "grad_weight")
            ),
            *(
                Backend(
                    NAME, p, "padded", f"{_HERE}.padded:{p}", _reason_not_padded, _PADDED_SOURCES
                )
                for p in ("forward", "grad_input", "grad_weight")
            ),
            Backend(
                *(NAME, "forward", BATCH_INVARIANT, f"{_HERE}.batch_invariant:forward"),
                *(_reason_not_invariant, (*_CPP_SOURCES, *_TRITON_SOURCES)),
                on_request=True,
            ),
            Backend(NAME, "forward", "onednn", f"{_HERE}.cpu.onednn:forward", onednn.reason_not),
            Backend(
                *(NAME, "forward", "cpp", f"{_HERE}.cpu.cpp:forward"),
                cpp.reason_not_forward,
                _CPP_SOURCES,
            ),
            Backend(
                *(NAME, "forward", "half_cpp", f"{_HERE}.cpu.half:forward"),
                half.reason_not,
                _CPP_SOURCES,
            ),
            *(
                Backend(
                    *(NAME, p, "gemm_cpp", f"{_HERE}.cpu.gemm:{p}"),
                    gemm.reason_not,
                    _CPP_SOURCES,
                )
                for p in ("forward", "grad_input", "grad_weight")
            ),
            Backend(
                *(NAME, "grad_pre", "cpp", f"{_HERE}.cpu.cpp:grad_pre"),
                cpp.reason_not_grad_pre,
                _CPP_SOURCES,
            ),
            Backend(
                NAME, "grad_input", "onednn", f"{_HERE}.cpu.onednn:grad_input", onednn.reason_not
            ),
            Backend(
                NAME, "grad_weight", "onednn", f"{_HERE}.cpu.onednn:grad_weight", onednn.reason_not
            ),
            *widened_backends(NAME, "forward", "grad_input", "grad_weight"),
        ),
        make_inputs=_make_inputs,
        reference=_reference,
        cost=cost,
        cpu_work=deferred(f"{_HERE}.cpu_work:work"),
        gpu_work=deferred(f"{_HERE}.gpu_work:work"),
        examples=_examples,
        space=SPACE,
        command=f"{_HERE}.command:COMMAND",
        tuning_order=deferred(f"{_HERE}.selection:tuning_order"),
        cold=True,
        timed=deferred(f"{_HERE}.spec:timed"),
        removed={
            "onednn_packed": "Backend 'onednn' takes the weight where it lies.",
            "mkl_packed": "PyTorch's own product, backend 'eager', is MKL's.",
        },
    )
)
