"""The kernels of few rows compile for Hopper on a machine without a GPU, and stay in registers."""

from __future__ import annotations

import pytest
import torch

from fastlinear.activations.reference import NAMES
from fastlinear.families.linear.cuda import few_rows
from fastlinear.families.linear.cuda.few_rows_config import (
    _HALF,
    _SINGLE,
    Config,
    SingleConfig,
    config_for,
    padded_rows,
)
from tests.families import nvrtc_offline as nvrtc

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
HALF_SIZES = [(rows, *size) for rows, sizes in _HALF.items() for size in sizes]


def _frame(config: Config, dtype: torch.dtype, rows: int, K: int, activation: str) -> int:
    """Bytes of local memory."""
    text = few_rows.source(config, dtype, rows, K, activation, True)
    found = nvrtc.usage(text, "few_rows.cu", few_rows.ARCH)[few_rows.KERNEL]
    assert found.registers * config.threads <= 65_536
    return int(found.frame)


@pytest.mark.parametrize(("M", "K", "N"), HALF_SIZES, ids=str)
def test_chosen_half_configurations_stay_in_registers(M: int, K: int, N: int) -> None:
    assert _frame(config_for(M, K, N, BF16), BF16, padded_rows(M, BF16), K, "relu") == 0


@pytest.mark.parametrize(
    ("rows", "features"), [(rows, features) for rows in _SINGLE for features in _SINGLE[rows]]
)
def test_chosen_single_configurations_stay_in_registers(rows: int, features: int) -> None:
    """Each with one span and with more, which are two kernels."""
    span = _SINGLE[rows][features].span
    for K, many in ((span, False), (span + 4, True)):
        config = config_for(rows, K, max(1, features**2 // K), F32)
        assert isinstance(config, SingleConfig)
        assert config.many(K) == many
        for activation in ("relu", "gelu"):  # with and without a call
            assert _frame(config, F32, rows, K, activation) == 0


@pytest.mark.parametrize("dtype", [F32, FP16])
@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_stays_in_registers(activation: str, dtype: torch.dtype) -> None:
    assert _frame(config_for(8, 512, 512, dtype), dtype, 8, 512, activation) == 0
