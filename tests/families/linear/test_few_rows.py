"""CUDA C++ backend of few rows on a Hopper GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear import reference
from fastlinear.families.linear.cuda import few_rows
from fastlinear.families.linear.cuda.few_rows_config import (
    Config,
    HalfConfig,
    SingleConfig,
    padded_rows,
)
from fastlinear.kernels.cuda.prepared import Plans
from tests.families.hopper_only import on_hopper

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
    HalfConfig(2, 2, 8, 2, cluster=2),
]
CHOSEN = [
    (1, 4, 1, F32),
    (2, 2048, 512, F32),
    (16, 14336, 4096, F32),
    (8, 11008, 4096, BF16),
    (16, 14336, 4096, BF16),
    (32, 8192, 8192, BF16),
    (64, 4096, 1024, BF16),
    (64, 8192, 8192, FP16),
]


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
@pytest.mark.parametrize(
    ("K", "N"), [(8, 8), (72, 136), (520, 520), (2056, 72), (4096, 72), (11008, 72)]
)
def test_half_configs_with_tails(config: HalfConfig, dtype: torch.dtype, K: int, N: int) -> None:
    rows = [M for M in (1, 8, 13, 32, 64) if config.invalid(padded_rows(M, dtype), K) is None]
    assert rows
    for M in rows:
        _check(*_inputs(M, K, N, dtype), "gelu", config)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("M", "K", "N", "dtype"), CHOSEN, ids=str)
def test_chosen_configs(M: int, K: int, N: int, dtype: torch.dtype) -> None:
    _check(*_inputs(M, K, N, dtype), "relu")


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
    shifted = torch.empty(M * K + 1, device="cuda", dtype=dtype)[1:].view(M, K).copy_(x)
    for a in (x, apart, shifted):
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


def _check_chain(x: Tensor, weight: Tensor, config: Config | None = None) -> None:
    """20 products (M, K) → (M, K), each reading what the launch just before it wrote, with nothing
    between them, against the same with every launch checked and waited for.

    Results are let go, so their memory holds those of other steps when a launch comes too early.
    """

    def chain(h: Tensor) -> Tensor:
        for _ in range(20):
            h = few_rows.forward(h, weight, None, "none", False, config=config)[0]
        return h

    def slowly(h: Tensor) -> Tensor:
        for _ in range(20):
            _check(h, weight, None, "none", config)
            torch.cuda.synchronize()
            h = few_rows.forward(h, weight, None, "none", False, config=config)[0]
            torch.cuda.synchronize()
        return h

    inputs = [x, x.flip(1)]
    expected = [slowly(h) for h in inputs]
    start = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inside = chain(start)
    for _ in range(10):
        for given, wanted in zip(inputs, expected, strict=True):
            torch.cuda._sleep(20_000_000)  # the launches queue up behind it
            assert torch.equal(chain(given), wanted), "FAILED outside a graph"
            start.copy_(given)
            graph.replay()
            assert torch.equal(inside, wanted), "FAILED in a graph"


CHAINS = [(F32, 2, 512), (F32, 16, 1024), (BF16, 8, 512), (BF16, 8, 2048), (FP16, 64, 1024)]


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "M", "H"), CHAINS, ids=str)
def test_a_chain_waits_for_every_launch(dtype: torch.dtype, M: int, H: int) -> None:
    x, weight, _ = _inputs(M, H, H, dtype)
    _check_chain(x, weight)


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


# The barrier after the sums are read, not before: no block leaves while others write to it.
LATE = "struct Late { __device__ ~Late() { cluster_meet(); } } late;"
MUTATIONS = [
    (F32, "act(v + b)", "act(v)"),
    (F32, "value % COLS * 4 + ln", "value % COLS * 4 + (3 - ln)"),
    (F32, "const bool real = k < K && row < M;", "const bool real = k + 4 < K && row < M;"),
    (F32, "static_cast<u64>(row) * N + col", "static_cast<u64>(row ^ 1) * N + col"),
    (BF16, "v.x + b[0]", "v.x + b[1]"),
    (BF16, "top.w, low.w, v[t].z, v[t].w", "top.w, low.w, v[t].w, v[t].z"),
    (BF16, "e / 2 * 8 + g", "(1 - e / 2) * 8 + g"),
    (BF16, "begin = rank * part", "begin = 0 * part"),
    *((dtype, r"\ngriddepcontrol.wait;", "") for dtype in (F32, BF16)),
    *((dtype, "cluster_meet();", LATE) for dtype in (F32, BF16)),
]


# Blocks that do not go in step show what waits for nothing.
SLOW = "{ cluster_wait(); if (cluster_rank()) __nanosleep(100000); }"


def _mutated(text: str, good: str, bad: str) -> str:
    assert good in text
    return text.replace(good, bad)


def _mutated_config(dtype: torch.dtype) -> Config:
    return SingleConfig(2, 4, 1, cluster=2) if dtype is F32 else HalfConfig(1, 2, 4, 2, cluster=2)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "good", "bad"), MUTATIONS, ids=str)
def test_a_broken_kernel_is_seen(
    dtype: torch.dtype, good: str, bad: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_source = few_rows.source

    def whole(*given: Any) -> str:
        return _mutated(given_source(*given), "cluster_wait();", SLOW)

    def check() -> None:
        config = _mutated_config(dtype)
        _check(*_inputs(8, 512, 264, dtype), "sigmoid", config)
        x, weight, _ = _inputs(8, 512, 512, dtype)
        _check_chain(x, weight, config)

    monkeypatch.setattr(few_rows, "source", whole)
    monkeypatch.setattr(few_rows, "_plans", Plans())
    check()
    monkeypatch.setattr(few_rows, "source", lambda *given: _mutated(whole(*given), good, bad))
    monkeypatch.setattr(few_rows, "_plans", Plans())
    with pytest.raises(AssertionError, match="FAILED"):
        check()


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
