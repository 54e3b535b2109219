"""The kernel for strips of narrow groups: against float64 on a GPU, its compilation anywhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.ops.common import cuda_driver
from fastlinear.ops.common.activations import NAMES as ACTIVATIONS
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import reference, strips
from fastlinear.ops.grouped_linear.problem import problem
from fastlinear.ops.grouped_linear.strips import StripsConfig

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU"),
]
SIZES = ((8, 100, 100), (4, 100, 200), (8, 64, 64), (16, 32, 32), (8, 20, 36), (8, 106, 50))


def drawn(m: int, groups: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(1, m, groups, k, device="cuda").to(dtype)
    weight = (torch.randn(groups, n, k, device="cuda") / k**0.5).to(dtype)
    return x, weight, torch.randn(groups, n, device="cuda").to(dtype)


def check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: StripsConfig | None
) -> None:
    save = activation_of(activation).saved == "pre"
    torch.full((1 << 20,), float("nan"), device="cuda", dtype=x.dtype)  # what new memory holds
    assert strips.serves(x, weight, bias, "tokens")
    rest = (activation, save, "tokens")
    found = strips.forward(x, weight, bias, *rest, config=config)
    theirs = reference.forward(x, weight, bias, *rest)
    wide = None if bias is None else bias.double()
    oracle = reference.forward(x.double(), weight.double(), wide, *rest)
    for name, a, t, o in zip(("y", "pre"), found, theirs, oracle, strict=True):
        assert (a is None) == (t is None)
        if a is not None and t is not None and o is not None:
            verdict = judge(name, a, t, o)
            assert verdict.passed, str(verdict)
    again = strips.forward(x, weight, bias, *rest, config=config)[0]
    assert torch.equal(found[0], again)


class TestOnHopper:
    pytestmark = on_hopper

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            x, weight, bias = drawn(65, 8, 100, 100, dtype)
            check(x, weight, None if activation == "tanh" else bias, activation, None)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int]) -> None:
        for m in (1, 33, 300, 4000):
            check(*drawn(m, *sizes, torch.bfloat16), "silu" if m == 33 else "relu", None)

    @pytest.mark.parametrize(
        "config", [StripsConfig(4, 2, 4, 1, 1, 2), StripsConfig(4, 4, 2, 1, 2, 1)], ids=str
    )
    def test_configurations(self, config: StripsConfig) -> None:
        check(*drawn(700, 8, 100, 100, torch.bfloat16), "relu", config)

    def test_rows_further_apart_than_they_are_long(self) -> None:
        memory = torch.full((300, 832), float("nan"), device="cuda", dtype=torch.bfloat16)
        x, weight, bias = drawn(300, 8, 100, 100, torch.bfloat16)
        memory[:, :800] = x.view(300, 800)
        check(memory[:, :800].view(1, 300, 8, 100), weight, bias, "relu", None)

    def test_bad_numbers_stay_in_their_group(self) -> None:
        x, weight, _ = drawn(70, 8, 100, 100, torch.bfloat16)
        x[:, :, 1] = float("nan")
        weight[2] = float("inf")
        y, _ = strips.forward(x, weight, None, "none", False, "tokens")
        assert y[:, :, 1].isnan().all()
        others = [0, 3, 4, 5, 6, 7]
        assert y[:, :, others].isfinite().all()

    def test_what_it_does_not_take_goes_to_triton(self) -> None:
        x, weight, bias = drawn(40, 8, 100, 100, torch.bfloat16)
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert not strips.serves(x, turned, bias, "tokens")
        found, _ = strips.forward(x, turned, bias, "relu", False, "tokens")
        expected, _ = strips.forward(x, weight, bias, "relu", False, "tokens")
        torch.testing.assert_close(found, expected)


def test_configurations_fit_the_chip() -> None:
    for groups, k, n in SIZES:
        for save_pre in (False, True):
            config = strips.strips_config(groups, k, n, save_pre)
            assert config is not None
            assert config.groups * k % 8 == config.groups * n % 8 == 0
            assert groups % config.groups == 0
            shared = strips.shared_bytes(config, k, n, save_pre)
            assert shared <= 227 * 1024
            assert (shared + 1280) * config.blocks <= 228 * 1024
    assert strips.strips_config(3, 10, 10, False) is None
    assert strips.strips_config(4, 7, 8, False) is None


def test_reasons_are_given() -> None:
    p = problem("forward", 64, 8, 100, 100, dtype="bfloat16", device="cpu")
    assert strips.reason_not(p) == "its kernel runs on CUDA devices only"


def test_compiles_without_spilling(tmp_path: Path) -> None:
    try:
        cuda_driver._nvrtc()
    except cuda_driver.DriverError:
        pytest.skip("no NVRTC here")
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("cuobjdump comes with triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
    activations = ("gelu", "relu", "tanh", "silu", "none")
    for (groups, k, n), activation in zip(SIZES[:5], activations, strict=True):
        save = activation_of(activation).saved == "pre"
        config = strips.strips_config(groups, k, n, save)
        assert config is not None
        text = strips.source(torch.bfloat16, k, n, activation, True, save, config)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(cuda_driver.compile_cubin(text, "strips.cu", strips.ARCH))
        told = subprocess.run(
            [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        assert re.search(r"STACK:0 ", told), (groups, k, n, activation, told)
