"""A wide chain over all multiprocessors: layout and planning anywhere, the rest on Hopper."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import backend
from fastlinear.families.mlp.cuda import grid as whole_grid
from fastlinear.families.mlp.cuda.choice import best
from fastlinear.families.mlp.cuda.grid import Grid
from fastlinear.native import cuda_driver as driver
from tests.families.hopper_only import on_hopper

CXX = shutil.which("c++")
BF16, F32 = torch.bfloat16, torch.float32
GRIDS = {
    "one half": (Grid(8, 9, 8), 1024, BF16),
    "two warps a tile": (Grid(8, 9, 8, 2), 1024, BF16),
    "two warps a tile, two halves": (Grid(4, 5, 8, 2), 1024, BF16),
    "slots taken again": (Grid(8, 9, 2), 1024, torch.float16),
    "two halves a block": (Grid(4, 5, 4), 1024, BF16),
    "whole tiles": (Grid(8, 8, 3), 768, BF16),
    "float32": (Grid(8, 9, 3), 1024, F32),
    "float32, two halves": (Grid(4, 5, 2), 1024, F32),
    "wide": (Grid(8, 18, 2), 2048, BF16),
}


# ---------------------------------------------------------------- anywhere


def _grid(widths: tuple[int, ...], rows: int, itemsize: int) -> Grid:
    found = best("grid", widths, rows, itemsize)
    assert isinstance(found, Grid)
    return found


@pytest.mark.parametrize("width", [512, 768, 1024])
@pytest.mark.parametrize("rows", [16, 33, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_is_chosen_can_be_built_and_covers_all_columns(
    width: int, rows: int, itemsize: int
) -> None:
    widths = (width,) * 9
    grid = _grid(widths, rows, itemsize)
    assert grid.invalid(widths, rows, itemsize) is None
    assert grid.tiles * 8 * grid.blocks(width) // grid.cluster >= width
    assert grid.blocks(width) <= 120


@pytest.mark.parametrize(
    ("grid", "widths", "rows", "itemsize", "word"),
    [
        (Grid(8, 9, 2), (1024, 1024), 64, 2, "two or more"),
        (Grid(8, 9, 2), (1024, 1024, 512), 64, 2, "equal widths"),
        (Grid(16, 9, 2), (1024,) * 3, 64, 2, "cluster"),
        (Grid(8, 0, 2), (1024,) * 3, 64, 2, "tiles"),
        (Grid(8, 9, 2), (1000,) * 3, 64, 2, "64-byte"),
        (Grid(8, 9, 2), (1024,) * 3, 129, 2, "registers"),
        (Grid(8, 9, 2), (1024,) * 3, 65, 4, "registers"),
        (Grid(8, 9, 2, 2), (1024,) * 3, 65, 2, "registers"),
        (Grid(8, 7, 2, 2), (768,) * 3, 64, 2, "along K"),
        (Grid(8, 9, 16), (1024,) * 3, 64, 2, "shared memory"),
        (Grid(8, 9, 1), (768,) * 3, 16, 4, "rounds"),
    ],
)
def test_impossible_grids_are_named(
    grid: Grid, widths: tuple[int, ...], rows: int, itemsize: int, word: str
) -> None:
    assert word in (grid.invalid(widths, rows, itemsize) or "")


def test_other_chains_have_no_grid() -> None:
    assert best("grid", (1024, 1024), 64, 2) is None
    assert best("grid", (1024, 1024, 512), 64, 2) is None
    assert best("grid", (1000,) * 9, 64, 2) is None
    assert best("grid", (1024,) * 9, 64, 2, aligned=False) is None
    assert best("grid", (1024,) * 34, 64, 2) is None


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("grid", "width", "dtype"), GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize("rows", [16, 64])
def test_shared_memory_and_parameters_agree_with_the_source(
    tmp_path: Path, grid: Grid, width: int, dtype: torch.dtype, rows: int
) -> None:
    text = whole_grid.source(grid, width, rows, dtype, "relu", "none")
    macros = text[: text.index("//")]
    layout = text[text.index("constexpr int ES = DTYPE == 2") : text.index("static_assert(H")]
    file = tmp_path / "layout.cpp"
    file.write_text(
        "#include <cstdio>\ntypedef unsigned u32;\n"
        + macros
        + layout
        + 'int main() { std::printf("%d %d", SHARED_BYTES, (int)sizeof(Params)); }\n'
    )
    subprocess.run([str(CXX), "-std=c++17", "-o", tmp_path / "layout", file], check=True)
    done = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True)
    shared, parameters = map(int, done.stdout.split())
    assert shared == grid.shared_bytes(width, rows, dtype.itemsize)
    assert parameters == len(whole_grid._Params())


# ---------------------------------------------------------------- on a Hopper GPU

Inputs = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]


def _inputs(rows: int, width: int, layers: int, dtype: torch.dtype, bias: str = "yes") -> Inputs:
    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    widths = (width,) * (layers + 1)
    weights = tuple((draw(n, k) * (1.5 / k) ** 0.5).to(dtype) for k, n in pairwise(widths))
    biases = tuple(
        (draw(width) * 0.3).to(dtype) if bias == "yes" or (bias == "some" and i % 2 == 0) else None
        for i in range(layers)
    )
    return draw(rows, width).to(dtype), weights, biases


def _forward(inputs: Inputs, grid: Grid | None, activation: str = "relu") -> Tensor:
    return backend.forward(*inputs, activation, "none", False, config=grid)[0]


def _assert_right(
    inputs: Inputs, activation: str, final: str, save: bool, grid: Grid | None
) -> None:
    x, weights, biases = inputs
    y, saved = backend.forward(x, weights, biases, activation, final, save, config=grid)
    truth, kept = reference.forward(
        x.double(),
        tuple(w.double() for w in weights),
        tuple(None if b is None else b.double() for b in biases),
        activation,
        final,
        save,
    )
    plain, plain_kept = reference.forward(x, weights, biases, activation, final, save)
    pairs = zip((y, *saved), (plain, *plain_kept), (truth, *kept), strict=True)
    for i, (ours, theirs, oracle) in enumerate(pairs):
        assert ours.isfinite().all(), f"{i}: not every element was written"
        verdict = judge(f"y, saved…[{i}]", ours, theirs, oracle)
        assert verdict.passed, str(verdict)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("grid", "width", "dtype"), GRIDS.values(), ids=GRIDS.keys())
@pytest.mark.parametrize(("rows", "layers"), [(64, 8), (17, 3), (1, 2)])
def test_every_way_of_sharing(
    grid: Grid, width: int, dtype: torch.dtype, rows: int, layers: int
) -> None:
    if grid.invalid((width,) * (layers + 1), rows, dtype.itemsize):
        pytest.skip("not for so many rows")
    _assert_right(_inputs(rows, width, layers, dtype, "some"), "relu", "none", False, grid)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("activation", "final"), [("gelu", "tanh"), ("relu", "silu")])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_kept_for_the_backward(activation: str, final: str, dtype: torch.dtype) -> None:
    grid = _grid((1024,) * 5, 50, dtype.itemsize)
    _assert_right(_inputs(50, 1024, 4, dtype), activation, final, True, grid)


@on_hopper
@pytest.mark.gpu
def test_128_rows_and_rows_off_16_bytes() -> None:
    x, weights, biases = _inputs(128, 1024, 4, BF16)
    grid = _grid((1024,) * 5, 128, 2)
    _assert_right((x, weights, biases), "relu", "none", False, grid)
    wide = torch.full((128, 1031), torch.nan, device="cuda", dtype=BF16)
    wide[:, 3:1027] = x
    want = _forward((x, weights, biases), grid)
    assert torch.equal(_forward((wide[:, 3:1027], weights, biases), grid), want)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_ten_thousand_launches_are_bit_equal(dtype: torch.dtype) -> None:
    inputs = _inputs(64, 1024, 8, dtype)
    grid = _grid((1024,) * 9, 64, dtype.itemsize)
    first = _forward(inputs, grid)
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    for _ in range(10_000):
        differs |= (_forward(inputs, grid) != first).any()
    assert not differs


@on_hopper
@pytest.mark.gpu
def test_launches_of_other_inputs_on_one_workspace_and_on_several_streams() -> None:
    """Buffers that an earlier launch filled are never taken for this one's."""
    sets = [_inputs(rows, 1024, 8, BF16) for rows in (64, 63, 62)]
    grid = _grid((1024,) * 9, 64, 2)
    wants = [_forward(inputs, grid) for inputs in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = [torch.zeros((), device="cuda", dtype=torch.bool) for _ in streams]
    for turn in range(300):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                which = (turn + i) % 3
                wrong[i] |= (_forward(sets[which], grid) != wants[which]).any()
    torch.cuda.synchronize()
    assert not any(bool(w) for w in wrong)


@on_hopper
@pytest.mark.gpu
def test_graphs_have_workspaces_of_their_own() -> None:
    inputs = _inputs(64, 1024, 8, BF16)
    grid = _grid((1024,) * 9, 64, 2)
    want = _forward(inputs, grid)
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs = [_forward(inputs, grid) for _ in range(3)]
        graphs.append((graph, outs))
    streams = [torch.cuda.Stream() for _ in range(2)]
    for _ in range(100):
        for stream, (graph, _) in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        again = _forward(inputs, grid)
    torch.cuda.synchronize()
    assert torch.equal(again, want)
    for _, outs in graphs:
        assert all(torch.equal(out, want) for out in outs)


@on_hopper
@pytest.mark.gpu
def test_nan_and_infinity_do_not_hang_and_go_through() -> None:
    x, weights, biases = _inputs(20, 1024, 3, BF16)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    bits = torch.tensor(-1, dtype=torch.int16, device="cuda").view(BF16)  # every bit set
    x[3, 8] = bits
    weights[1][4, 4] = bits
    for dtype in (BF16, F32):
        cast = (
            x.to(dtype),
            tuple(w.to(dtype) for w in weights),
            tuple(b.to(dtype) for b in biases if b is not None),
        )
        grid = _grid((1024,) * 4, 20, dtype.itemsize)
        plain, _ = reference.forward(*cast, "relu", "none", False)
        assert torch.equal(_forward(cast, grid).isfinite(), plain.isfinite())


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("width", "rows"), [(768, 5), (1024, 40), (1024, 128), (1536, 33), (2048, 64)]
)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_what_a_call_takes_by_itself(width: int, rows: int, dtype: torch.dtype) -> None:
    if dtype == F32 and width > 1024:
        pytest.skip("not served")
    _assert_right(_inputs(rows, width, 3, dtype, "some"), "gelu", "none", False, None)


@on_hopper
@pytest.mark.gpu
def test_weights_off_a_16_byte_boundary() -> None:
    x, weights, biases = _inputs(9, 1536, 3, BF16)
    odd = tuple(
        torch.empty(w.numel() + 1, device="cuda", dtype=BF16)[1:].view_as(w).copy_(w)
        for w in weights
    )
    want = _forward((x, weights, biases), None)
    assert torch.equal(_forward((x, odd, biases), None), want)
    x, weights, biases = _inputs(9, 1024, 2, BF16)
    one_off = torch.empty(weights[0].numel() + 1, device="cuda", dtype=BF16)[1:].view(1024, 1024)
    with pytest.raises(UnsupportedError, match="16 bytes"):
        _forward((x, (weights[0], one_off), biases), Grid(4, 5, 2))


@on_hopper
@pytest.mark.gpu
def test_a_wide_chain_without_room_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver.Launch, "max_clusters", lambda _: 0)
    inputs = _inputs(7, 1792, 2, torch.float16)
    for _ in range(2):
        _assert_right(inputs, "relu", "none", True, None)


@on_hopper
@pytest.mark.gpu
def test_a_grid_of_too_many_blocks_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="at once"):
        _forward(_inputs(64, 1024, 2, BF16), Grid(8, 1, 2))
