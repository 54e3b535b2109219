"""columns.cu: the column sums of many rows in one launch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.families.linear.cuda import columns
from tests.families import nvrtc_offline as nvrtc
from tests.families.hopper_only import on_hopper

BF16, FP16 = torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("N", [768, 2048, 4096])
def test_it_stays_in_registers(dtype: torch.dtype, N: int) -> None:
    shape = columns.shape_for(N)
    text = columns.source(dtype, shape)
    used = nvrtc.usage(text, "columns.cu", columns.ARCH)["linear_act_columns"]
    assert used.frame == 0
    assert used.registers * shape[1] <= 65536


def test_many_rows_of_few_columns_are_left_to_triton() -> None:
    assert not columns.pays(100_000, 64)
    assert not columns.pays(120_000, 8)
    assert all(columns.pays(m, n) for m, n in [(2048, 8), (2048, 512), (40_000, 1024)])


def test_large_blocks_are_of_few_columns() -> None:
    assert columns.shape_for(1024)[1] > columns.shape_for(2048)[1]


def test_it_serves_no_cpu_tensor() -> None:
    assert not columns.serves(torch.ones(4096, 64, dtype=BF16))


def _draw(M: int, N: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(M)
    return torch.randn(M, N, device="cuda", generator=generator).to(dtype)


def _sums(dy: Tensor) -> Tensor:
    db = torch.full((dy.shape[1],), torch.nan, device="cuda", dtype=dy.dtype)
    columns.ColumnSums(dy).run(dy, None, None, db)
    return db


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    ("M", "N"), [(2048, 8), (2051, 200), (8192, 768), (8192, 2048), (4099, 3080)]
)
def test_against_float64(dtype: torch.dtype, M: int, N: int) -> None:
    dy = _draw(M, N, dtype)
    assert columns.serves(dy)
    db = _sums(dy)
    assert db.isfinite().all(), "not every element was written"
    verdict = judge("db", db, dy.sum(0), dy.double().sum(0))
    assert verdict.passed, str(verdict)


@on_hopper
@pytest.mark.gpu
def test_rows_may_be_strided_and_runs_are_bit_equal() -> None:
    dy = _draw(4096, 1032, BF16)
    wide = torch.full((4096, 1048), torch.nan, device="cuda", dtype=BF16)
    wide[:, 8:1040] = dy
    assert columns.serves(wide[:, 8:1040])
    assert not columns.serves(wide[:, 4:1036]), "rows off 16 bytes"
    first = _sums(dy)
    for _ in range(20):
        assert torch.equal(_sums(wide[:, 8:1040]), first)


@on_hopper
@pytest.mark.gpu
def test_grad_pre_takes_it_where_dpre_is_dy() -> None:
    from fastlinear.families.linear.triton import backend

    dy = _draw(4096, 768, BF16)
    dpre, db = backend.grad_pre(dy, None, "none", True)
    assert dpre is dy
    assert db is not None
    assert torch.equal(db, _sums(dy))
