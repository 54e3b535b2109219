"""How passes over rows are cut into tiles."""

from __future__ import annotations

from itertools import product

import pytest

from fastlinear.kernels.row_tiles import row_tiles

UNITS = 132


@pytest.mark.parametrize("dense", [True, False])
def test_tiles_cover_all_numbers(dense: bool) -> None:
    for m, n in product((1, 3, 17, 100, 4099, 1 << 20), (1, 7, 16, 33, 100, 1365, 4096, 20001)):
        t = row_tiles(m, n, 2, dense)
        assert (t.rows - 1) * t.columns + t.last == m * n
        assert 0 < t.last <= t.columns
        assert t.across * t.block_n >= t.columns
        assert t.down * t.block_m >= t.rows
        for rows in (t.chunk_rows(UNITS), t.least_chunk):
            assert rows % t.block_m == 0
            assert -(-t.rows // rows) < 2**16


def test_rows_begin_where_loads_are_wide() -> None:
    """Unless there are no more rows than it takes."""
    for n in (1, 7, 33, 63, 100, 1365, 3413):
        t = row_tiles(5000, n, 2)
        assert t.unit == 8
        assert t.columns % 8 == 0
        assert t.fold * n == t.columns


def test_few_threads_have_no_number() -> None:
    for n in (1, 13, 14, 16, 33, 63, 100, 256, 373, 384, 576, 1000, 1365, 6656):
        t = row_tiles(100_000, n, 4)
        assert t.across * t.block_n <= 1.2 * t.columns


def test_rows_apart_are_read_one_by_one() -> None:
    assert row_tiles(5000, 33, 4, dense=False).fold == 1


def test_a_program_adds_up_rows_only_where_it_has_them() -> None:
    assert row_tiles(5000, 16, 2).added == row_tiles(5000, 16, 2).fold > 1
    wide = row_tiles(5000, 1365, 2)
    assert (wide.fold, wide.added) == (8, 1)


def test_chunks_fill_the_device() -> None:
    t = row_tiles(1 << 20, 1024, 4)
    assert UNITS < -(-t.rows // t.chunk_rows(UNITS)) <= 8 * UNITS
