"""Gated MLPs of 16-bit numbers in C++ on the CPU against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

import fastlinear as fl
from fastlinear.families.gated import reference
from fastlinear.families.gated.cpu import half
from fastlinear.families.gated.stacking import ORDERS, Biases, Weights
from fastlinear.kernels.cpu import half as library

_WHY_NOT = library.reason_not("bfloat16", 1)
pytestmark = pytest.mark.skipif(_WHY_NOT is not None, reason=str(_WHY_NOT))


def parts(
    m: int, k: int, h: int, order: str, dtype: torch.dtype, biases: bool, down: bool
) -> tuple[torch.Tensor, Weights, Biases]:
    torch.manual_seed(m + k + h)
    rows = h if order == "apart" else 2 * h

    def matrix(n: int, deep: int) -> torch.Tensor:
        return (torch.randn(n, deep) * deep**-0.5).to(dtype)

    def vector(n: int) -> torch.Tensor | None:
        return torch.randn(n).to(dtype) if biases else None

    apart = order == "apart"
    weights = Weights(
        matrix(rows, k), matrix(h, k) if apart else None, matrix(k, h) if down else None
    )
    added = Biases(vector(rows), vector(h) if apart else None, vector(k) if down else None)
    return torch.randn(m, k).to(dtype), weights, added


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize(("m", "k", "h"), [(1, 33, 17), (5, 64, 40), (16, 100, 35), (35, 2050, 16)])
def test_against_the_oracle(
    m: int, k: int, h: int, biases: bool, order: str, dtype: torch.dtype
) -> None:
    for down in (True, False):
        x, weights, added = parts(m, k, h, order, dtype, biases, down)

        def wide(ts: tuple[torch.Tensor | None, ...]) -> list[torch.Tensor | None]:
            return [None if t is None else t.double() for t in ts]

        exact = Weights(*wide(weights)), Biases(*wide(added))  # type: ignore[arg-type]
        want = reference.forward(x.double(), *exact, "silu", order, False)[0]
        eager = reference.forward(x, weights, added, "silu", order, False)[0]
        got = half.forward(x, weights, added, "silu", order, False)[0]
        error = (got.double() - want).abs().max().item()
        allowed = 2 * (eager.double() - want).abs().max().item()
        assert error <= allowed + 2 * torch.finfo(dtype).eps * want.abs().max().item()
        assert got.dtype is dtype
        if dtype is torch.bfloat16:
            trained = half.forward(x, weights, added, "silu", order, True)
            pre = reference.forward(x, weights, added, "silu", order, True)[1:]
            for a, b in zip(trained[1:], pre, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None:
                    torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


def test_biases_of_which_one_half_has_some() -> None:
    x, weights, _ = parts(3, 48, 20, "apart", torch.bfloat16, False, True)
    bias = torch.randn(40).bfloat16()[::2]
    for added in (Biases(bias, None, None), Biases(None, bias, None)):
        got = half.forward(x, weights, added, "gelu", "apart", False)[0]
        want = reference.forward(x, weights, added, "gelu", "apart", False)[0]
        torch.testing.assert_close(got, want, rtol=0.03, atol=0.03)


def test_the_op_with_gradients() -> None:
    x, weights, _ = parts(4, 64, 32, "apart", torch.bfloat16, False, True)
    leaves = [x, *weights]
    results = []
    for backend in ("half_cpp", "eager"):
        for t in leaves:
            t.grad = None  # type: ignore[union-attr]
            t.requires_grad_()  # type: ignore[union-attr]
        y = fl.gated_mlp(*leaves, backend=backend)  # type: ignore[arg-type]
        y.sum().backward()
        results.append([y.detach(), *(t.grad for t in leaves)])  # type: ignore[union-attr]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05)
