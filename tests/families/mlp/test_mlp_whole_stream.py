"""Weights streamed over all multiprocessors: layout and planning."""

from __future__ import annotations

import shutil
import subprocess
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from fastlinear.families.mlp.cuda import stream as whole_stream
from fastlinear.families.mlp.cuda.choice import best
from fastlinear.families.mlp.cuda.stream import KERNEL, Stream
from tests.families import nvrtc_offline as offline
from tests.families.mlp.stream_chains import EVEN, UNEVEN

CXX = shutil.which("c++")
BF16, F16 = torch.bfloat16, torch.float16


def _stream(widths: tuple[int, ...], rows: int) -> Stream:
    found = best("stream", widths, rows, 2)
    assert isinstance(found, Stream)
    return found


@pytest.mark.parametrize("widths", EVEN + UNEVEN, ids=str)
@pytest.mark.parametrize("rows", [1, 16, 33, 64, 65, 128])
def test_what_is_chosen_can_be_built_and_covers_all_columns(
    widths: tuple[int, ...], rows: int
) -> None:
    stream = _stream(widths, rows)
    assert stream.invalid(widths, rows) is None
    assert stream.tiles(widths) * 8 * stream.clusters >= max(widths[1:])
    assert stream.clusters * stream.cluster <= 120
    assert rows > 64 or stream.stages % 2 == 0, "a slot of the ring belongs to one warpgroup"


def test_other_chains_have_no_stream() -> None:
    assert best("stream", (2048,) * 9, 64, 4) is None
    assert best("stream", (2048,) * 2, 64, 2) is None
    assert best("stream", (2048,) * 18, 64, 2) is None
    assert best("stream", (2048,) * 9, 129, 2) is None
    assert best("stream", (2048, 2052, 2048), 64, 2) is None
    assert best("stream", (32768,) * 3, 64, 2) is None
    assert best("stream", (7680,) * 3, 96, 2) is not None
    assert best("stream", (6720,) * 3, 128, 2) is not None


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


def _text(widths: tuple[int, ...], rows: int, dtype: torch.dtype = BF16, save: int = 0) -> str:
    stream = _stream(widths, rows)
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
    stream = _stream(widths, rows)
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
    stream = _stream(widths, rows)
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
    assert offline.usage(text, "stream.cu")[KERNEL].frame == 0
