"""The C++ products of grouped_linear against a float64 oracle, in every order and odd size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.ops.grouped_linear import cpp, reference
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.problem import problem

_P = problem("forward", 64, 4, 8, 8, dtype="float32", device="cpu")
runs = pytest.mark.skipif(cpp.reason_not(_P) is not None, reason=str(cpp.reason_not(_P)))
# (B, L, G, K, N)
SIZES = (
    (1, 7, 3, 5, 9),
    (1, 1, 5, 17, 130),
    (2, 37, 3, 33, 20),
    (1, 520, 2, 31, 64),
    (1, 20, 2, 270, 100),
    (3, 1, 2, 16, 16),
)


def drawn(shape: tuple[int, ...], order: str, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = layouts.empty(shape, order, torch.empty(0), torch.float32)
    return made.copy_(torch.randn(shape, generator=generator))


@runs
@pytest.mark.parametrize("order", layouts.ORDERS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_the_oracle(
    sizes: tuple[int, ...], order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, length, groups, k, n = sizes
    x, dy = drawn((*sizes[:3], k), order, 1), drawn((*sizes[:3], n), order, 2)
    weight = torch.randn(groups, n, k) / k**0.5
    if length % 2:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(groups, n)
    made = layouts.empty
    monkeypatch.setattr(layouts, "empty", lambda *a: made(*a).fill_(float("nan")))
    for act in ("none", "gelu"):
        rest = (act, act == "gelu", order)
        y, pre = cpp.forward(x, weight, bias, *rest)
        assert layouts.is_dense(y, order)
        ty, tpre = reference.forward(x, weight, bias, *rest)
        oy, opre = reference.forward(x.double(), weight.double(), bias.double(), *rest)
        last = (act, (True, True, True), order)
        grads = cpp.backward(dy, pre, x, weight, *last)
        theirs = reference.backward(dy, tpre, x, weight, *last)
        oracle = reference.backward(dy.double(), opre, x.double(), weight.double(), *last)
        found = zip(("y", "dx", "dW", "db"), (y, *grads), (ty, *theirs), (oy, *oracle), strict=True)
        for name, a, t, o in found:
            verdict = judge(name, a, t, o)
            assert verdict.passed, f"{act} {verdict}"
        assert grads[0] is not None
        assert layouts.is_dense(grads[0], order)


@runs
def test_the_number_of_threads_changes_no_bit() -> None:
    x, weight = drawn((1, 600, 4, 48), "tokens", 1), torch.randn(4, 40, 48)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpp.forward(x, weight, None, "none", False, "tokens")[0])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(y, found[0]) for y in found)


@runs
def test_bad_numbers_stay_in_their_group_and_token() -> None:
    x = drawn((1, 20, 3, 20), "tokens", 1)
    x[0, 7, 1, 3] = float("nan")
    y, _ = cpp.forward(x, torch.randn(3, 24, 20), None, "none", False, "tokens")
    expected = torch.zeros(1, 20, 3, dtype=torch.bool)
    expected[0, 7, 1] = True
    assert torch.equal(y.isnan().all(-1), expected)
    assert torch.equal(y.isnan().any(-1), expected)


@runs
def test_forced_through_the_public_function_with_gradients() -> None:
    x, w, b = (
        t.requires_grad_() for t in (torch.randn(9, 12), torch.randn(3, 5, 4), torch.randn(3, 5))
    )
    results = []
    for backend in ("cpp", "eager"):
        y = fl.grouped_linear(x, w, b, activation="silu", backend=backend)
        results.append([y, *torch.autograd.grad(y.sum(), (x, w, b))])
    for a, e in zip(*results, strict=True):
        torch.testing.assert_close(a, e)


def test_reasons_are_given() -> None:
    p = problem("forward", 64, 4, 8, 8, dtype="bfloat16", device="cpu")
    assert cpp.reason_not(replace(p, dtype="float16")) == "float32 and bfloat16 only, not float16"
    x = torch.ones(2, 6, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="float32 and bfloat16 only"):
        fl.grouped_linear(x, torch.ones(2, 3, 3, dtype=torch.float64), backend="cpp")
