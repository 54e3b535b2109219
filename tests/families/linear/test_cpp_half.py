"""Products of 16-bit numbers in C++ on the CPU against the float64 oracle: sizes around every edge,
strides, all activations, threads."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.families.linear import reference
from fastlinear.families.linear.cpu import half
from fastlinear.kernels.cpu import half as library

_WHY_NOT = library.reason_not("bfloat16", 1)
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))
DTYPES = (torch.bfloat16, torch.float16)


def drawn(*shape: int, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return (torch.randn(shape, generator=generator) * scale).to(dtype)


def layer(m: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    scale = max(k, 1) ** -0.5
    return drawn(m, k, dtype=dtype), drawn(n, k, dtype=dtype, scale=scale), drawn(n, dtype=dtype)


def check(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """At most a rounding of each result away from the oracle, y and pre."""
    y, pre = half.forward(x, weight, bias, activation, True)
    wide = None if bias is None else bias.double()
    want, want_pre = reference.forward(x.double(), weight.double(), wide, activation, True)
    assert pre is not None
    assert want_pre is not None
    for got, exact in ((y, want), (pre, want_pre)):
        assert got.dtype is x.dtype
        assert got.is_contiguous()
        # half a unit in the last place of the result, and float32 sums of up to 5000 products
        eps = torch.finfo(x.dtype).eps
        torch.testing.assert_close(got.double(), exact, rtol=0.51 * eps, atol=4e-5)
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 2, 5, 6, 7, 13, 16, 17, 33])
def test_sizes_around_every_edge(m: int, dtype: torch.dtype) -> None:
    sizes = product(
        (1, 15, 16, 17, 31, 32, 33, 100, 2047, 2048, 2049, 4097), (1, 3, 4, 5, 16, 19, 33)
    )
    for k, n in sizes:
        x, weight, bias = layer(m, k, n, dtype)
        check(x, weight, bias, "none")
        check(x, weight, None, "silu")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", NAMES)
def test_activations(activation: str, dtype: torch.dtype) -> None:
    check(*layer(3, 70, 21, dtype), activation)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_any_distance_and_no_numbers(dtype: torch.dtype) -> None:
    x, weight, bias = layer(4, 40, 20, dtype)
    plain = check(x, weight, bias, "relu")
    apart = torch.zeros(4, 53, dtype=dtype)[:, 5:45].copy_(x)
    torch.testing.assert_close(check(apart, weight, bias, "relu"), plain, rtol=0, atol=0)
    check(x[:1].expand(4, 40), weight, bias, "relu")
    check(x, weight, drawn(40, dtype=dtype)[::2], "none")
    assert check(x[:0], weight, bias, "relu").shape == (0, 20)
    torch.testing.assert_close(check(x[:, :0], weight[:, :0], bias, "none"), bias.expand(4, 20))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_and_infinities_stay(dtype: torch.dtype) -> None:
    x, weight, bias = layer(3, 33, 17, dtype)
    x[0, 32], x[1, 0], weight[16, 3] = float("nan"), float("inf"), float("-inf")
    for activation in ("none", "relu", "silu"):
        y, _ = half.forward(x, weight, bias, activation, False)
        want = reference.forward(x, weight, bias, activation, False)[0]
        assert torch.equal(y.isnan(), want.isnan())
        assert torch.equal(y.isinf(), want.isinf())


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_no_bit(dtype: torch.dtype) -> None:
    x, weight, bias = layer(7, 1030, 515, dtype)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(half.forward(x, weight, bias, "gelu", False)[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_op_with_gradients(dtype: torch.dtype) -> None:
    """Forced, in training: the gradients are PyTorch's, of what the forward saved."""
    x, weight, bias = (t.requires_grad_() for t in layer(5, 64, 48, dtype))
    y = fl.linear_act(x, weight, bias, activation="silu", backend="half_cpp")
    got = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    y = fl.linear_act(x, weight, bias, activation="silu", backend="eager")
    want = torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
