"""Our own float32 products on the CPU against float64: sizes around every edge, every way in which
operands may lie, NaN and infinities, threads, and training calls through them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.families.linear import reference
from fastlinear.families.linear.cpu import gemm
from fastlinear.families.linear.problem import problem
from fastlinear.kernels.cpu import gemm as library
from fastlinear.kernels.cpu import grouped

_WHY_NOT = library.reason_not()
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
ROWS = (1, 2, 5, 6, 7, 13, 14, 15, 27, 28, 29, 64)
COLUMNS = (1, 7, 8, 15, 16, 17, 31, 32, 33, 100, 255, 256, 257, 600)
DEPTHS = (1, 7, 16, 17, 127, 128, 129, 300)


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + len(shape))
    return torch.randn(shape, generator=generator) * scale


def ways(t: Tensor) -> Iterator[Tensor]:
    """A matrix as it may lie: by rows, by columns, each also with more between them."""
    rows, columns = t.shape
    yield t
    yield t.t().contiguous().t()
    yield torch.full((rows, columns + 5), torch.nan)[:, 3 : columns + 3].copy_(t)
    yield torch.full((columns, rows + 5), torch.nan)[:, 3 : rows + 3].copy_(t.t()).t()


def check(a: Tensor, b: Tensor) -> Tensor:
    got = library.product(a, b)
    exact = a.double() @ b.double()
    # sums of 128 products in a chain, then of a chain each: a few roundings of what is summed
    bound = (a.double().abs() @ b.double().abs()) * 2e-6
    assert got.shape == exact.shape
    assert got.is_contiguous()
    assert bool(((got.double() - exact).abs() <= bound).all())
    return got


@pytest.mark.parametrize("m", ROWS)
def test_sizes_around_every_edge(m: int) -> None:
    for n, k in product(COLUMNS, DEPTHS):
        check(drawn(m, k), drawn(k, n))


@pytest.mark.parametrize("m", [767, 768, 769, 1601])
def test_more_rows_than_stay_near(m: int) -> None:
    check(drawn(m, 300), drawn(300, 300))


@pytest.mark.parametrize(("m", "k", "n"), [(5, 130, 19), (14, 64, 96), (33, 300, 270), (1, 9, 1)])
def test_operands_lie_in_any_way_and_give_the_same_bits(m: int, k: int, n: int) -> None:
    a, b = drawn(m, k), drawn(k, n)
    plain = check(a, b)
    for left, right in product(ways(a), ways(b)):
        assert library.readable(left)
        assert library.readable(right)
        assert torch.equal(library.product(left, right), plain)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_threads_change_no_bit(threads: int) -> None:
    before = torch.get_num_threads()
    a, b = drawn(70, 500), drawn(500, 900)
    plain = check(a, b)
    try:
        torch.set_num_threads(threads)
        assert torch.equal(library.product(a, b), plain)
    finally:
        torch.set_num_threads(before)


def test_no_numbers() -> None:
    for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
        got = library.product(torch.ones(m, k), torch.ones(k, n))
        assert torch.equal(got, torch.zeros(m, n))


def test_nan_and_infinities_reach_what_they_touch_only() -> None:
    a, b = drawn(20, 150), drawn(150, 70)
    plain = library.product(a, b)
    a[3, 140] = torch.nan
    b[7, 65] = torch.inf
    got = library.product(a, b)
    assert bool(got[3].isnan().all())
    assert not bool(got[torch.arange(20) != 3, 65].isfinite().any())
    kept = torch.ones_like(got, dtype=torch.bool)
    kept[3], kept[:, 65] = False, False
    assert torch.equal(got[kept], plain[kept])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", NAMES)
def test_forwards(activation: str, bias: bool) -> None:
    x, weight, b = drawn(9, 40), drawn(21, 40, scale=0.2), drawn(42)[::2] if bias else None
    exact = reference.forward(
        x.double(), weight.double(), None if b is None else b.double(), activation, True
    )
    for way in (weight, weight.t().contiguous().t(), drawn(42, 80)[::2, ::2].copy_(weight)):
        for given in (x, x[:1].expand(9, 40)):
            if given is not x and way is not weight:
                continue
            for save in (True, False):
                y, pre = gemm.forward(given, way, b, activation, save)
                assert (pre is None) is not save
                if given is x:
                    torch.testing.assert_close(y.double(), exact[0], rtol=2e-5, atol=2e-6)
                    if pre is not None:
                        torch.testing.assert_close(pre.double(), exact[1], rtol=2e-5, atol=2e-6)
                else:
                    torch.testing.assert_close(y, y[:1].expand_as(y), rtol=0, atol=0)


def test_gradients() -> None:
    def same(got: Tensor, a: Tensor, b: Tensor) -> None:
        torch.testing.assert_close(got.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)

    dpre, x, weight = drawn(30, 50), drawn(30, 70), drawn(50, 70)
    same(gemm.grad_input(dpre, weight), dpre, weight)
    same(gemm.grad_weight(dpre, x), dpre.t(), x)
    apart = drawn(60, 70)[::2]  # rows of x further apart
    same(gemm.grad_weight(dpre, apart), dpre.t(), apart)


def test_it_is_for_float32_and_bfloat16_on_the_cpu() -> None:
    def why(dtype: str, device: str) -> str | None:
        return gemm.reason_not(problem("forward", 8, 8, 8, dtype=dtype, device=device))

    assert why("float32", "cpu") is None
    assert why("bfloat16", "cpu") in (None, grouped.NO_HALF)
    assert "not float16" in (why("float16", "cpu") or "")
    assert "CPU only" in (why("float32", "cuda") or "")
    x, weight = torch.ones(2, 3, dtype=torch.float16), torch.ones(4, 3, dtype=torch.float16)
    with pytest.raises(fl.UnsupportedError, match="not float16"):
        fl.linear_act(x, weight, backend="gemm_cpp")


def test_a_layer_by_name() -> None:
    layer = fl.nn.Linear(40, 24, activation="gelu", backend="gemm_cpp")
    x = drawn(3, 5, 40).requires_grad_()
    for _ in range(5):  # the first calls run in Python, later ones in a tape
        y = layer(x)
        grads = torch.autograd.grad(y.sum(), [x, layer.weight, layer.bias])
    wide = [t.detach().double().requires_grad_() for t in (x, layer.weight, layer.bias)]
    exact = torch.nn.functional.gelu(torch.nn.functional.linear(*wide))
    torch.testing.assert_close(y.double(), exact, rtol=2e-5, atol=2e-6)
    for got, want in zip(grads, torch.autograd.grad(exact.sum(), wide), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=2e-5, atol=2e-5)


@pytest.mark.skipif(grouped.half_products() is None, reason="needs products of bfloat16")
@pytest.mark.parametrize("shape", [(1, 64, 64), (7, 1, 5), (300, 129, 65), (64, 40, 1)])
@pytest.mark.parametrize("name", ["none", "gelu", "relu"])
def test_bfloat16_is_as_exact_as_torchs(shape: tuple[int, int, int], name: str) -> None:
    """Forward and both gradients, of dense and of turned operands."""
    m, k, n = shape
    x, weight, bias = (drawn(*size).bfloat16() for size in ((m, k), (n, k), (n,)))
    dpre = drawn(m, n).bfloat16()
    for a, w, d in ((x, weight, dpre), (turned(x), turned(weight), turned(dpre))):
        found = gemm.forward(a, w, bias, name, True)
        exact = reference.forward(a.double(), w.double(), bias.double(), name, True)
        theirs = reference.forward(a, w, bias, name, True)
        pairs = [*zip(("y", "pre"), found, theirs, exact, strict=True)]
        grads = gemm.grad_input(d, w), gemm.grad_weight(d, a)
        own = reference.grad_input(d, w), reference.grad_weight(d, a)
        oracle = (
            reference.grad_input(d.double(), w.double()),
            reference.grad_weight(d.double(), a.double()),
        )
        for label, ours, torchs, right in (
            *pairs,
            *zip(("dx", "dW"), grads, own, oracle, strict=True),
        ):
            assert ours is not None
            verdict = judge(label, ours, torchs, right)
            assert verdict.passed, str(verdict)


@pytest.mark.skipif(grouped.half_products() is None, reason="needs products of bfloat16")
@pytest.mark.parametrize("shape", [(0, 8, 8), (4, 0, 8), (4, 8, 0)])
def test_empty_bfloat16_has_zeros_where_torch_has(shape: tuple[int, int, int]) -> None:
    m, k, n = shape
    x, weight, bias = (drawn(*size).bfloat16() for size in ((m, k), (n, k), (n,)))
    dpre = drawn(m, n).bfloat16()
    for _ in range(3):
        torch.full((64, 64), torch.nan)  # so that new memory is no zeros by chance
        y, pre = gemm.forward(x, weight, bias, "gelu", True)
        expected = reference.forward(x, weight, bias, "gelu", True)
        assert torch.equal(y, expected[0])
        assert pre is not None
        assert expected[1] is not None
        assert torch.equal(pre, expected[1])
        assert torch.equal(gemm.grad_input(dpre, weight), dpre @ weight)
        assert torch.equal(gemm.grad_weight(dpre, x), dpre.t() @ x)


def turned(t: Tensor) -> Tensor:
    return t.t().contiguous().t()
