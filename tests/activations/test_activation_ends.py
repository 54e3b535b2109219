"""Derivatives of activations where numbers end, in every dialect: what PyTorch's own autograd has.

Infinite gradients meet each end of the numbers. Where PyTorch has a number every dialect has it.
Where it has none, none is made up, but for limits that overflow hides and float64 shows.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import CUDA_HEADER, NAMES, cuda_macros
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import UnsupportedError
from fastlinear.kernels.cpu import elementwise
from fastlinear.native import cpp_build
from tests.families.interpreted import INTERPRETED, compares, run_interpreted, starts_it

inf, nan = float("inf"), float("nan")
VALUES = (inf, -inf, nan, 1e30, -1e30, 1e15, -1e15, 150.0, -150.0, 20.0, -20.0, 3.0, -3.0, 0.5, 0.0)
DYS = (1.0, -2.0, 0.0, inf, -inf, nan)
PRE = torch.tensor(VALUES).repeat(len(DYS))
DY = torch.tensor(DYS).repeat_interleave(len(VALUES))


def torchs(name: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(act(pre), dpre) by PyTorch's own autograd."""
    pre = PRE.to(dtype).requires_grad_()
    y = activation_of(name).value(pre)
    (dpre,) = torch.autograd.grad(y, pre, DY.to(dtype))
    return y.detach(), dpre


def check(name: str, found: Tensor, which: int, rtol: float = 1e-5) -> None:
    """``found`` beside PyTorch's y (``which`` 0) or dpre (1)."""
    own, exact = torchs(name, torch.float32)[which], torchs(name, torch.float64)[which]
    same = torch.isclose(found, own, rtol=rtol, atol=1e-6, equal_nan=True)
    limit = torch.isclose(found.double(), exact, rtol=rtol, atol=1e-6, equal_nan=True)
    good = same | (limit & ~own.isfinite())
    # Infinite gradients beside a derivative that vanishes: NaN or infinity, by how near 0.
    good |= found.isinf() & own.isnan() & DY.isinf() & PRE.isfinite()
    wrong = zip(*(t[~good].tolist() for t in (PRE, DY, found, own)), strict=True)
    assert good.all(), [f"pre {p:g}, dy {d:g}: {f:g}, torch {t:g}" for p, d, f, t in wrong]


def saved_of(name: str) -> Tensor:
    saved = {"none": PRE, "pre": PRE, "output": torchs(name, torch.float32)[0]}
    return saved[activation_of(name).saved]


@pytest.mark.parametrize("name", NAMES)
def test_formula(name: str) -> None:
    check(name, activation_of(name).backward(DY, saved_of(name)), 1)


Layer = Callable[[Tensor, str, str | None], Tensor]


def linear_act(b: Tensor, name: str, backend: str | None) -> Tensor:
    return fl.linear_act(
        torch.zeros(1, 5), torch.zeros(b.numel(), 5), b, activation=name, backend=backend
    )


def diagonal(b: Tensor, name: str, backend: str | None) -> Tensor:
    zeros = torch.zeros(b.numel())
    return fl.diagonal_linear(zeros[None], zeros, b, activation=name, backend=backend)


def grouped(b: Tensor, name: str, backend: str | None) -> Tensor:
    x, w = torch.zeros(1, 2 * 5), torch.zeros(2, b.numel(), 5)
    y = fl.grouped_linear(x, w, torch.stack([b, 0 * b.detach()]), name, backend=backend)
    return y[:, : b.numel()]


def ragged(b: Tensor, name: str, backend: str | None) -> Tensor:
    x, w, sizes = torch.zeros(1, 5), torch.zeros(2, b.numel(), 5), torch.tensor([0, 1])
    biases = torch.stack([0 * b.detach(), b])
    return fl.ragged_linear(x, w, sizes, biases, activation=name, backend=backend)


def unequal(b: Tensor, name: str, backend: str | None) -> Tensor:
    xs, ws = [torch.zeros(1, 5), torch.zeros(2, 3)], [torch.zeros(b.numel(), 5), torch.zeros(4, 3)]
    return fl.unequal_linear(xs, ws, [b, None], activation=name, backend=backend)[0]


def chain(b: Tensor, name: str, backend: str | None) -> Tensor:
    ws = [torch.zeros(6, 5), torch.zeros(b.numel(), 6)]
    biases = [torch.zeros(6), b]
    x = torch.zeros(1, 5)
    return fl.mlp(x, ws, biases, "relu", final_activation=name, backend=backend)


def gated(b: Tensor, name: str, backend: str | None) -> Tensor:
    w, ones = torch.zeros(b.numel(), 5), torch.ones(b.numel())
    return fl.gated_linear(torch.zeros(1, 5), w, w, b, ones, activation=name, backend=backend)


LAYERS: list[tuple[Layer, str]] = [
    *((linear_act, b) for b in ("eager", "cpp", "onednn", "gemm_cpp")),
    *((diagonal, b) for b in ("eager", "cpp")),
    *((grouped, b) for b in ("eager", "baddbmm", "cpp")),
    *((ragged, b) for b in ("eager", "cpp")),
    *((unequal, b) for b in ("eager", "together")),
    *((chain, b) for b in ("eager", "layerwise", "whole_cpp")),
    *((gated, b) for b in ("eager", "onednn", "cpp")),
]


@pytest.mark.parametrize(("layer", "backend"), LAYERS, ids=lambda v: getattr(v, "__name__", v))
@pytest.mark.parametrize("name", NAMES)
def test_layers(name: str, layer: Layer, backend: str) -> None:
    """Every call until its kind is known to the compiled fast path."""
    for _ in range(4):
        b = PRE.clone().requires_grad_()
        try:
            y = layer(b, name, backend)
            (db,) = torch.autograd.grad(y, b, DY[None])
        except UnsupportedError as error:
            pytest.skip(str(error))
        check(name, y[0].detach(), 0)
        check(name, db, 1)


@pytest.mark.skipif(elementwise.why_not_loaded() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("name", NAMES)
def test_elementwise_cpp(name: str) -> None:
    found, _ = elementwise.differentiate(name, DY[None], saved_of(name)[None], False)
    check(name, found[0], 1)


GENERATOR = torch.Generator().manual_seed(0)
ANY_SIZE = torch.randn(128, generator=GENERATOR).sign() * 2.0 ** torch.linspace(-20, 127.99, 128)


def check_sine(found: Tensor, cosine: Tensor) -> None:
    """Of arguments up to the largest: an error of at most two roundings of 1."""
    for own, exact in ((found, ANY_SIZE.double().sin()), (cosine, ANY_SIZE.double().cos())):
        error = (own.double() - exact).abs()
        assert error.max() <= 2.0**-22, ANY_SIZE[error.argmax()]
    small = ANY_SIZE.abs() < 0.5
    torch.testing.assert_close(found[small], ANY_SIZE[small].sin(), rtol=2.0**-22, atol=0.0)


@pytest.mark.skipif(elementwise.why_not_loaded() is not None, reason="no C++ compiler")
def test_sine_of_any_size_in_cpp() -> None:
    y, ones = torch.empty_like(ANY_SIZE), torch.ones(1, ANY_SIZE.numel())
    elementwise.activate("sine", ANY_SIZE, y)
    check_sine(y, elementwise.differentiate("sine", ones, ANY_SIZE[None], False)[0][0])


# --------------------------------------------------------------------------------------------
# CUDA C++: the header's own text, compiled for this processor

FORMS = {  # of evaluation → what derives
    "fast": "float r; act_and_grad(pre, dy, r); return r;",
    "fast, saved": "return graded(dy, saved);",
    "tail": "return graded(dy, saved);",
    "quotient": "return graded(dy, saved);",
}
_HOST = """
#include <cmath>
#include <cstring>
#define __device__
#define __forceinline__ inline
#define __noinline__
#define __constant__ const
static unsigned __float_as_uint(float x) { unsigned y; std::memcpy(&y, &x, 4); return y; }
static float __uint_as_float(unsigned x) { float y; std::memcpy(&y, &x, 4); return y; }
static unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }
"""
_APPROXIMATE = {"ex2.approx.ftz.f32": "y = exp2f(x);", "rcp.approx.ftz.f32": "y = 1.0f / x;"}


@pytest.fixture(scope="module", params=FORMS)
def compiled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> ctypes.CDLL:
    compiler = cpp_build.compiler()
    if compiler is None:
        pytest.skip("no C++ compiler")
    text = CUDA_HEADER.read_text()
    for instruction, meaning in _APPROXIMATE.items():
        text, count = re.subn(rf'asm\("{instruction} .*;', meaning, text)
        assert count == 1, instruction
    source = [_HOST]
    form = request.param.partition(",")[0]
    for name in NAMES:
        macros = cuda_macros(form, name)
        source += [f"#define {macro} {value}" for macro, value in macros.items()]
        source.append(f"namespace of_{name} {{\n{text}")
        source.append(
            f"float run(float dy, float pre, float saved) {{ {FORMS[request.param]} }}\n}}"
        )
        source.append(
            f'extern "C" float {name}_(float d, float p, float s) '
            f"{{ return of_{name}::run(d, p, s); }}"
        )
        source.append(f'extern "C" float {name}_value(float x) {{ return of_{name}::act(x); }}')
        source += [f"#undef {macro.partition('(')[0]}" for macro in macros]
    folder = tmp_path_factory.mktemp("device")
    path = folder / "device.cpp"
    path.write_text("\n".join(source))
    command = [*compiler, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", str(path), "-o"]
    subprocess.run([*command, str(folder / "device.so")], check=True)
    return ctypes.CDLL(str(folder / "device.so"))


def device_functions(name: str, compiled: ctypes.CDLL) -> tuple[Any, Any]:
    run, value = getattr(compiled, f"{name}_"), getattr(compiled, f"{name}_value")
    run.argtypes, run.restype = [ctypes.c_float] * 3, ctypes.c_float
    value.argtypes, value.restype = [ctypes.c_float], ctypes.c_float
    return run, value


def test_sine_of_any_size_on_a_device(compiled: ctypes.CDLL) -> None:
    run, value = device_functions("sine", compiled)
    numbers = ANY_SIZE.tolist()
    check_sine(torch.tensor([*map(value, numbers)]), torch.tensor([run(1, x, x) for x in numbers]))


@pytest.mark.parametrize("name", NAMES)
def test_device_code(name: str, compiled: ctypes.CDLL) -> None:
    run, value = device_functions(name, compiled)
    given = zip(DY.tolist(), PRE.tolist(), saved_of(name).tolist(), strict=True)
    check(name, torch.tensor([run(*three) for three in given]), 1, rtol=1e-4)
    check(name, torch.tensor([value(pre) for pre in PRE.tolist()]), 0, rtol=1e-4)


# --------------------------------------------------------------------------------------------
# Triton


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


if INTERPRETED:
    import triton
    import triton.language as tl

    from fastlinear.activations.triton import activation, activation_grad

    @triton.jit
    def _kernel(pre_ptr, dy_ptr, saved_ptr, y_ptr, out_ptr, N: tl.constexpr, ACT: tl.constexpr):  # type: ignore[no-untyped-def]
        offs = tl.arange(0, 128)
        mask = offs < N
        y = activation(tl.load(pre_ptr + offs, mask=mask), ACT, "exact")
        tl.store(y_ptr + offs, y, mask=mask)
        dy, saved = tl.load(dy_ptr + offs, mask=mask), tl.load(saved_ptr + offs, mask=mask)
        tl.store(out_ptr + offs, activation_grad(dy, saved, ACT, "exact"), mask=mask)


@compares
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy's, of overflow
@pytest.mark.parametrize("name", NAMES)
def test_triton(name: str) -> None:
    y, dpre = torch.empty_like(PRE), torch.empty_like(PRE)
    _kernel[(1,)](PRE, DY, saved_of(name), y, dpre, PRE.numel(), name)
    check(name, y, 0)
    check(name, dpre, 1)


@compares
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_sine_of_any_size_in_triton() -> None:
    y, cosine, ones = torch.empty(128), torch.empty(128), torch.ones(128)
    _kernel[(1,)](ANY_SIZE, ones, ANY_SIZE, y, cosine, 128, "sine")
    check_sine(y, cosine)
