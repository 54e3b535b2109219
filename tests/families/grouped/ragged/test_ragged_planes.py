"""Ragged groups by planes against float64: CUDA C++ on a CPU, thread by thread, and on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.families.grouped.ragged import planes
from fastlinear.families.grouped.ragged.problem import problem
from fastlinear.kernels.cuda.ragged import ragged
from tests.families.grouped.ragged import judged
from tests.families.grouped.ragged.judged import ALL, check_neighbours, drawn
from tests.families.planes_places import PLACES, placed

SIZES = [
    ([70, 0, 129, 1], 200, 72, 130),
    ([0, 0, 5], 5, 3, 9),
    ([64, 128, 192], 400, 64, 64),
    ([33], 70, 40, 7),
    ([0, 0], 3, 8, 8),
]
"""Rows of groups, of all, features before and after."""


@pytest.fixture(params=PLACES, autouse=True)
def place(request: pytest.FixtureRequest) -> Iterator[None]:
    with placed(request.param):
        yield


def check(given: tuple[Tensor, ...], sizes: list[int], activation: str, *rest: Any) -> None:
    """Forward and backward, beside PyTorch's own operations, and float64."""
    judged.check(planes, given, sizes, activation, *rest)


@pytest.mark.parametrize("case", SIZES, ids=str)
def test_groups_of_any_size(case: tuple[list[int], int, int, int]) -> None:
    sizes, rows, k, n = case
    check(drawn(rows, len(sizes), k, n), sizes, "gelu")


@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid"])
def test_activations(activation: str) -> None:
    check(drawn(150, 3, 40, 72), [66, 3, 70], activation)


@pytest.mark.parametrize(
    "needs",
    [
        *((True, False, False), (False, True, False), (False, False, True)),
        *((True, False, True), (False, True, True)),
    ],
)
def test_what_is_wanted(needs: tuple[bool, bool, bool]) -> None:
    check(drawn(100, 2, 40, 72), [30, 66], "relu", needs)


def test_tensors_that_lie_turned() -> None:
    x, weight, bias, dy = drawn(100, 2, 40, 72)
    weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    x, dy = (t.t().contiguous().t() for t in (x, dy))
    check((x, weight, bias, dy), [30, 66], "none")


def test_sizes_of_64_bits_and_many_groups() -> None:
    sizes = [i % 3 for i in range(600)]
    counted = torch.tensor(sizes)
    check(drawn(sum(sizes) + 5, 600, 8, 8), sizes, "none", ALL, counted)


def test_long_groups_in_slices() -> None:
    check(drawn(1500, 2, 16, 24), [1400, 20], "none")


def test_sizes_that_do_not_fit_stay_inside() -> None:
    """Groups end where the rows do, and a size below 0 is none."""
    given = drawn(100, 3, 40, 72)
    check(given, [30, 0, 70], "none", ALL, torch.tensor([30, -5, 1 << 40]))
    check(given, [100, 0, 0], "none", ALL, torch.tensor([1 << 20, 7, 1]))


def test_where_groups_lie() -> None:
    rows, groups = 400, 3
    found = ragged(torch.tensor([129, 0, 64], dtype=torch.int32), rows)
    table = found.table.tolist()
    tiles = [table[4 * i : 4 * i + 4] for i in range(found.most_tiles)]
    behind = 4 * found.most_tiles
    blocks = [table[behind + 4 * i : behind + 4 * i + 4] for i in range(found.most_blocks)]
    assert table[-1] == 5
    assert tiles[:3] == [[0, 129, 0, 0], [128, 1, 0, 128], [129, 64, 2, 192]]
    assert tiles[3:5] == [[193, 207, -1, 0], [321, 79, -1, 0]]
    assert [b[:3] for b in blocks[:4]] == [[0, 129, 0], [64, 65, 0], [128, 1, 0], [129, 64, 2]]
    assert all(b[2] == -1 for b in blocks[4:])
    starts = table[behind + 4 * found.most_blocks :]
    assert starts[: groups + 1] == [0, 129, 129, 193]
    assert starts[groups + 1 : 2 * groups + 2] == [0, 3, 3, 4]


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 1, 3])
def test_numbers_without_planes_stay_in_their_group(which: int, value: float) -> None:
    """Of x, the weight and dy; the groups beside have the bits that they have without."""
    check_neighbours(planes, drawn(140, 3, 72, 40), [66, 40, 30], which, value)


def test_which_problems_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "why_no_hopper", lambda _: None)
    facts: Any = {"dtype": "float32", "device": "cuda", "precision": "highest"}
    p = problem("forward", 640, 8, 64, 64, **facts)
    assert planes.reason_not(p) is None
    for other in (
        replace(p, dtype="bfloat16"),
        replace(p, precision="high"),
        problem("forward", 64, 0, 64, 64, **facts),
        problem("forward", 0, 8, 64, 64, **facts),
        problem("step", 1 << 24, 8, 64, 64, **facts),
    ):
        assert planes.reason_not(other) is not None, other.describe()
