"""gemm.cu compiles for Hopper on a machine without a GPU, and keeps everything in registers."""

from __future__ import annotations

import pytest
import torch

from fastlinear.activations import reference
from fastlinear.activations.reference import NAMES
from fastlinear.families.linear.cuda import gemm, gemm_config
from tests.families import nvrtc_offline as nvrtc

BF16, FP16 = torch.bfloat16, torch.float16
CONFIGS = [config for config, *_ in gemm_config._CANDIDATES]


def _frame(text: str) -> int:
    """Bytes of local memory."""
    found = nvrtc.usage(text, "gemm.cu", gemm.ARCH)["linear_act_gemm"]
    assert found.registers <= 168, "384 threads share 65536 registers"
    return found.frame


@pytest.mark.parametrize("save_pre", [False, True])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_stays_in_registers(config: gemm_config.Config, save_pre: bool) -> None:
    assert _frame(gemm.source(config, BF16, "gelu_tanh", True, save_pre)) == 0


@pytest.mark.parametrize("activation", NAMES)
def test_every_activation_stays_in_registers(activation: str) -> None:
    most = 8 if activation == "sine" else 0  # around the call for what is large
    for save in {False, reference.activation(activation).saved == "pre"}:
        assert _frame(gemm.source(CONFIGS[0], BF16, activation, True, save)) <= most


@pytest.mark.parametrize(("a_mn", "b_mn"), [(False, True), (True, False), (True, True)])
def test_every_layout_stays_in_registers(a_mn: bool, b_mn: bool) -> None:
    assert _frame(gemm.source(CONFIGS[0], FP16, "gelu", True, True, a_mn, b_mn)) == 0


@pytest.mark.parametrize("activation", ["gelu_tanh", "gelu", "silu"])
def test_odd_rows_stay_in_registers(activation: str) -> None:
    for save in (False, True):
        most = 8 if activation == "gelu" and save else 0
        text = gemm.source(CONFIGS[0], BF16, activation, True, save, direct=True)
        assert _frame(text) <= most
    for a_mn, b_mn in ((False, True), (True, True)):  # as both gradients' operands lie
        assert _frame(gemm.source(CONFIGS[0], BF16, "none", False, False, a_mn, b_mn, True)) == 0


def test_a_spill_is_seen() -> None:
    """An array indexed at run time goes to local memory; the check must notice."""
    text = """
    extern "C" __global__ void spills(int* p, int n) {
      int a[64];
      for (int i = 0; i < 64; ++i) a[i] = p[i * n];
      for (int i = 0; i < n; ++i) a[p[i] & 63] += i;
      p[n] = a[n & 63];
    }
    """
    assert nvrtc.usage(text, "spills.cu")["spills"].frame >= 256
