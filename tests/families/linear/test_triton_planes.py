"""Triton's float32 by planes of float16 against float64: under its interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.linear.triton.planes_config import COLS, DEPTH, ROWS, slices_of
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.families.linear.triton import planes


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def near(ours: Tensor, theirs: Tensor, oracle: Tensor) -> None:
    verdict = judge("product", ours, theirs, oracle)
    assert verdict.passed, str(verdict)


def check(x: Tensor, weight: Tensor, dpre: Tensor) -> None:
    """All three products against float64, beside PyTorch's own."""
    for ours, (a, b) in (
        (planes.forward(x, weight, None, "none", False)[0], (x, weight.t())),
        (planes.grad_input(dpre, weight), (dpre, weight)),
        (planes.grad_weight(dpre, x), (dpre.t(), x)),
    ):
        near(ours, a @ b, a.double() @ b.double())


@compares
@pytest.mark.parametrize(("m", "k", "n"), [(130, 200, 70), (1, 64, 9), (5, 7, 3), (40, 700, 65)])
def test_all_products(m: int, k: int, n: int) -> None:
    check(values(m, k), values(n, k, seed=1), values(m, n, seed=2))


@compares
def test_any_layout() -> None:
    x, weight, dpre = values(66, 40).t(), values(66, 30, seed=1).t(), values(40, 60, seed=2)[:, ::2]
    check(x, weight, dpre)


@compares
@pytest.mark.parametrize("k", [60, 900])  # the second in slices
@pytest.mark.parametrize("activation", ["none", "gelu", "relu"])
def test_bias_and_activation(activation: str, k: int) -> None:
    x, weight, bias = values(30, k), values(20, k, seed=1), values(20, seed=2)
    y, pre = planes.forward(x, weight, bias, activation, True)
    theirs = x @ weight.t() + bias
    oracle = x.double() @ weight.double().t() + bias.double()
    assert pre is not None
    near(pre, theirs, oracle)
    act = activation_of(activation).value
    near(y, act(theirs), act(oracle))
    assert planes.forward(x, weight, bias, "relu", False)[1] is None


@compares
def test_lines_of_any_scale() -> None:
    """Each line has one of its own; those of a wide range, or far from 1, have no planes."""
    x, weight = values(20, 80), values(40, 80, seed=1)
    x[2], x[3], x[4, 7], x[5], x[6] = 0, x[3] * 2.0**60, 2.0**-40, x[5] * 2.0**-110, x[6] * 2.0**95
    weight[7] *= 2.0**-60
    weight[8, ::2] *= 2.0**-34
    y, _ = planes.forward(x, weight, None, "none", False)
    theirs, oracle = x @ weight.t(), x.double() @ weight.double().t()
    for i in range(len(x)):
        for columns in (slice(0, 7), slice(7, 8), slice(8, None)):
            near(y[i, columns], theirs[i, columns], oracle[i, columns])


@compares
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_infinities_and_nan_come_out_where_pytorch_has_them(value: float) -> None:
    x, weight = values(20, 80), values(12, 80, seed=1)
    x[3, 5] = value
    y, _ = planes.forward(x, weight, None, "none", False)
    theirs = x @ weight.t()
    assert torch.equal(y.isnan(), theirs.isnan())
    assert torch.equal(y.isinf(), theirs.isinf())
    near(y[4:], theirs[4:], x[4:].double() @ weight.double().t())


def test_slices_are_none_empty() -> None:
    for tiles in (1, 3, 100, 1000):
        for steps in (1, 2, 5, 17, 64, 1000):
            slices = slices_of(ROWS, steps * DEPTH, tiles * COLS, 108)
            assert (slices - 1) * -(-steps // slices) < steps
    assert slices_of(ROWS, 64 * DEPTH, COLS, 108) > 4
    assert slices_of(ROWS, 64 * DEPTH, 4096 * COLS, 108) == 1
