"""Weights streamed over all multiprocessors: layout and planning anywhere, the rest on Hopper."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import nvrtc_offline as offline
import pytest
import torch
from hopper_only import on_hopper
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.mlp import reference, whole_cuda, whole_stream
from fastlinear.ops.mlp.problem import problem
from fastlinear.ops.mlp.whole_cuda_config import make_stream, stream_for
from fastlinear.ops.mlp.whole_stream import KERNEL, Stream

CXX = shutil.which("c++")
BF16, F16 = torch.bfloat16, torch.float16

EVEN = [
    (768,) * 4,
    (896,) * 3,
    (1024,) * 4,
    (1152,) * 4,
    (1280,) * 3,
    (1536,) * 4,
    (2048,) * 5,
    (3072,) * 3,
    (4096,) * 3,
]
UNEVEN = [
    (784, 2048, 2048, 10),
    (1000, 1032, 8, 2056, 37),
    (4096, 1024, 4096),
    (1032, 1032, 1032),
    (72, 5000, 16, 1536, 1),
    (2048, 6144, 2048),
]
"""Inputs that are no whole tiles, layers of which clusters have no columns, odd last widths."""


# ---------------------------------------------------------------- anywhere


@pytest.mark.parametrize("widths", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 128])
def test_make_stream_is_buildable_and_covers_all_columns(
    widths: tuple[int, ...], rows: int
) -> None:
    stream = stream_for(widths, rows, 2) or make_stream(widths, rows)
    assert stream is not None
    assert stream.invalid(widths, rows) is None
    assert stream.tiles(widths) * 8 * stream.clusters >= max(widths[1:])
    assert stream.clusters * stream.cluster <= 120
    assert rows > 64 or stream.stages % 2 == 0, "a slot of the ring belongs to one warpgroup"


def test_stream_for_leaves_other_chains_alone() -> None:
    assert stream_for((2048,) * 9, 64, 4) is None
    wide = stream_for((1024,) * 9, 64, 2)
    assert wide is not None
    assert wide.cluster == 8
    assert stream_for((1024,) * 9, 32, 2) is not None
    assert stream_for((1024,) * 9, 65, 2) is not None
    assert stream_for((768,) * 9, 64, 2) is None
    assert stream_for((896,) * 9, 64, 2) is not None
    assert stream_for((1024, 1000, 1024), 16, 2) is None
    assert stream_for((2048,) * 2, 64, 2) is None
    assert stream_for((2048,) * 18, 64, 2) is None
    assert stream_for((2048,) * 9, 129, 2) is None
    assert stream_for((2048, 2052, 2048), 64, 2) is None
    assert stream_for((8192,) * 3, 64, 2) is None
    assert stream_for((7680,) * 3, 96, 2) is not None
    assert stream_for((6720,) * 3, 128, 2) is not None
    assert stream_for((6728,) * 3, 128, 2) is None


@pytest.mark.parametrize("width", [1024, 2048, 4096])
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 128])
def test_both_dtypes_are_shared_out_alike(width: int, rows: int) -> None:
    def sharings(dtype: torch.dtype) -> list[object]:
        call = whole_cuda._Call((width,) * 4, rows, dtype, ("relu", "none"), False, 0, 16)
        return list(whole_cuda._sharings(call))

    assert isinstance(sharings(BF16)[0], Stream)
    assert sharings(BF16) == sharings(F16)


@pytest.mark.parametrize(
    ("stream", "widths", "rows", "word"),
    [
        (Stream(4, 29, 8, 8), (4096,) * 18, 64, "layers"),
        (Stream(4, 29, 8, 8), (4096,) * 3, 129, "rows"),
        (Stream(4, 29, 8, 8), (4092,) * 3, 64, "16 bytes"),
        (Stream(16, 29, 8, 8), (4096,) * 3, 64, "cluster"),
        (Stream(4, 0, 8, 8), (4096,) * 3, 64, "cluster"),
        (Stream(4, 600, 8, 8), (4096,) * 3, 64, "column tiles"),
        (Stream(4, 20, 8, 8), (4096,) * 3, 64, "registers"),
        (Stream(4, 29, 8, 7), (4096,) * 3, 65, "registers"),
        (Stream(4, 29, 9, 8), (4096,) * 3, 64, "evenly"),
        (Stream(4, 29, 16, 8), (4096,) * 3, 64, "shared memory"),
    ],
)
def test_impossible_streams_are_named(
    stream: Stream, widths: tuple[int, ...], rows: int, word: str
) -> None:
    assert word in (stream.invalid(widths, rows) or "")


def test_first_layers_stay_in_the_cache() -> None:
    stream = Stream(4, 29, 8, 8)
    found = {n: stream.first_out((n,) * 9) for n in (1280, 2048, 3072, 4096, 6144)}
    assert found == {1280: 8, 2048: 4, 3072: 1, 4096: 1, 6144: 0}


def test_reason_not_knows_what_a_stream_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def reason(widths: tuple[int, ...], rows: int = 64, dtype: str = "bfloat16") -> str | None:
        return whole_cuda.reason_not(problem("forward", rows, widths, dtype=dtype, device="cuda"))

    assert reason((4096,) * 9) is None
    assert reason((4096,) * 9, 128, "float16") is None
    assert reason((784, 4096, 1000, 10)) is None
    assert "1024" in (reason((4096,) * 9, 129) or "")
    assert "1024" in (reason((4095, 4096, 10)) or "")
    assert "1024" in (reason((8192,) * 3) or "")


def _text(widths: tuple[int, ...], rows: int, dtype: torch.dtype = BF16, save: int = 0) -> str:
    stream = make_stream(widths, rows)
    assert stream is not None
    return whole_stream.source(stream, widths, rows, dtype, "gelu", "none", save)


def _run_on_host(tmp_path: Path, text: str, main: str) -> list[list[int]]:
    """What a main() prints that stands behind the source's constants and its way to share work."""
    macros = "".join(line + "\n" for line in text.splitlines() if line.startswith("#define"))
    parameters = text.index("struct Params")
    layout = text[text.index("constexpr int ROWS = 16") : text.index("// ---", parameters)]
    sharing = text[text.index("__device__ __host__") : text.index("// A published activation is")]
    file = tmp_path / "layout.cpp"
    file.write_text(
        "#include <algorithm>\n#include <cstdio>\nusing std::min;\ntypedef unsigned u32;\n"
        "#define __device__\n#define __host__\n#define __forceinline__ inline\n"
        "struct alignas(64) TensorMap { char bytes[128]; };\n"
        + macros.replace("#define MMA", "// MMA")
        + layout
        + sharing
        + main
    )
    subprocess.run([str(CXX), "-std=c++17", "-o", tmp_path / "layout", file], check=True)
    done = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True)
    return [[int(word) for word in line.split()] for line in done.stdout.splitlines()]


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("widths", [EVEN[-1], EVEN[2], UNEVEN[1]], ids=str)
@pytest.mark.parametrize("rows", [16, 64, 128])
def test_shared_memory_and_parameters_agree_with_the_source(
    tmp_path: Path, widths: tuple[int, ...], rows: int
) -> None:
    main = 'int main() { std::printf("%d %d\\n", SHARED_BYTES, (int)sizeof(Params)); }\n'
    ((shared, parameters),) = _run_on_host(tmp_path, _text(widths, rows), main)
    stream = make_stream(widths, rows)
    assert stream is not None
    assert shared == stream.shared_bytes(widths, rows)
    assert parameters == len(whole_stream._Params())


@pytest.mark.skipif(CXX is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("widths", [EVEN[0], EVEN[-1], *UNEVEN], ids=str)
@pytest.mark.parametrize("rows", [48, 80])
def test_every_column_has_one_cluster_and_all_of_k_is_multiplied(
    tmp_path: Path, widths: tuple[int, ...], rows: int
) -> None:
    main = (
        f"int main() {{\n  const int widths[] = {{{', '.join(map(str, widths))}}};\n"
        f"  for (int i = 0; i < {len(widths) - 1}; ++i)\n"
        "    for (int c = 0; c < CLUSTERS; ++c) {\n"
        "      const Columns own(widths[i + 1], c);\n"
        '      std::printf("%d %d %d %d\\n", i, own.first, own.tiles, steps_of(widths[i]));\n'
        "    }\n}\n"
    )
    stream = make_stream(widths, rows)
    assert stream is not None
    lines = _run_on_host(tmp_path, _text(widths, rows), main)
    for layer, (k, n) in enumerate(pairwise(widths)):
        columns: list[int] = []
        for at, first, tiles, steps in lines:
            if at == layer:
                columns += range(first, first + max(tiles, 0) * 8)
                assert steps % whole_stream.k_groups(rows) == 0
                assert 0 <= steps * stream.cluster * 64 - k < stream.cluster * 128
        assert columns == list(range(-(-n // 16) * 16))


def test_x_in_rows_becomes_operand_a() -> None:
    """After two exchanges among four lanes each has the words of k that it multiplies."""
    held = [[8 * t + 2 * j for j in range(4)] for t in range(4)]  # lane t, word j: first of two k
    for distance, sent in ((2, ((2, 3), (0, 1))), (1, ((1, 3), (0, 2)))):
        before = [list(words) for words in held]
        for lane in range(4):
            mine, other = bool(lane & distance), lane ^ distance
            for to, what in zip(sent[mine], sent[not mine], strict=True):
                held[lane][to] = before[other][what]
    for t in range(4):  # k, k + 8 of the first piece of 16, then of the second
        assert held[t] == [2 * t, 2 * t + 8, 2 * t + 16, 2 * t + 24]


@pytest.mark.parametrize("rows", [16, 64, 128])
def test_what_is_published_is_what_is_read(rows: int) -> None:
    """Words of every unit lie where the lanes that multiply look for their operand."""
    row_tiles = -(-rows // 16)
    seen = set()
    for column in range(0, 64, 8):
        for m in range(row_tiles):
            for lane in range(32):
                g, t = lane >> 2, lane & 3
                at = ((column >> 4) * row_tiles + m) * 512 + lane * 16 + (column >> 3 & 1) * 8
                for half in range(2):
                    word = at // 4 + half
                    block, rest = divmod(word, row_tiles * 128)
                    tile, rest = divmod(rest, 128)
                    reader, operand = divmod(rest, 4)
                    row = tile * 16 + (reader >> 2) + 8 * (operand & 1)
                    k = block * 16 + 2 * (reader & 3) + 8 * (operand >> 1)
                    assert (row, k) == (m * 16 + g + 8 * half, column + 2 * t)
                    seen.add(word)
    assert len(seen) == row_tiles * 16 * 64 // 2


@pytest.mark.parametrize(
    ("widths", "rows", "dtype", "save"),
    [
        ((4096,) * 3, 64, BF16, 0),
        ((4096,) * 3, 128, F16, 3),
        ((3072,) * 3, 64, F16, 1),
        ((2048,) * 3, 16, BF16, 4),
        ((7680,) * 3, 64, BF16, 0),
        ((1000, 4096, 4096, 10), 64, BF16, 3),
        ((1000, 4096, 4096, 10), 128, F16, 0),
        ((1000, 7680, 5000, 10), 40, BF16, 1),
    ],
    ids=str,
)
def test_compiles_without_spills(
    widths: tuple[int, ...], rows: int, dtype: torch.dtype, save: int
) -> None:
    text = _text(widths, rows, dtype, save)
    assert offline.usage(text, "whole_stream.cu")[KERNEL].frame == 0


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


def _stream(inputs: Inputs) -> Stream:
    x, weights, _ = inputs
    widths = (x.shape[1], *[w.shape[0] for w in weights])
    stream = make_stream(widths, x.shape[0])
    assert stream is not None
    return stream


def _forward(inputs: Inputs, stream: Stream | None = None) -> Tensor:
    config = stream or _stream(inputs)
    return whole_cuda.forward(*inputs, "relu", "none", False, config=config)[0]


def _assert_right(
    inputs: Inputs, activation: str, final: str, save: bool, stream: Stream | None = None
) -> None:
    x, weights, biases = inputs
    y, saved = whole_cuda.forward(
        x, weights, biases, activation, final, save, config=stream or _stream(inputs)
    )
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
@pytest.mark.parametrize("widths", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize("rows", [1, 33, 64, 65, 128])
def test_widths_and_rows(widths: tuple[int, ...], rows: int) -> None:
    dtype = F16 if rows in (33, 65) else BF16
    _assert_right(_inputs(rows, widths, dtype, "some"), "relu", "none", False)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize(("width", "rows"), [(1024, 16), (1024, 48), (2048, 64), (4096, 100)])
def test_sums_that_cancel(width: int, rows: int, dtype: torch.dtype) -> None:
    """Partial sums of hundreds, results near 1: what a block hands on has to carry their ends."""
    x, weights, biases = _inputs(rows, (width,) * 3, dtype, "no")
    sign = torch.ones(width, device="cuda")
    sign[width // 2 :] = -1
    x = (1 + 0.05 * x.float()).to(dtype)
    noise = [2.0**-9 * width**0.5 * w.float() for w in weights]
    weights = tuple((sign + part).to(dtype) for part in noise)
    call = x, weights, biases, "none", "none", False
    got = whole_cuda.forward(*call)[0]
    exact = [t.double() for t in (x, *weights)]
    oracle = reference.forward(exact[0], tuple(exact[1:]), biases, "none", "none", False)[0]
    verdict = judge("y", got, reference.forward(*call)[0], oracle)
    assert verdict.passed, str(verdict)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("widths", [(1280,) * 4, (72, 1400, 1288, 37)], ids=str)
def test_every_activation_and_what_the_backward_reads(
    activation: str, widths: tuple[int, ...]
) -> None:
    _assert_right(_inputs(33, widths, BF16), activation, "silu", True)
    _assert_right(_inputs(70, widths, F16), "relu", activation, True)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(
    "stream",
    [
        Stream(8, 15, 6, 2),
        Stream(2, 60, 8, 4),
        Stream(4, 9, 4, 1),
        Stream(4, 30, 24, 3),
        Stream(4, 28, 8, 3, 2),
    ],
    ids=str,
)
def test_every_way_of_sharing(stream: Stream) -> None:
    for widths in ((1536,) * 4, (1000, 1536, 24, 1040)):
        _assert_right(_inputs(50, widths, BF16), "relu", "none", False, stream)


@on_hopper
@pytest.mark.gpu
def test_where_x_and_weights_lie() -> None:
    x, weights, biases = _inputs(50, (1280,) * 4, BF16)
    want = _forward((x, weights, biases))
    for length, start in ((1304, 16), (1304, 2), (1289, 0)):  # the last two are copied
        wide = torch.full((50, length), torch.nan, device="cuda", dtype=BF16)
        wide[:, start : start + 1280] = x
        assert torch.equal(_forward((wide[:, start : start + 1280], weights, biases)), want)
    off = tuple(torch.cat([w.flatten()[:1], w.flatten()])[1:].view_as(w) for w in weights)
    assert off[0].data_ptr() % 16
    assert torch.equal(_forward((x, off, biases)), want)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(1280,) * 5, (1000, 2048, 24, 1040, 7)], ids=str)
@pytest.mark.parametrize("rows", [64, 128])
def test_ten_thousand_launches_are_bit_equal(widths: tuple[int, ...], rows: int) -> None:
    inputs = _inputs(rows, widths, BF16)
    first = _forward(inputs)
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    for _ in range(10_000 if rows == 64 else 2_000):
        differs |= (_forward(inputs) != first).any()
    assert not differs


@on_hopper
@pytest.mark.gpu
def test_beside_another_stream_that_fills_the_device() -> None:
    inputs = _inputs(64, (2048,) * 5, BF16)
    want = _forward(inputs)
    differs = torch.zeros((), device="cuda", dtype=torch.bool)
    busy, other = torch.randn(4096, 4096, device="cuda", dtype=BF16), torch.cuda.Stream()
    for _ in range(300):
        with torch.cuda.stream(other):
            torch.mm(busy, busy)
        differs |= (_forward(inputs) != want).any()
    torch.cuda.synchronize()
    assert not differs


@on_hopper
@pytest.mark.gpu
def test_launches_of_other_inputs_on_one_workspace_and_on_several_streams() -> None:
    """Buffers that an earlier launch filled are never taken for this one's."""
    sets = [_inputs(rows, (1536,) * 6, BF16) for rows in (64, 63, 62)]
    stream = _stream(sets[0])
    wants = [_forward(inputs, stream) for inputs in sets]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    wrong = [torch.zeros((), device="cuda", dtype=torch.bool) for _ in streams]
    for turn in range(300):
        for i, other in enumerate(streams):
            with torch.cuda.stream(other):
                which = (turn + i) % 3
                wrong[i] |= (_forward(sets[which], stream) != wants[which]).any()
    torch.cuda.synchronize()
    assert not any(bool(w) for w in wrong)


@on_hopper
@pytest.mark.gpu
def test_graphs_weights_written_just_before_and_weights_elsewhere() -> None:
    x, weights, biases = _inputs(64, (1536,) * 4, BF16)
    others = _inputs(64, (1536,) * 4, BF16, seed=1)[1]
    want = [_forward((x, w, biases)) for w in (weights, others)]
    held = tuple(w.clone() for w in weights)

    def calls() -> list[Tensor]:
        made = []
        for source in (others, weights, others):
            for to, new in zip(held, source, strict=True):
                to.copy_(new)
            made.append(_forward((x, held, biases)))
        return [*made, _forward((x, others, biases))]

    for _ in range(20):
        for got, i in zip(calls(), (1, 0, 1, 1), strict=True):
            assert torch.equal(got, want[i])
    graphs = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            graphs.append((graph, calls()))
    for _ in range(20):
        for graph, made in graphs:
            graph.replay()
            for got, i in zip(made, (1, 0, 1, 1), strict=True):
                assert torch.equal(got, want[i])


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("widths", [(1280,) * 4, (1000, 1288, 1032, 9)], ids=str)
@pytest.mark.parametrize("rows", [20, 90])
def test_nan_and_infinity_do_not_hang_and_go_through(
    widths: tuple[int, ...], rows: int, dtype: torch.dtype
) -> None:
    x, weights, biases = _inputs(rows, widths, dtype)
    x[1, 5] = torch.nan
    x[2, 7] = torch.inf
    if dtype == F16:
        x[4] = torch.finfo(dtype).max  # so that hidden activations overflow
    ones = torch.tensor(-1, dtype=torch.int16, device="cuda").view(dtype)  # a NaN of all bits
    x[3, 8] = ones
    plain, _ = reference.forward(x, weights, biases, "relu", "none", False)
    assert torch.equal(_forward((x, weights, biases)).isnan(), plain.isnan())
    assert torch.equal(_forward((x, weights, biases)).isinf(), plain.isinf())
    weights[1][4, 4] = ones
    plain, _ = reference.forward(x, weights, biases, "relu", "none", False)
    assert torch.equal(_forward((x, weights, biases)).isfinite(), plain.isfinite())


@on_hopper
@pytest.mark.gpu
def test_what_a_call_takes_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = _inputs(40, (2048, 4096, 2048), BF16)
    want = _forward(inputs)
    assert torch.equal(whole_cuda.forward(*inputs, "relu", "none", False)[0], want)
    whole_cuda._plans.clear()
    monkeypatch.setattr(driver.Launch, "max_clusters", lambda _: 0)
    for _ in range(2):  # no room for all blocks
        found = whole_cuda.forward(*inputs, "relu", "none", False)[0]
        assert torch.equal(found, reference.forward(*inputs, "relu", "none", False)[0])
    whole_cuda._roomless.clear()


@on_hopper
@pytest.mark.gpu
def test_streams_that_cannot_be_built_are_refused() -> None:
    inputs = _inputs(8, (1280,) * 3, BF16)
    stream = _stream(inputs)
    with pytest.raises(UnsupportedError, match="shared memory"):
        _forward(inputs, replace(stream, stages=200))
    with pytest.raises(UnsupportedError, match="at once"):
        _forward(inputs, replace(stream, clusters=60))
    with pytest.raises(UnsupportedError, match="16 bytes"):
        _forward(_inputs(8, (1281,) * 3, BF16), stream)
    with pytest.raises(UnsupportedError, match="16-bit"):
        _forward(_inputs(8, (1280,) * 3, torch.float32), stream)
