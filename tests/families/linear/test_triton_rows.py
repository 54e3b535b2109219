"""Rows that Triton's kernels copy, and widen: under its CPU interpreter, and on a GPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted tests run in a process
of their own, started by ``test_under_the_interpreter``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fastlinear.core.compare import judge
from fastlinear.families.linear import reference
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.families.linear.triton import backend
    from fastlinear.kernels import row_tiles

pytestmark = pytest.mark.usefixtures("poisoned_triton")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@compares
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0, 1, 2])
@pytest.mark.parametrize("sizes", [(5, 7), (3, 1030), (33, 64), (1, 1), (17, 100)])
def test_copies_of_rows(sizes: tuple[int, int], offset: int, dtype: torch.dtype) -> None:
    m, k = sizes
    wide = torch.randn(m, k + 6, dtype=torch.float32).to(dtype).to(DEVICE)
    wide[:, -1] = float("nan")
    t = wide[:, offset : offset + k]
    for rows, columns in ((m, k), (m, k + 5), (m + 9, -(-k // 16) * 16), (max(1, m - 2), k)):
        got = backend.copy_rows(t[:rows], rows, columns)
        expected = torch.zeros(rows, columns, dtype=dtype, device=DEVICE)
        expected[:m, :k] = t[:rows]
        assert torch.equal(got, expected)
        assert got.is_contiguous()


@compares
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [(5, 7), (3, 130), (33, 64), (1, 1), (70, 100)])
def test_copies_of_rows_that_lie_across(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    m, k = sizes
    tall = torch.randn(k, m + 3, dtype=torch.float32).to(dtype).to(DEVICE)
    tall[:, -1] = float("nan")
    t = tall[:, 1 : m + 1].t()
    for columns in (k, k + 5, -(-k // 16) * 16, k + 100):
        expected = torch.zeros(m, columns, dtype=dtype, device=DEVICE)
        expected[:, :k] = t
        assert torch.equal(backend.copy_turned(t, columns), expected)


@compares
def test_memory_that_begins_anywhere_is_moved_by_what_it_allows() -> None:
    whole = torch.arange(130, dtype=torch.int16).to(DEVICE)
    for first in (0, 1, 2, 4):
        t = torch.from_dlpack(whole[first : first + 120].view(5, 24)).view(torch.float16)
        assert t.data_ptr() % backend._moved_at_once(t, 32).itemsize == 0
        got = backend.copy_rows(t, 5, 32).view(torch.int16)
        assert torch.equal(got[:, :24], t.view(torch.int16))
        assert not got[:, 24:].any()


@compares
def test_a_grid_ends_at_65535_on_its_second_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies, and gradients without a sum, may have more rows of blocks."""
    grids = []

    class Recorded:
        def __init__(self, kernel: Any, grid: tuple[int, ...], *_: Any, **__: Any) -> None:
            grids.append(grid)

        def __call__(self, *_: Any) -> None:
            pass

    monkeypatch.setattr(backend, "Launch", Recorded)
    rows = torch.empty(1, dtype=torch.float16, device=DEVICE).expand(1 << 19, 255)
    flat = torch.empty(1 << 19, 1, dtype=torch.float16, device=DEVICE)
    backend.copy_rows(flat[:, :1], 1 << 19, 16)
    backend._GradPre(rows, None, "none", False, 256)
    backend._GradPre(flat.expand(1 << 19, 1 << 10), None, "none", True)
    assert len(grids) == 3
    assert all(g[1] <= 65535 for g in grids if len(g) > 1)


@compares
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(300, 1), (517, 33), (1003, 16), (263, 415), (270, 1024)])
def test_rows_that_are_read_together(sizes: tuple[int, int], dtype: torch.dtype) -> None:
    """Every number and sum, where the last few rows are fewer than are read as one."""
    m, n = sizes
    assert m > row_tiles._FEW_ROWS
    drawn = [torch.randn(m, n, generator=torch.Generator().manual_seed(i)) for i in (1, 2)]
    dy, saved = (t.to(dtype).to(DEVICE) for t in drawn)
    for activation in ("silu", "none"):
        dpre, db = backend.grad_pre(dy, saved, activation, True)
        expected, sums = reference.grad_pre(dy.double(), saved.double(), activation, True)
        own = reference.grad_pre(dy, saved, activation, True)
        assert db is not None
        for name, got, plain, exact in zip(
            ("dpre", "db"), (dpre, db), own, (expected, sums), strict=True
        ):
            verdict = judge(name, got, plain, exact)
            assert verdict.passed, str(verdict)
        if n == 1:  # of one column the strides are any
            turned = backend.grad_pre(dy.t().contiguous().t(), saved, activation, True)
            assert turned[1] is not None
            assert torch.equal(turned[0], dpre)
            assert torch.equal(turned[1], db)
        alone, none = backend.grad_pre(dy, saved, activation, False)
        assert none is None
        assert torch.equal(alone, dpre)


@compares
@pytest.mark.parametrize("activation", ["none", "relu", "gelu_tanh"])
@pytest.mark.parametrize("sizes", [(5, 7), (300, 33), (1050, 514)])
def test_a_wider_grad_pre(sizes: tuple[int, int], activation: str) -> None:
    """The same numbers as grad_pre's, zeros beside them, dy itself left alone.

    The last size is of more parts of db than are summed at once, of two blocks of columns.
    """
    m, n = sizes
    if m > 1000 and activation != "none":  # its parts have half as many rows
        m //= 2
    dy, saved = (torch.randn(m, n, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    dy, saved = dy.to(DEVICE), saved.to(DEVICE)
    columns = -(-n // 16) * 16
    for need in (True, False):
        dpre, db = backend.wide_grad_pre(dy, saved, activation, need, columns)
        plain, plain_db = backend.grad_pre(dy, saved, activation, need)
        assert dpre is not None
        assert dpre.data_ptr() != dy.data_ptr()
        assert torch.equal(dpre[:, :n], plain)
        assert not dpre[:, n:].any()
        assert (db is None) is not need
        if db is not None:
            assert plain_db is not None
            torch.testing.assert_close(db, plain_db)
            verdict = judge("db", db, plain.sum(0), plain.double().sum(0))
            assert verdict.passed, str(verdict)
    assert backend.wide_grad_pre(dy, saved, activation, True, columns, False)[0] is None
