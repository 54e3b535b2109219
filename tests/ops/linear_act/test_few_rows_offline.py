"""The kernels of few rows compile for Hopper on a machine without a GPU, and stay in registers."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.linear_act import few_rows
from fastlinear.ops.linear_act.few_rows_config import Config, config_for, padded_rows

_SPEC = importlib.util.spec_from_file_location(
    "nvrtc_offline", Path(__file__).parents[1] / "nvrtc_offline.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
nvrtc = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(nvrtc)

F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
SIZES = [
    *((M, H, F32) for M in (2, 8, 16) for H in (128, 512, 1024, 4096)),
    *((M, H, BF16) for M in (8, 16, 32, 64) for H in (1024, 4096)),
]


def _frame(config: Config, dtype: torch.dtype, rows: int, K: int, activation: str) -> int:
    """Bytes of local memory."""
    text = few_rows.source(config, dtype, rows, K, activation, True)
    found = nvrtc.usage(text, "few_rows.cu", few_rows.ARCH)[few_rows.KERNEL]
    assert found.registers * config.threads <= 65_536
    return int(found.frame)


@pytest.mark.parametrize(("M", "H", "dtype"), SIZES, ids=str)
def test_every_chosen_configuration_stays_in_registers(M: int, H: int, dtype: torch.dtype) -> None:
    assert _frame(config_for(M, H, H, dtype), dtype, padded_rows(M, dtype), H, "relu") == 0


@pytest.mark.parametrize("dtype", [F32, FP16])
@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_stays_in_registers(activation: str, dtype: torch.dtype) -> None:
    assert _frame(config_for(8, 512, 512, dtype), dtype, 8, 512, activation) == 0
