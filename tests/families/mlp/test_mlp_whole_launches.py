"""A launch a layer, each begun early: layout and planning anywhere, the rest on Hopper."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import backend, launches
from fastlinear.families.mlp.cuda.choice import best
from fastlinear.families.mlp.cuda.launches import KERNEL, Launches
from tests.families import nvrtc_offline as offline
from tests.families.hopper_only import on_hopper

CXX = shutil.which("c++")
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
WAYS = {
    "one warp a column tile": (Launches(8, 1, 8, stages=8, x_blocks=8), BF16),
    "two tiles a warp, K shared": (Launches(8, 2, 4, 2, stages=4, x_blocks=8), F16),
    "x in several parts": (Launches(2, 1, 4, 2, stages=5, x_blocks=16), BF16),
    "no cluster": (Launches(1, 1, 4, 2, stages=3, x_blocks=8), BF16),
    "float32": (Launches(8, 1, 8, stages=5, x_blocks=16), F32),
    "float32, K shared": (Launches(4, 1, 4, 2, stages=5, x_blocks=16), F32),
}

CONFIGS = {BF16: WAYS["one warp a column tile"][0], F32: WAYS["float32"][0]}


# ---------------------------------------------------------------- anywhere


@pytest.mark.parametrize("widths", [(2048,) * 3, (4096,) * 3, (1280, 64, 1000, 7), (8192, 8192)])
@pytest.mark.parametrize("rows", [8, 9, 32, 33, 64, 128])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_what_is_chosen_can_be_built_and_covers_all_columns(
    widths: tuple[int, ...], rows: int, itemsize: int
) -> None:
    found = best("launches", widths, rows, itemsize)
    assert isinstance(found, tuple)
    for config, n in zip(found, widths[1:], strict=True):
        assert config.invalid(rows, itemsize) is None
        assert config.blocks(n) // config.cluster * 16 * config.tiles * config.columns >= n


@pytest.mark.parametrize(
    ("config", "rows", "itemsize", "word"),
    [
        (Launches(16, 1, 8), 64, 2, "cluster"),
        (Launches(8, 0, 8), 64, 2, "nothing"),
        (Launches(8, 1, 8, 3), 64, 2, "warps"),
        (Launches(8, 1, 4, 3), 64, 2, "blocks of x"),
        (Launches(8, 4, 2), 64, 2, "registers"),
        (Launches(8, 2, 4), 64, 4, "registers"),
        (Launches(8, 1, 8, stages=16), 64, 2, "shared memory"),
    ],
)
def test_impossible_ways_are_named(config: Launches, rows: int, itemsize: int, word: str) -> None:
    assert word in (config.invalid(rows, itemsize) or "")


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("config", "dtype"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("rows", [5, 64])
def test_shared_memory_and_parameters_agree_with_the_source(
    tmp_path: Path, config: Launches, dtype: torch.dtype, rows: int
) -> None:
    text = launches.source(config, rows, dtype)
    macros = text[: text.index("//")]
    layout = text[
        text.index("constexpr int ES = DTYPE == 2") : text.index(
            "__device__ __force", text.index("struct Params")
        )
    ]
    file = tmp_path / "layout.cpp"
    file.write_text(
        "#include <cstdio>\n"
        + macros
        + layout
        + 'int main() { std::printf("%d %d", SHARED_BYTES, (int)sizeof(Params)); }\n'
    )
    subprocess.run([str(CXX), "-std=c++17", "-o", tmp_path / "layout", file], check=True)
    done = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True)
    shared, parameters = map(int, done.stdout.split())
    assert shared == config.shared_bytes(rows)
    assert parameters == len(launches._Params())


@pytest.mark.parametrize(("config", "dtype"), WAYS.values(), ids=WAYS.keys())
def test_compiles_without_spills(config: Launches, dtype: torch.dtype) -> None:
    text = launches.source(config, 64, dtype)
    assert offline.usage(text, "launches.cu")[KERNEL].frame == 0


# ---------------------------------------------------------------- on a Hopper GPU

Inputs = tuple[Tensor, tuple[Tensor, ...], tuple[Tensor | None, ...]]


def _inputs(
    rows: int, widths: tuple[int, ...], dtype: torch.dtype, bias: str = "yes", seed: int = 0
) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(rows + seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    weights = tuple((draw(n, k) * (1.5 / k) ** 0.5).to(dtype) for k, n in pairwise(widths))
    biases = tuple(
        (draw(n) * 0.3).to(dtype) if bias == "yes" or (bias == "some" and i % 2 == 0) else None
        for i, n in enumerate(widths[1:])
    )
    return draw(rows, widths[0]).to(dtype), weights, biases


def _forward(
    inputs: Inputs, config: Launches | tuple[Launches, ...], activation: str = "relu"
) -> Tensor:
    return backend.forward(*inputs, activation, "none", False, config=config)[0]


def _assert_right(
    inputs: Inputs, activation: str, final: str, save: bool, config: Launches | tuple[Launches, ...]
) -> None:
    x, weights, biases = inputs
    y, saved = backend.forward(x, weights, biases, activation, final, save, config=config)
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
@pytest.mark.parametrize(("config", "dtype"), WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize(
    ("rows", "widths"), [(64, (1024,) * 4), (17, (264, 1000, 520, 41)), (1, (8, 8, 3))], ids=str
)
def test_every_way_of_sharing(
    config: Launches, dtype: torch.dtype, rows: int, widths: tuple[int, ...]
) -> None:
    _assert_right(_inputs(rows, widths, dtype, "some"), "relu", "none", False, config)


@on_hopper
@pytest.mark.gpu
def test_a_configuration_for_each_layer() -> None:
    few, many = WAYS["no cluster"][0], WAYS["one warp a column tile"][0]
    inputs = _inputs(40, (264, 1000, 520), BF16)
    _assert_right(inputs, "relu", "none", False, (few, many))
    with pytest.raises(UnsupportedError, match="1 configurations for 2 layers"):
        _forward(inputs, (few,))


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_every_activation_and_what_the_backward_reads(activation: str, dtype: torch.dtype) -> None:
    _assert_right(_inputs(33, (1280,) * 4, dtype), activation, "silu", True, CONFIGS[dtype])
    _assert_right(_inputs(33, (1280,) * 4, dtype), "relu", activation, True, CONFIGS[dtype])


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("rows", [8, 65, 128])
def test_rows_and_where_they_lie(rows: int, dtype: torch.dtype) -> None:
    inputs = _inputs(rows, (2048, 1000, 2048), dtype)
    _assert_right(inputs, "gelu", "none", False, CONFIGS[dtype])
    x, weights, biases = inputs
    want = _forward(inputs, CONFIGS[dtype])
    wide = torch.cat([x, x], 1)
    wide[:, 3:2051] = x
    assert torch.equal(_forward((wide[:, 3:2051], weights, biases), CONFIGS[dtype]), want)
    off = tuple(torch.cat([w.flatten()[:1], w.flatten()])[1:].view_as(w) for w in weights)
    assert off[0].data_ptr() % 16
    assert torch.equal(_forward((x, off, biases), CONFIGS[dtype]), want)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_ten_thousand_calls_are_bit_equal(dtype: torch.dtype) -> None:
    inputs = _inputs(64, (1280,) * 4, dtype)
    first = _forward(inputs, CONFIGS[dtype])
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    for _ in range(10_000):
        differs |= (_forward(inputs, CONFIGS[dtype]) != first).any()
    assert not differs


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_weights_written_just_before_and_graphs(dtype: torch.dtype) -> None:
    """No launch reads weights before what lies ahead of its call on the stream has written them."""
    x, weights, biases = _inputs(64, (2048,) * 4, dtype)
    others = _inputs(64, (2048,) * 4, dtype, seed=1)[1]
    want = [_forward((x, w, biases), CONFIGS[dtype]) for w in (weights, others)]
    held = tuple(w.clone() for w in weights)

    def calls() -> list[Tensor]:
        made = []
        for source in (others, weights, others):
            for into, w in zip(held, source, strict=True):
                into.copy_(w)
            made.append(_forward((x, held, biases), CONFIGS[dtype]))
        return made

    for _ in range(20):
        for got, i in zip(calls(), (1, 0, 1), strict=True):
            assert torch.equal(got, want[i])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = calls()
    for _ in range(20):
        graph.replay()
        for got, i in zip(made, (1, 0, 1), strict=True):
            assert torch.equal(got, want[i])


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_nan_and_infinity_go_through(dtype: torch.dtype) -> None:
    x, weights, biases = _inputs(20, (1280,) * 3, dtype)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    bits = {BF16: torch.int16, F32: torch.int32}[dtype]
    ones = torch.tensor(-1, dtype=bits, device="cuda").view(dtype)  # a NaN of all bits
    x[3, 8] = ones
    weights[1][4, 4] = ones
    plain, _ = reference.forward(x, weights, biases, "relu", "none", False)
    got = _forward((x, weights, biases), CONFIGS[dtype])
    assert torch.equal(got.isnan(), plain.isnan())
    assert torch.equal(got.isinf(), plain.isinf())


@on_hopper
@pytest.mark.gpu
def test_ways_that_cannot_be_built_are_refused() -> None:
    inputs = _inputs(8, (1280,) * 3, BF16)
    with pytest.raises(UnsupportedError, match="shared memory"):
        _forward(inputs, Launches(8, 1, 8, stages=16, x_blocks=64))
    with pytest.raises(UnsupportedError, match="16 bytes"):
        _forward(_inputs(8, (1281,) * 3, BF16), Launches(8, 1, 8))
