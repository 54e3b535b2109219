"""CUDA C++ backend of few rows: pure parts anywhere, the kernels on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.linear_act import few_rows, reference
from fastlinear.ops.linear_act.few_rows_config import (
    Config,
    HalfConfig,
    SingleConfig,
    config_for,
    padded_rows,
    reason_not,
)

HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
on_hopper = pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
F32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

SINGLE = [
    SingleConfig(1, 4, 1),
    SingleConfig(1, 8, 2, cluster=2),
    SingleConfig(2, 8, 2),
    SingleConfig(4, 4, 2, cluster=4),
]
HALF = [
    HalfConfig(1, 1, 8, 4),
    HalfConfig(1, 2, 4, 8, cluster=2),
    HalfConfig(2, 2, 4, 4, cluster=4),
    HalfConfig(2, 4, 2, 4, cluster=8),
]


# ---------------------------------------------------------------- anywhere


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


# ---------------------------------------------------------------- on a Hopper GPU


def _inputs(M: int, K: int, N: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator("cuda").manual_seed(M * 1000 + K + N)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, device="cuda", generator=generator)

    return draw(M, K).to(dtype), (draw(N, K) / K**0.5).to(dtype), draw(N).to(dtype)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, config: Config | None = None
) -> None:
    y, _ = few_rows.forward(x, weight, bias, activation, False, config=config)
    wide = None if bias is None else bias.double()
    oracle, _ = reference.forward(x.double(), weight.double(), wide, activation, False)
    plain, _ = reference.forward(x, weight, bias, activation, False)
    verdict = judge("y", y, plain, oracle)
    assert verdict.passed, str(verdict)
    again, _ = few_rows.forward(x, weight, bias, activation, False, config=config)
    assert torch.equal(y, again)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", SINGLE, ids=str)
@pytest.mark.parametrize(("K", "N"), [(4, 40), (36, 65), (512, 512), (1028, 130), (4096, 37)])
def test_single_configs_with_tails(config: SingleConfig, K: int, N: int) -> None:
    for M in (1, 2, 3, 8, 11, 16):
        if config.invalid(padded_rows(M, F32), K) is None:
            _check(*_inputs(M, K, N, F32), "gelu", config)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("config", HALF, ids=str)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("K", "N"), [(8, 8), (72, 136), (520, 520), (2056, 72)])
def test_half_configs_with_tails(config: HalfConfig, dtype: torch.dtype, K: int, N: int) -> None:
    for M in (1, 8, 13, 32, 64):
        if config.invalid(padded_rows(M, dtype), K) is None:
            _check(*_inputs(M, K, N, dtype), "gelu", config)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16, FP16])
@pytest.mark.parametrize("activation", NAMES)
def test_every_activation(activation: str, dtype: torch.dtype) -> None:
    x, weight, bias = _inputs(9, 264, 120, dtype)
    for given in (bias, None):
        _check(x, weight, given, activation)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("activation", NAMES)
def test_nan_and_infinities(activation: str, dtype: torch.dtype) -> None:
    """NaN and infinities come out where torch's come out."""
    x, weight, bias = _inputs(7, 264, 72, dtype)
    x[1, 3], x[2, 3], x[6, 5] = float("nan"), float("inf"), -float("inf")
    y, _ = few_rows.forward(x, weight, bias, activation, False)
    plain, _ = reference.forward(x, weight, bias, activation, False)
    assert torch.equal(y.isnan(), plain.isnan())
    assert torch.equal(y.isposinf(), plain.isposinf())
    assert torch.equal(y.isneginf(), plain.isneginf())


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_layouts(dtype: torch.dtype) -> None:
    """Rows apart with NaN between, addresses off a 16-byte boundary, every second bias."""
    M, K, N = 6, 264, 136
    x, weight, bias = _inputs(M, K, N, dtype)
    padded = torch.full((M, K + 40), torch.nan, device="cuda", dtype=dtype)
    apart = padded[:, 8 : K + 8]
    apart.copy_(x)
    odd = torch.empty(N * K + 1, device="cuda", dtype=dtype)[1:].view(N, K).copy_(weight)
    second = torch.stack([bias, bias * torch.nan], 1)[:, 0]
    for a in (x, apart):
        for w in (weight, odd):
            _check(a, w, second, "silu")


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, BF16])
def test_launches_one_after_another(dtype: torch.dtype) -> None:
    """Each launch sees what the one before wrote: x and weights alike, in and outside a graph."""
    x, weight, bias = _inputs(8, 512, 512, dtype)
    small = weight * 0.5

    def chain() -> Tensor:
        h, w = x, weight
        for _ in range(20):
            h = few_rows.forward(h, w, bias, "relu", False)[0]
            w = torch.add(small, h.mean() * 0)  # written just before it is read
        return h

    expected = x
    for i in range(20):
        w = weight if i == 0 else small
        expected = reference.forward(expected, w, bias, "relu", False)[0]
    outside = chain()
    torch.testing.assert_close(outside, expected, rtol=2e-2, atol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = chain()
    for _ in range(50):
        graph.replay()
    assert torch.equal(inside, outside)


@on_hopper
@pytest.mark.gpu
def test_the_same_bits_in_many_launches() -> None:
    for dtype, M in ((F32, 16), (BF16, 64)):
        x, weight, bias = _inputs(M, 1024, 1024, dtype)
        first, _ = few_rows.forward(x, weight, bias, "relu", False)
        differing = torch.zeros((), device="cuda", dtype=torch.int64)
        for _ in range(5_000):
            y, _ = few_rows.forward(x, weight, bias, "relu", False)
            differing += (y != first).any()
        assert differing.item() == 0


MUTATIONS = [
    (F32, "act(v + b)", "act(v)"),
    (F32, "value % COLS * 4 + ln", "value % COLS * 4 + (3 - ln)"),
    (F32, "const bool real = k < K && row < M;", "const bool real = k + 4 < K && row < M;"),
    (F32, "static_cast<u64>(row) * N + col", "static_cast<u64>(row ^ 1) * N + col"),
    (BF16, "v.x + b[0]", "v.x + b[1]"),
    (BF16, "top.w, low.w, v[t].z, v[t].w", "top.w, low.w, v[t].w, v[t].z"),
    (BF16, "e / 2 * 8 + g", "(1 - e / 2) * 8 + g"),
    (BF16, "begin = rank * part", "begin = 0 * part"),
]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "good", "bad"), MUTATIONS, ids=str)
def test_a_broken_kernel_is_seen(
    dtype: torch.dtype, good: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = few_rows.source

    def source(*arguments: Any) -> str:
        text = whole(*arguments)
        assert good in text
        return text.replace(good, bad)

    config = SingleConfig(2, 4, 2) if dtype is F32 else HalfConfig(1, 2, 4, 2, cluster=2)
    x, weight, bias = _inputs(8, 512, 264, dtype)
    _check(x, weight, bias, "sigmoid", config)
    monkeypatch.setattr(few_rows, "source", source)
    monkeypatch.setattr(few_rows, "_plans", {})
    with pytest.raises(AssertionError, match="FAILED"):
        _check(x, weight, bias, "sigmoid", config)


@on_hopper
@pytest.mark.gpu
def test_what_is_not_served_raises() -> None:
    x, weight, bias = _inputs(8, 66, 64, F32)
    with pytest.raises(UnsupportedError, match="multiple of 4"):
        few_rows.forward(x, weight, bias, "relu", False)
    x, weight, bias = _inputs(8, 64, 64, F32)
    with pytest.raises(UnsupportedError, match="inference only"):
        few_rows.forward(x, weight, bias, "relu", True)
    with pytest.raises(UnsupportedError, match="registers"):
        few_rows.forward(*_inputs(64, 512, 512, BF16), "relu", False, config=HalfConfig(4, 4, 2, 4))
