"""Which calls the CUDA kernels of few rows serve, in which shapes, and how they are launched."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.experiments.configurations import few_rows as experiment
from benchmarks.experiments.configurations.rows import mean, read, regrets
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear import reference
from fastlinear.families.linear.cuda import few_rows
from fastlinear.families.linear.cuda.few_rows_config import (
    HalfConfig,
    SingleConfig,
    config_for,
    padded_rows,
    reason_not,
    spread,
)

ROOT = Path(__file__).parents[3]
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("M", [1, 2, 5, 8, 16, 17, 33, 64])
@pytest.mark.parametrize("K", [8, 72, 128, 520, 1024, 2048, 4096, 8192])
def test_what_is_served_can_be_built(M: int, K: int, dtype: torch.dtype) -> None:
    for N in (8, 128, 1024, 4096, 16384):
        why = reason_not(M, K, N, dtype, (K, 1), (K, 1), (9, 0))
        if why is None:
            rows = padded_rows(M, dtype)
            assert M <= rows < max(2 * M, 9)
            config = config_for(M, K, N, dtype)
            assert config.invalid(rows, K) is None
            assert (config.cluster - 1) * config.span < max(K, 1024), "blocks without work"


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 1.03), ("float32", 1.055)])
def test_the_model_of_time_chooses_what_was_fastest(dtype: str, limit: float) -> None:
    """Of the configurations that were timed for each of 3,384 drawn layers."""
    kind = experiment.KIND
    rows = read(kind, ROOT / "results/nvidia-h200/few-rows.jsonl.gz")[dtype]
    found = regrets(rows, np.array([kind.microseconds(r.problem, r.config) for r in rows]))
    assert len(found) > 1100
    assert mean(found) < limit
    assert mean(regrets(rows, np.ones(len(rows)))) > 1.2


SERVED = [
    (1, 4, 1, F32),
    (2, 2048, 512, F32),
    (16, 14336, 4096, F32),
    (8, 11008, 4096, BF16),
    (16, 14336, 4096, BF16),
    (32, 8192, 8192, BF16),
    (64, 4096, 1024, BF16),
    (64, 8192, 8192, FP16),
]


@pytest.mark.parametrize(("M", "K", "N", "dtype"), SERVED, ids=str)
def test_served(M: int, K: int, N: int, dtype: torch.dtype) -> None:
    assert reason_not(M, K, N, dtype, (K, 1), (K, 1), (9, 0)) is None


class _FakeKernel:
    def __init__(
        self, cubin: bytes, name: str, shared_bytes: int, device: int, carveout: int | None
    ) -> None:
        assert carveout == 50, "these fit into the half that leaves L1 its room"
        self.shared_bytes, self.handle = shared_bytes, SimpleNamespace(value=1)


def test_a_launch_asks_for_its_own_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorter and longer K run one kernel, compiled once: each with the memory of its own K."""
    compiled: list[str] = []

    def compile_cubin(text: str, name: str, arch: str) -> bytes:
        compiled.append(text)
        return b""

    monkeypatch.setattr(few_rows.driver, "compile_cubin", compile_cubin)
    monkeypatch.setattr(few_rows.driver, "Kernel", _FakeKernel)

    def at_once(count: Any, kernel: Any, config: Any) -> int:
        count._obj.value = room[0]
        return 0

    launcher = SimpleNamespace(
        cuLaunchKernelEx=SimpleNamespace(), cuOccupancyMaxActiveClusters=at_once
    )
    monkeypatch.setattr(few_rows.driver, "_driver", lambda: launcher)
    monkeypatch.setattr(few_rows, "_kernels", {})
    monkeypatch.setattr(few_rows, "_cubins", {})
    monkeypatch.setattr(few_rows, "device_facts", lambda _: SimpleNamespace(units=132))
    config = HalfConfig(2, 2, 8, 2, cluster=2)
    room = [64]
    for K in (2048, 8192, 4096, 2048):
        x, weight = torch.empty(8, K, dtype=BF16), torch.empty(4096, K, dtype=BF16)
        plan = few_rows._Plan(config, x, weight, None, "relu")
        asked = plan.launch._config.shared_bytes
        assert 2 * (asked + 1024) > 135_168 > asked + 1024, "one block a multiprocessor"
        assert asked >= config.shared_bytes(8, K)
        room[0] = 0
        plan = few_rows._Plan(config, x, weight, None, "relu")
        assert plan.launch._config.shared_bytes == config.shared_bytes(8, K), "no room so"
        room[0] = 64
    assert len(compiled) == 1


@pytest.mark.parametrize("static", [0, 4352])
@pytest.mark.parametrize("blocks", [1, 132, 133, 264, 265, 1000])
def test_no_multiprocessor_takes_more_than_its_share(blocks: int, static: int) -> None:
    share = -(-blocks // 132)
    asked, pooled = spread(blocks, 0, static, 132)
    assert pooled
    of_one = asked + static + 1024
    assert (share + 1) * of_one > 135_168 >= share * of_one, "of what leaves L1 its room"
    most = 135_168 // share - 1024 - static
    assert spread(blocks, most, static, 132) == (most, True)
    more, pooled = spread(blocks, most + 1, static, 132)
    assert more > most
    assert not pooled
    assert spread(blocks, 200_000, static, 132) == (200_000, False)
    asked, pooled = spread(blocks, 0, static, 132, fetched=True)
    assert not pooled
    of_one = asked + static + 1024
    assert (share + 1) * of_one > 233_472 >= share * of_one, "of all of it"


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_a_weight_off_a_boundary_is_not_copied(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The very tensor goes to PyTorch's product; what is not served still raises."""
    x, bias = torch.randn(3, 16, dtype=dtype), torch.randn(8, dtype=dtype)
    weight = torch.randn(8 * 16 + 1, dtype=dtype)[1:].view(8, 16)
    with pytest.raises(UnsupportedError, match="needs a CUDA device"):
        few_rows.forward(x, weight, bias, "gelu", False)
    monkeypatch.setattr(few_rows, "reason_not", lambda *_: None)
    given: list[Any] = []

    def product(*arguments: Any) -> tuple[Tensor, None]:
        given.extend(arguments)
        return reference.forward(*arguments)[0], None

    expected, _ = reference.forward(x, weight, bias, "gelu", False)
    monkeypatch.setattr(few_rows, "reference", SimpleNamespace(forward=product))
    y, pre = few_rows.forward(x, weight, bias, "gelu", False)
    assert given[1] is weight
    assert pre is None
    assert torch.equal(y, expected)


def test_reason_not() -> None:
    def reason(
        M: int = 8,
        K: int = 64,
        N: int = 48,
        dtype: torch.dtype = F32,
        xs: tuple[int, int] = (64, 1),
        ws: tuple[int, int] = (64, 1),
        capability: tuple[int, int] | None = (9, 0),
        needs_grad: bool = False,
    ) -> str | None:
        return reason_not(M, K, N, dtype, xs, ws, capability, needs_grad)

    assert reason() is None
    assert reason(dtype=BF16) is None
    assert reason(xs=(68, 1)) is None
    assert reason(M=1, xs=(3, 1)) is None, "the stride of a single row does not matter"
    assert "CUDA" in (reason(capability=None) or "")
    assert "capability" in (reason(capability=(8, 0)) or "")
    assert "float64" in (reason(dtype=torch.float64) or "")
    assert "inference" in (reason(needs_grad=True) or "")
    assert "at most 16 rows" in (reason(M=17) or "")
    assert "at most 64 rows" in (reason(M=65, dtype=FP16) or "")
    assert "empty" in (reason(K=0) or "")
    assert "multiple of 4" in (reason(K=66, xs=(66, 1), ws=(66, 1)) or "")
    assert "of 8" in (reason(N=50, dtype=BF16) or "")
    assert reason(N=50) is None, "float32 writes any number of outputs"
    assert "x has strides" in (reason(xs=(1, 8)) or "")
    assert "x has strides" in (reason(xs=(0, 1)) or ""), "an expanded row"
    assert "weight has strides" in (reason(ws=(1, 48)) or "")
    assert "2^30" in (reason(N=1 << 31) or "")
    assert "shared memory" in (
        reason(M=64, K=1 << 20, dtype=BF16, xs=(1 << 20, 1), ws=(1 << 20, 1)) or ""
    )


def test_impossible_configs_are_named() -> None:
    assert SingleConfig(3, 8, 2).invalid(8, 512)
    assert SingleConfig(1, 8, 2, cluster=16).invalid(2, 512)
    assert SingleConfig(1, 8, 64).invalid(16, 1 << 15)
    assert HalfConfig(4, 4, 2, 4, 4).invalid(64, 2048), "registers"
    assert HalfConfig(2, 2, 4, 4, 1).invalid(64, 4096), "shared memory"
    assert HalfConfig(2, 8, 1, 4, 1).invalid(8, 512) is None
    assert HalfConfig(2, 2, 1, 4, 1).invalid(8, 512) is None
