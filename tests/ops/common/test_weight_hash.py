"""The digest of a weight: its formula, every change, every layout, any number of threads."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from fastlinear.ops.common import weight_hash
from fastlinear.ops.common.weight_hash import digest

WHY = weight_hash.why_not_loaded()
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
PRIME = 2**61 - 1
WORDS, BLOCK, PIECE = 512, 4096, 65536


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def by_definition(rows: list[bytes], keys: bytes) -> tuple[int, int, int]:
    """The digest of rows of bytes as the C++ file's comment defines it."""
    numbers = struct.unpack(f"<{2 * WORDS + 2}Q", keys)
    found, total = [], 0
    for s in (0, 1):
        key, base, poly = numbers[s * WORDS :], numbers[2 * WORDS + s] % PRIME, 0
        for row in rows:
            for at in range(0, len(row), BLOCK):
                block = row[at : at + BLOCK]
                block += bytes(-len(block) % 256)
                words = struct.unpack(f"<{len(block) // 8}Q", block)
                nh = 0
                for w, k in zip(words, key, strict=False):
                    low = (w + k) % 2**32
                    nh += low * (((w >> 32) + (k >> 32)) % 2**32)
                    total += w if s == 0 else 0
                nh %= 2**64
                poly = ((poly * base + (nh >> 32)) * base + nh % 2**32) % PRIME
        found.append(poly)
    return total % 2**64, found[0], found[1]


def bytes_of(matrix: Tensor) -> list[bytes]:
    return [bytes(row.contiguous().view(torch.uint8).numpy()) for row in matrix]


@pytest.mark.skipif(sys.byteorder != "little", reason="words are read as they lie")
@pytest.mark.parametrize("columns", [1024, 1000, 512, 40, 16500])
def test_is_what_it_says(columns: int) -> None:
    keys = weight_hash._keys()
    weight = torch.randn(5, columns + 3)
    assert digest(weight[:, :columns]) == by_definition(bytes_of(weight[:, :columns]), keys)
    dense = weight[:, :columns].contiguous()
    assert digest(dense) == by_definition([b"".join(bytes_of(dense))], keys)


@pytest.mark.parametrize("columns", [1, 2, 7, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_bit(columns: int, dtype: torch.dtype) -> None:
    weight = torch.randn(3, columns).to(dtype)
    raw, before = weight.view(torch.uint8).view(-1), digest(weight)
    seen = {before}
    for at in range(raw.numel()):
        for bit in range(8):
            raw[at] ^= 1 << bit
            seen.add(digest(weight))
            raw[at] ^= 1 << bit
    assert len(seen) == 1 + 8 * raw.numel()
    assert digest(weight) == before


def test_every_place_of_a_large_weight() -> None:
    """One bit at each of 3 000 places over several pieces, the last one not whole."""
    weight = torch.randn(301, 257)
    raw, before = weight.view(-1).view(torch.uint8), digest(weight)
    assert raw.numel() > 4 * PIECE
    for at in [*range(0, raw.numel(), 103), raw.numel() - 1]:
        raw[at] ^= 1
        assert digest(weight)[0] != before[0]
        raw[at] ^= 1


def swap(a: Tensor, b: Tensor) -> None:
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


PERMUTATIONS: dict[str, Callable[[Tensor], object]] = {
    "rows": lambda w: swap(w[1], w[200]),
    "neighbouring rows": lambda w: swap(w[10], w[11]),
    "rolled rows": lambda w: w.copy_(w.roll(1, 0)),
    "columns": lambda w: swap(w[:, 3], w[:, 1001]),
    "pairs of columns": lambda w: swap(w[:, 0:2], w[:, 2:4]),
    "pieces": lambda w: swap(w[:16], w[16:32]),
    "words": lambda w: swap(w[0, 0:2], w[0, 128:130]),
    "transposed": lambda w: w[:, :256].copy_(w[:, :256].t().clone()),
    "all signs": lambda w: w.neg_(),
    "two signs": lambda w: w[5, 1:6:4].neg_(),
    "signs a vector apart": lambda w: w[5, 1:34:32].neg_(),
    "all by two": lambda w: w.mul_(2),
    "zeros of half": lambda w: w[:128].zero_(),
}


@pytest.mark.parametrize("name", PERMUTATIONS)
def test_permutations_and_changes_that_sums_miss(name: str) -> None:
    weight = torch.randn(256, 1024)
    before = digest(weight)
    PERMUTATIONS[name](weight)
    assert digest(weight)[1] != before[1]
    assert digest(weight)[2] != before[2]


@pytest.mark.parametrize("name", ["words", "rows", "pieces", "pairs of columns"])
def test_permutations_need_keys_of_their_place(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One key for all places and base 1: these very permutations go unseen."""
    keys = struct.pack(f"<{2 * WORDS + 2}Q", *[12345678901234567] * 2 * WORDS, 1, 1)
    monkeypatch.setattr(weight_hash, "_keys", lambda: keys)
    weight = torch.randn(256, 1024)
    before = digest(weight)
    PERMUTATIONS[name](weight)
    assert digest(weight) == before


def test_order_of_blocks_needs_a_base(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = os.urandom(16 * WORDS) + struct.pack("<2Q", 1, 1)
    monkeypatch.setattr(weight_hash, "_keys", lambda: keys)
    weight = torch.randn(256, 1024)
    before = digest(weight)
    PERMUTATIONS["rows"](weight)  # each is a block
    assert digest(weight) == before
    PERMUTATIONS["words"](weight)
    assert digest(weight) != before


def layouts(base: Tensor) -> dict[str, Tensor]:
    """Views of a (70, 300) matrix."""
    return {
        "dense": base,
        "turned": base.t(),
        "rows": base[3:60],
        "columns": base[:, 5:211],
        "turned columns": base[:, 5:211].t(),
        "every second row": base[::2],
        "every second column": base[:, ::2],
        "one column": base[:, 7:8],
        "one row": base[9:10, 3:],
        "one row of turned": base.t()[4:5],
        "expanded": base[2:3].expand(40, 300),
    }


@pytest.mark.parametrize("name", layouts(torch.empty(70, 300)))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reads_all_of_the_weight_and_nothing_else(name: str, dtype: torch.dtype) -> None:
    base = torch.randn(70, 300).to(dtype)
    weight = layouts(base)[name]
    before = digest(weight)
    inside = torch.zeros_like(base)
    layouts(inside)[name].fill_(1) if name != "expanded" else inside[2].fill_(1)
    base[inside == 0] = 7.0
    assert digest(weight) == before
    n, k = weight.shape
    for i, j in [(0, 0), (n - 1, k - 1), (n // 2, k // 3), (0, k - 1), (n - 1, 0)]:
        kept = weight[i, j].clone()
        weight[i, j] = 3.25
        assert digest(weight) != before
        weight[i, j] = kept
        assert digest(weight) == before


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0, 0)])
def test_empty(shape: tuple[int, int]) -> None:
    assert digest(torch.empty(shape)) == (0, 0, 0)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("shape", [(1, 3), (700, 300), (33, 16385)])
def test_any_number_of_threads(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape)
    wide = torch.zeros(shape[0], shape[1] + 5)
    wide[:, : shape[1]] = weight
    found = set()
    for count in (1, 2, 3, 8):
        torch.set_num_threads(count)
        found.add((digest(weight), digest(wide[:, : shape[1]]), digest(weight.t())))
    assert len(found) == 1


def test_keys_differ_between_processes() -> None:
    code = (
        "import torch; from fastlinear.ops.common import weight_hash as h;"
        "print(h.digest(torch.ones(4, 4))[1:])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
        ).stdout
        for _ in range(2)
    }
    assert len(said) == 2


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("threads")
def test_in_a_forked_process() -> None:
    torch.set_num_threads(2)
    weight = torch.randn(600, 600)
    before = digest(weight)
    child = os.fork()
    if child == 0:
        os._exit(0 if digest(weight) == before else 1)
    assert os.waitpid(child, 0)[1] == 0
