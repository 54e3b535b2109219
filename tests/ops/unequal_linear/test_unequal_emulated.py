"""The CUDA C++ of unequal_linear run on a CPU, thread by thread: launches, tiles, masks, sums.

What cannot be seen so is whether the instructions do what ``emulated.h`` says they do.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.ops.unequal_linear import cuda, op
from fastlinear.ops.unequal_linear.config import MIDDLE, OFFERED, SMALL, Tiles, tiles_of

if not shutil.which("g++"):
    pytest.skip("needs a C++ compiler", allow_module_level=True)

# (tokens, K, N): rows at 16 bytes, at 4, at 2; less than a tile, and more; no tokens
SIZES = (
    *((70, 72, 80), (3, 10, 66), (65, 33, 7), (130, 130, 8), (5, 200, 16), (0, 8, 9)),
    *((1, 1, 1), (64, 64, 64), (67, 8, 136)),
)
_MAIN = """
const Groups* given;
int group_count;
void body() {
  unequal_linear(*given, group_count);
  fibers[current].done = true;
}
extern "C" void launch(const void* groups, int count, int blocks) {
  given = static_cast<const Groups*>(groups);
  group_count = count;
  run_blocks(blocks, body);
}
"""
Call = tuple[int, str, bool]


class Emulated:
    """``cuda_driver.Launch`` for a kernel compiled for the CPU."""

    def __init__(self, kernel: Any, threads: int, cluster: int, arguments: Any) -> None:
        self._kernel, self._arguments = kernel, arguments
        self._blocks = 0

    def set_grid(self, blocks: int) -> None:
        self._blocks = blocks

    def run(self, stream: int) -> None:
        memory, count = self._arguments
        self._kernel.launch(ctypes.byref(memory), count.value, self._blocks)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Launches run on the CPU; new memory is NaN."""
    kernels: dict[Any, Any] = {}
    made = cuda._buffers
    here = str(Path(__file__).with_name("emulated.h"))

    def buffers(*call: Any) -> list[Tensor]:
        return [t.fill_(float("nan")) for t in made(*call)]

    def kernel(call: Call, dtype: torch.dtype, tiles: Tiles, places: int) -> Any:
        key = call, dtype, tiles, places
        if key not in kernels:
            mode, activation, save_pre = call
            headers = (here, "groups.h")
            rest = (mode, activation, save_pre, tiles, places)
            path = tmp_path / f"{len(kernels)}.cpp"
            path.write_text(cuda.source(dtype, *rest, headers=headers) + _MAIN)
            built = path.with_suffix(".so")
            command = ["g++", "-O1", "-std=c++17", "-w", "-shared", "-fPIC"]
            subprocess.run([*command, "-o", built, path], check=True)
            kernels[key] = ctypes.CDLL(str(built))
        return kernels[key]

    def run(call: Call, like: Tensor, sizes: Any, pointers: Any, tiles: Tiles | None) -> None:
        tiles = cuda._SINGLE if like.dtype is torch.float32 else tiles or SMALL
        order = cuda.largest_first(sizes)
        part = kernel(call, like.dtype, tiles, 32), order, sizes, tiles, 32
        cuda._Part(*part).run(pointers, 0)

    monkeypatch.setattr(cuda.driver, "Launch", Emulated)
    monkeypatch.setattr(cuda, "_buffers", buffers)
    monkeypatch.setattr(cuda, "_run", run)


def drawn(dtype: torch.dtype, sizes: Any) -> tuple[list[Tensor], list[Tensor], list[Any]]:
    generator = torch.Generator().manual_seed(1)

    def values(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        return made.to(dtype).requires_grad_()

    xs, weights = [values(m, k) for m, k, _ in sizes], [values(n, k) for _, k, n in sizes]
    return xs, weights, [values(n) if i % 3 else None for i, (_, _, n) in enumerate(sizes)]


def by_loop(dtype: torch.dtype, lists: Any, activation: str, dys: list[Tensor]) -> list[Any]:
    own = [
        [None if t is None else t.detach().to(dtype).requires_grad_() for t in ts] for ts in lists
    ]
    ys = op.loop(*own, activation)  # type: ignore[arg-type]
    given = [t for ts in own for t in ts if t is not None]
    found = list(torch.autograd.grad(ys, given, [dy.to(dtype) for dy in dys]))
    count = len(ys)
    return [ys, found[:count], found[count : 2 * count], found[2 * count :]]


def check(dtype: torch.dtype, activation: str, tiles: Tiles, sizes: Any = SIZES) -> None:
    lists = drawn(dtype, sizes)
    xs, weights, biases = ([None if t is None else t.detach() for t in ts] for ts in lists)
    dys = [torch.randn(m, n).to(dtype) for m, _, n in sizes]
    kind = op.activation_of(activation).saved
    ys, pres = cuda.forward(xs, weights, biases, activation, kind == "pre", tiles=tiles)
    saved = {"none": None, "output": ys, "pre": pres}[kind]
    dxs = cuda.grad_inputs(dys, saved, weights, activation, tiles=tiles)
    with_bias = [b is not None for b in biases]
    dws, dbs = cuda.grad_weights(dys, saved, xs, activation, with_bias, tiles=tiles)
    found = [ys, dxs, dws, [db for db in dbs if db is not None]]
    theirs = by_loop(dtype, lists, activation, dys)
    oracle = by_loop(torch.float64, lists, activation, dys)
    for name, *kinds in zip(("y", "dx", "dW", "db"), found, theirs, oracle, strict=True):
        a, t, o = (torch.cat([r.flatten() for r in ts]) for ts in kinds)
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)
    empty = [g for g, (m, _, _) in enumerate(sizes) if not m]
    assert not any(dws[g].any() for g in empty)


@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("tiles", OFFERED[0] + OFFERED[2][2:], ids=lambda t: f"{t.rows}x{t.cols}")
def test_tiles(tiles: Tiles, activation: str, emulated: None) -> None:
    check(torch.bfloat16, activation, tiles)


@pytest.mark.parametrize(
    ("dtype", "activation"), [(torch.float16, "relu"), (torch.float32, "silu")], ids=str
)
def test_dtypes(dtype: torch.dtype, activation: str, emulated: None) -> None:
    check(dtype, activation, SMALL)


def test_views_that_begin_anywhere(emulated: None) -> None:
    """Rows of 64 numbers in memory that begins at 2 and at 4 bytes."""
    for skipped in (1, 2):
        xs = [torch.randn(skipped + 20 * 64).bfloat16()[skipped:].view(20, 64)]
        weights, dys = [torch.randn(32, 64).bfloat16()], [torch.randn(20, 32).bfloat16()]
        (y,), _ = cuda.forward(xs, weights, [None], "none", False)
        torch.testing.assert_close(y, xs[0] @ weights[0].t())
        (dw,), _ = cuda.grad_weights(dys, None, xs, "none", [False])
        torch.testing.assert_close(dw, dys[0].t() @ xs[0])
        weights, pre = [torch.randn(64, 48).bfloat16()], [torch.randn(20, 64).bfloat16()]
        (dx,) = cuda.grad_inputs(xs, pre, weights, "gelu")  # xs as dys
        (slope,) = torch.autograd.grad(
            torch.nn.functional.gelu(pre[0].requires_grad_()), pre, torch.ones_like(pre[0])
        )
        expected = (xs[0].float() * slope.float()) @ weights[0].float()
        torch.testing.assert_close(dx.float(), expected, rtol=0.02, atol=0.2)


def test_tiles_are_large_where_they_fill_the_chip_only() -> None:
    for mode, offered in OFFERED.items():
        assert tiles_of(((64, 64, 64),) * 26, 132, mode) is SMALL
        assert tiles_of(((2048, 256, 256),) * 26, 132, mode) is offered[2]
        assert tiles_of(((8192, 40, 256),) * 26, 132, mode) in (SMALL, MIDDLE)
    assert cuda.largest_first(((1, 2, 3), (0, 2, 9), (1, 1, 5))) == [2, 0]
