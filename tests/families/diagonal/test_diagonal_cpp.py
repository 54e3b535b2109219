"""What only the C++ passes of diagonal_linear have: other ways to write, and threads."""

from __future__ import annotations

import ctypes
import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.settings import cache_dir
from fastlinear.families.diagonal.cpu import cpp
from fastlinear.native import cpp_build

pytestmark = pytest.mark.skipif(cpp_build.reason_not() is not None, reason="no C++ here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [(1, 1), (3, 5), (70, 33), (40, 1030), (9, 5000)])
def test_a_dx_written_around_the_caches_is_the_same(
    size: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, from any address on, and nothing beside it is touched."""
    m, k = size
    dy, x = (torch.randn(m, k).to(dtype) for _ in range(2))
    w, b = (torch.randn(k).to(dtype) for _ in range(2))
    for start, name in itertools.product((0, 1, 7), ("none", "gelu")):
        memory: list[torch.Tensor] = []

        def empty(
            shape: tuple[int, ...],
            like: torch.Tensor,
            start: int = start,
            memory: list[torch.Tensor] = memory,
        ) -> torch.Tensor:
            count = torch.Size(shape).numel()
            memory.append(torch.full((start + count + 40,), 7.0, dtype=like.dtype))
            return memory[-1][start : start + count].view(shape)

        monkeypatch.setattr(cpp, "_empty", empty)
        found = []
        for least in (0, 1 << 60):
            monkeypatch.setattr(cpp, "_PAST_BYTES", least)
            found.append(cpp.backward(dy, x, w, b, name, (True, True, True)))
        for past, plain in zip(*found, strict=True):
            assert past is not None
            assert plain is not None
            assert torch.equal(past, plain)
        for held in memory:
            assert bool((held[:start] == 7.0).all())
            assert bool((held[-40:] == 7.0).all())


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    dy, x, w, b = torch.randn(700, 90), torch.randn(700, 90), torch.randn(90), torch.randn(90)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpp.backward(dy, x, w, b, "silu", (True, True, True)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert one is not None
            assert two is not None
            assert torch.equal(one, two)


CONVERSIONS = """
#include "{header}"
extern "C" void widened(const {T}* from, float* to, int64_t n) {{
  for (int64_t i = 0; i < n; ++i) to[i] = wide(from[i]);
}}
extern "C" void narrowed(const float* from, {T}* to, int64_t n) {{
  for (int64_t i = 0; i < n; ++i) to[i] = narrow<{T}>(from[i]);
}}
"""


@pytest.mark.parametrize("name", ["Half", "Bf16"])
def test_numbers_of_16_bits_are_converted_as_torch_converts_them(name: str, tmp_path: Path) -> None:
    """All of them to float32, and back all, those half way between two, and their neighbours."""
    source = tmp_path / "conversions.cpp"
    header = cpp.SOURCE.parents[3] / "kernels/cpu/numbers.h"
    source.write_text(CONVERSIONS.format(header=header, T=name))
    library = cpp_build.load(source)
    dtype = torch.bfloat16 if name == "Bf16" else torch.float16

    def run(function: str, given: Tensor, into: torch.dtype) -> Tensor:
        found = torch.empty(given.shape, dtype=into)
        where = [ctypes.c_void_p(t.data_ptr()) for t in (given, found)]
        getattr(library, function)(*where, ctypes.c_int64(given.numel()))
        return found

    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(dtype)
    wide = run("widened", every, torch.float32)
    torch.testing.assert_close(wide, every.float(), rtol=0, atol=0, equal_nan=True)
    upward = torch.nextafter(wide, torch.tensor(float("inf")))
    finite = every[every.isfinite()].float().sort().values
    between = (finite[1:].double() + finite[:-1]).div(2).float()
    edges = torch.tensor([65519.996, 65520.0, 1e-8, 2.0**-25, 3e38, -3e38])
    back = torch.cat(
        [
            wide,
            upward,
            -upward,
            between,
            *(torch.nextafter(between, torch.full((), side)) for side in (1e38, -1e38)),
            edges,
        ]
    )
    found = run("narrowed", back, dtype)
    torch.testing.assert_close(found, back.to(dtype), rtol=0, atol=0, equal_nan=True)
    number = ~back.isnan()
    assert torch.equal(found.signbit()[number], back.to(dtype).signbit()[number])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [1, 15, 17, 33, 600, 1030, 4099])
def test_what_does_not_fill_a_line_is_computed_alike(k: int, dtype: torch.dtype) -> None:
    """Bit for bit as in rows with room for more, with and without what a call may leave out."""
    m, more = 37, k + 64 - k % 64
    x, dy, r = (torch.randn(m, more).to(dtype) for _ in range(3))
    w, b = (torch.randn(more).to(dtype) for _ in range(2))
    for name, bias, residual in itertools.product(NAMES, (b, None), (r, None)):
        part = [None if t is None else t[..., :k].contiguous() for t in (x, w, bias, residual)]
        wide = cpp.forward(x, w, bias, name, residual, None)
        narrow = cpp.forward(part[0], part[1], part[2], name, part[3], None)
        assert torch.equal(narrow, wide[:, :k]), (name, bias is None, residual is None)
        if residual is None:
            full = cpp.backward(dy, x, w, bias, name, (True, False, False))[0]
            dx = cpp.backward(dy[:, :k].contiguous(), *part[:3], name, (True, True, True))[0]
            assert full is not None
            assert dx is not None
            assert torch.equal(dx, full[:, :k]), (name, bias is None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_without_a_bias_zeros_keep_their_sign(dtype: torch.dtype) -> None:
    x = torch.tensor([[-0.0, 0.0, -1.0, 1.0] * 9]).to(dtype)
    w = torch.tensor([1.0, -1.0, 0.0, -0.0] * 9).to(dtype)
    for name in ("none", "leaky_relu"):
        y = cpp.forward(x, w, None, name, None, None)
        assert torch.equal(y.signbit(), (x * w).signbit())


def test_the_library_is_small_enough_to_compile_while_somebody_waits() -> None:
    """One loop for each activation and dtype, forward and backward; it once was 870 kB and took a
    compiler 17 seconds."""
    cpp_build.load(cpp.SOURCE)
    sizes = [f.stat().st_size for f in (cache_dir() / "cpp").glob("diagonal-*.so")]
    assert sizes
    assert max(sizes) < 300_000


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu2"])
def test_what_lies_behind_the_last_row_adds_to_no_gradient(name: str, dtype: torch.dtype) -> None:
    """Rows are walked several at once; where the last are fewer, columns go on behind them."""
    for m in range(1, 12):
        x, dy = -1.0 - torch.rand(m, 100), torch.randn(m, 100)
        w, b = torch.ones(100), torch.zeros(100)
        w[0] = float("inf")
        given = [t.to(dtype) for t in (dy, x, w, b)]
        _, dw, db = cpp.backward(*given, name, (True, True, True))
        assert dw is not None
        assert db is not None
        assert bool(torch.isfinite(dw).all()), m
        assert bool(torch.isfinite(db).all()), m
