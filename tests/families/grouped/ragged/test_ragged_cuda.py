"""Ragged groups in 16 bits on Hopper against float64: CUDA C++ on a CPU, thread by thread, and on a
GPU.

On a CPU the passes of Triton, dy act'(pre) and the sums of biases, are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.grouped.ragged import products
from fastlinear.families.grouped.ragged.cuda import backend, product
from fastlinear.families.grouped.ragged.cuda.config import (
    CANDIDATES,
    Config,
    depth_tiles,
    rows_tiles,
)
from fastlinear.families.grouped.ragged.problem import problem
from fastlinear.families.linear import reference
from fastlinear.kernels.cuda.ragged import ragged
from tests.families import nvrtc_offline as nvrtc
from tests.families.grouped.ragged.judged import ALL, check, check_neighbours, drawn
from tests.families.hopper_only import on_hopper
from tests.families.planes_places import PLACES
from tests.kernels.emulation import emulate

BF16, FP16 = torch.bfloat16, torch.float16
CONFIGS = [config for config, _ in CANDIDATES]
# Rows of groups, of all, features before and after: groups without rows, of one, of whole tiles;
# rows of no group; one group that has all; depths of more k-tiles than the pipeline holds.
SIZES = [
    ([70, 0, 129, 1], 200, 72, 136),
    ([0, 0, 5], 5, 8, 16),
    ([128, 256, 64], 600, 64, 128),
    ([0, 0, 300, 0], 300, 200, 72),
    ([1, 2, 3, 1, 17, 15, 16], 60, 648, 24),
    ([700, 3, 1, 0, 20], 730, 24, 40),
    ([2200, 9, 2060], 4300, 8, 264),  # groups of more row-tiles than a band
    ([33], 70, 40, 520),
    ([0, 0], 130, 8, 8),
    ([1, *[0] * 1090, 3, 0, 130], 140, 8, 16),  # more groups than shared memory keeps
]


def _before_activation(dy: Tensor, saved: Tensor, activation: str) -> Tensor:
    return reference.grad_pre(dy.float(), saved.float(), activation, False)[0].to(dy.dtype)


def _bias_gradient(dpre: Tensor, _: Tensor, sizes: Tensor) -> Tensor:
    ends = sizes.clamp(min=0).cumsum(0).clamp(max=len(dpre)).tolist()
    begins = [0, *ends[:-1]]
    sums = [dpre[i:j].double().sum(0) for i, j in zip(begins, ends, strict=True)]
    return torch.stack(sums).to(dpre.dtype)


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors lie there."""
    with torch.device(request.param):
        if request.param == "cpu":
            emulate(monkeypatch, product)
            monkeypatch.setattr(backend, "before_activation", _before_activation)
            monkeypatch.setattr(backend, "bias_gradient", _bias_gradient)
            product._units.cache_clear()
        yield
    if request.param == "cpu":
        product.plans.clear()
        product._units.cache_clear()


in_places = pytest.mark.usefixtures("place")


@in_places
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("case", SIZES, ids=str)
def test_groups_of_any_size(case: tuple[list[int], int, int, int], dtype: torch.dtype) -> None:
    sizes, rows, k, n = case
    check(backend, drawn(rows, len(sizes), k, n, dtype), sizes, "gelu")


@in_places
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid", "silu"])
def test_activations(activation: str, bias: bool) -> None:
    x, weight, bias_of, dy = drawn(150, 3, 40, 72, BF16)
    needs = True, True, bias
    given = x, weight, bias_of if bias else None, dy
    check(backend, given, [66, 3, 70], activation, needs)


@in_places
@pytest.mark.parametrize(
    "needs",
    [
        *((True, False, False), (False, True, False), (False, False, True)),
        *((True, False, True), (False, True, True), (False, False, False)),
    ],
)
def test_what_is_wanted(needs: tuple[bool, bool, bool]) -> None:
    check(backend, drawn(100, 2, 40, 72, BF16), [30, 66], "relu", needs)


@in_places
def test_tensors_that_lie_anyhow() -> None:
    """Weights turned or apart, rows that begin at no multiple of 8, or lie apart, or overlap."""
    x, weight, bias, dy = drawn(100, 2, 40, 72, BF16)
    turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.zeros(2, 80, 48, dtype=BF16)
    wide[:, :72, :40] = weight
    apart = torch.zeros(100, 51, dtype=BF16)
    apart[:, 3:43] = x
    pitched = torch.zeros(100, 48, dtype=BF16)
    pitched[:, 8:] = x
    for w in (turned, wide[:, :72, :40], weight.flip(0).flip(0)):
        check(backend, (x, w, bias, dy), [30, 66], "none")
    for a in (x.t().contiguous().t(), apart[:, 3:43], pitched[:, 8:]):
        check(backend, (a, weight, bias, dy), [30, 66], "none")
    check(backend, (x, weight, bias, dy[:1].expand(100, 72)), [30, 66], "none")


@in_places
def test_sizes_of_64_bits_and_many_groups() -> None:
    sizes = [i % 3 for i in range(300)]
    counted = torch.tensor(sizes)
    check(backend, drawn(sum(sizes) + 5, 300, 8, 8, FP16), sizes, "none", ALL, counted)


@in_places
def test_sizes_that_do_not_fit_stay_inside() -> None:
    """Groups end where the rows do, and a size below 0 is none."""
    given = drawn(100, 3, 40, 72, FP16)
    check(backend, given, [30, 0, 70], "none", ALL, torch.tensor([30, -5, 1 << 40]))
    check(backend, given, [100, 0, 0], "none", ALL, torch.tensor([1 << 20, 7, 1]))


@in_places
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration(config: Config) -> None:
    """Bits do not depend on which tiles a result lies in, and come again."""
    sizes = [200, 0, 150, 61, 3]
    x, weight, bias, dy = drawn(460, 5, 648, 392, BF16)
    groups = ragged(torch.tensor(sizes), 460, ordered=True)

    def results(by: Config | None) -> list[Tensor]:
        y, pre = product.rows_product(x, weight, groups, bias, "silu", True, config=by)
        dx, _ = product.rows_product(dy, weight.transpose(1, 2), groups, config=by)
        dw = product.depth_product(dy, x, groups, config=by)
        assert pre is not None
        return [y, pre, dx, dw]

    first, again, other = results(config), results(config), results(None)
    y, pre = products.forward(x, weight, sizes, bias, "silu", True)
    dx, dw, _ = products.gradients(dy, None, x, weight, sizes, "none", (True, True, False))
    wide = [t.double() for t in (x, weight, bias, dy)]
    y64, pre64 = products.forward(wide[0], wide[1], sizes, wide[2], "silu", True)
    dx64, dw64, _ = products.gradients(
        wide[3], None, wide[0], wide[1], sizes, "none", (True, True, False)
    )
    theirs, oracles = [y, pre, dx, dw], [y64, pre64, dx64, dw64]
    for ours, same, default, their, oracle in zip(
        first, again, other, theirs, oracles, strict=True
    ):
        assert torch.equal(ours, same)
        assert torch.equal(ours, default)
        assert their is not None
        assert oracle is not None
        verdict = judge("ragged", ours[:414], their[:414], oracle[:414])
        assert verdict.passed, str(verdict)


@in_places
@pytest.mark.parametrize(
    ("sizes", "order"),
    [([3, 0, 7, 3, 12, 0], [4, 2, 0, 3, 1, 5]), ([i % 3 for i in range(257)], [*range(257)])],
    ids=["few", "many"],
)
def test_groups_of_most_rows_come_first(sizes: list[int], order: list[int]) -> None:
    table = ragged(torch.tensor(sizes), 400, ordered=True).table.tolist()
    assert table[-1 - len(order) : -1] == order


@in_places
def test_pre_of_rows_of_no_group_is_zero() -> None:
    x, weight, bias, _ = drawn(200, 2, 40, 72, BF16)
    _, pre, _ = backend.forward(x, weight, torch.tensor([3, 30]), bias, "silu", True)
    assert pre is not None
    assert not pre[33:].any()


@in_places
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("which", [0, 1, 3, -1])
def test_numbers_that_are_not_finite_stay_in_their_group(which: int, value: float) -> None:
    """Of x, the weight, dy, and all rows of no group."""
    check_neighbours(backend, drawn(140, 3, 72, 40, BF16), [66, 40, 30], which, value)


@in_places
@pytest.mark.parametrize(
    "config",
    [
        Config(64, 128, 6, cluster=1),
        Config(128, 128, 6, cluster=2),
        Config(128, 128, 4, cluster=1, pingpong=False),
        Config(128, 192, 8, cluster=1),
    ],
    ids=str,
)
def test_configurations_that_cannot_be_built(config: Config) -> None:
    x, weight, _, _ = drawn(20, 2, 16, 16, BF16)
    groups = ragged(torch.tensor([3, 4]), 20)
    with pytest.raises(UnsupportedError):
        product.rows_product(x, weight, groups, config=config)
    with pytest.raises(UnsupportedError):
        product.depth_product(x, x, groups, config=config)


def test_which_problems_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("why_no_hopper", "why_no_gpu"):
        monkeypatch.setattr(backend, name, lambda *_: None)
    facts: Any = {"dtype": "bfloat16", "device": "cuda"}
    p = problem("forward", 640, 8, 64, 72, **facts)
    assert backend.reason_not(p) is None
    assert backend.reason_not(replace(p, dtype="float16", piece="step")) is None
    for other in (
        replace(p, dtype="float32"),
        problem("forward", 64, 0, 64, 64, **facts),
        problem("forward", 0, 8, 64, 64, **facts),
        problem("forward", 64, 8, 60, 64, **facts),
        problem("forward", 64, 8, 64, 63, **facts),
        problem("forward", 1 << 30, 8, 64, 64, **facts),
        problem("step", 64, 1 << 16, 64, 64, **facts),
    ):
        assert backend.reason_not(other) is not None, other.describe()
    monkeypatch.undo()
    if not torch.cuda.is_available():
        assert backend.reason_not(p) is not None


def test_a_gradient_needs_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "why_no_hopper", lambda _: None)
    monkeypatch.setattr(backend, "why_no_gpu", lambda _, package: f"no {package}")
    p = problem("step", 64, 8, 64, 64, dtype="bfloat16", device="cuda")
    assert backend.reason_not(p) == "no triton"
    assert backend.reason_not(replace(p, piece="forward")) is None


def test_tiles_follow_the_sizes() -> None:
    """Wide tiles where there are waves of them, narrow ones where units would be idle."""
    widths = {
        (16384, 8, 14336, 4096): 192,
        (8192, 8, 4096, 4096): 128,
        (4096, 64, 128, 1024): 64,
        (512, 8, 512, 512): 64,
    }
    for (rows, groups, n, k), bn in widths.items():
        assert rows_tiles(rows, groups, n, k, 132).config.bn == bn
    assert depth_tiles(8192, 8, 4096, 4096, 132).config.bn == 192
    assert depth_tiles(4096, 8, 256, 256, 132).config.bn == 64


def _frame(text: str) -> int:
    """Bytes of local memory."""
    found = nvrtc.usage(text, "product.cu")[product.KERNEL]
    assert found.registers <= 168, "384 threads share 65536 registers"
    return found.frame


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_configuration_stays_in_registers(config: Config, dtype: torch.dtype) -> None:
    for b_mn in (False, True):
        assert _frame(product.source(config, dtype, b_mn=b_mn)) == 0
    assert _frame(product.source(config, dtype, of_rows=False)) == 0
    for of_rows in (False, True):
        assert _frame(product.source(config, dtype, of_rows=of_rows, groups=5000)) == 0
    for save in (False, True):
        text = product.source(config, dtype, "gelu_tanh", has_bias=True, save_pre=save)
        assert _frame(text) == 0


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_every_activation_stays_in_registers(activation: str) -> None:
    for save in {False, ACTIVATIONS[activation].saved == "pre"}:
        text = product.source(CONFIGS[0], BF16, activation, has_bias=True, save_pre=save)
        assert _frame(text) == 0


def test_turned_weights_with_biases_stay_in_registers() -> None:
    """But for two words of a tile, outside of its products, in the widest tiles."""
    for config in CONFIGS:
        text = product.source(config, BF16, "relu", has_bias=True, b_mn=True)
        assert _frame(text) <= 8 * (config.bn == 192)


def _results(given: list[Tensor], sizes: Tensor, activation: str, backend: str | None) -> Any:
    """y, and the gradients of x, weight and bias."""
    *operands, dy = given
    x, weight, bias = (t.detach().requires_grad_() for t in operands)
    if backend is None:
        y = products.loop(x, weight, sizes, bias, activation)
    else:
        y = fl.ragged_linear(x, weight, sizes, bias, activation=activation, backend=backend)
    return (y.detach(), *torch.autograd.grad(y, (x, weight, bias), dy))


def _skewed(rows: int, groups: int) -> Tensor:
    """Sizes as 1 / rank, in no order; some groups have no rows, and some rows no group."""
    shares = 1 / torch.arange(1.0, groups + 1, device="cpu")
    sizes = (shares / shares.sum() * (rows - 5)).int()
    sizes[1::5] = 0
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(0), device="cpu")
    return sizes[order].cuda()


@pytest.mark.gpu
@on_hopper
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize(
    "case",
    [(8192, 8, 1024, 4096), (24576, 64, 2048, 1408), (2048, 8, 4096, 14336), (512, 32, 512, 520)],
    ids=str,
)
def test_sizes_of_models(case: tuple[int, int, int, int], activation: str) -> None:
    """Through the public function, beside PyTorch's products and float64; again, the same bits."""
    rows, groups, k, n = case
    with torch.device("cuda"):
        given = list(drawn(rows, groups, k, n, BF16))
        sizes = _skewed(rows, groups)
        torch.full((1 << 28,), float("nan"))  # what new memory holds
        ours = _results(given, sizes, activation, "cuda")
        again = _results(given, sizes, activation, "cuda")
        theirs = _results(given, sizes, activation, None)
        oracles = _results([t.double() for t in given], sizes, activation, None)
    for own, same, their, oracle in zip(ours, again, theirs, oracles, strict=True):
        assert torch.equal(own, same)
        verdict = judge("ragged", own, their, oracle)
        assert verdict.passed, str(verdict)


@pytest.mark.gpu
@on_hopper
def test_a_graph_reads_the_sizes_at_every_replay() -> None:
    with torch.device("cuda"):
        given = list(drawn(3000, 6, 264, 392, BF16))
        sizes = torch.tensor([500, 0, 1, 128, 2000, 300])
        other = torch.tensor([0, 2500, 100, 7, 0, 256])
    for _ in range(2):
        _results(given, sizes, "gelu", "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = _results(given, sizes, "gelu", "cuda")
    for counted in (sizes.clone(), other):
        sizes.copy_(counted)
        graph.replay()
        expected = _results(given, counted, "gelu", "cuda")
        for own, right in zip(found, expected, strict=True):
            assert torch.equal(own, right)


def test_a_row_of_no_stride_is_copied() -> None:
    """Contiguous to PyTorch, with a stride of 0 that no descriptor has."""
    row = torch.randn(8, dtype=torch.float16).as_strided((1, 8), (0, 1))
    assert row.is_contiguous()
    assert row.stride(0) == 0
    assert product.readable(row).stride(0) == 8
