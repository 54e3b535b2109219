"""The kernels of few rows compile for Hopper on a machine without a GPU, and stay in registers."""

from __future__ import annotations

from random import Random

import pytest
import torch

from fastlinear.activations.reference import NAMES
from fastlinear.calibration.drawn import width
from fastlinear.families.linear.cuda import few_rows
from fastlinear.families.linear.cuda.few_rows_config import (
    Config,
    config_for,
    padded_rows,
    reason_not,
)
from tests.families import nvrtc_offline as nvrtc

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


def _frame(config: Config, dtype: torch.dtype, rows: int, K: int, activation: str) -> int:
    """Bytes of local memory."""
    text = few_rows.source(config, dtype, rows, K, activation, True)
    found = nvrtc.usage(text, "few_rows.cu", few_rows.ARCH)[few_rows.KERNEL]
    assert found.registers * config.threads <= 65_536
    return int(found.frame)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("M", [1, 4, 11, 16, 32, 64])
def test_chosen_configurations_stay_in_registers(M: int, dtype: torch.dtype) -> None:
    """Each kernel that drawn layers take; the compiler may round away four registers."""
    draw, seen = Random(M), set()
    for _ in range(60):
        K, N = (max(8, width(draw) // 8 * 8) for _ in range(2))
        if reason_not(M, K, N, dtype, (K, 1), (K, 1), (9, 0)) is None:
            config = config_for(M, K, N, dtype)
            for activation in ("relu", "gelu")[: 2 if dtype is F32 else 1]:  # without a call, with
                kernel = few_rows.source(config, dtype, padded_rows(M, dtype), K, activation, True)
                if kernel not in seen and len(seen) < 16:
                    seen.add(kernel)
                    assert _frame(config, dtype, padded_rows(M, dtype), K, activation) <= 16, config


@pytest.mark.parametrize("dtype", [F32, FP16])
@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_stays_in_registers(activation: str, dtype: torch.dtype) -> None:
    assert _frame(config_for(8, 512, 512, dtype), dtype, 8, 512, activation) == 0
