"""The C++ products of grouped_linear against a float64 oracle, in every order and odd size."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.compare import judge
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.cpu import cpp
from fastlinear.families.grouped.problem import problem
from fastlinear.families.grouped.spec import FRONT
from fastlinear.native import cpp_build

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
    (1, 3, 4, 70, 24),  # few rows: sums of lanes
    (1, 300, 9, 40, 50),  # groups of one thread together
    (1, 140, 1, 64, 96),  # one group for all threads
)
DTYPES = ("float32", "bfloat16")


def skipped(dtype: str) -> None:
    why = cpp.reason_not(replace(_P, dtype=dtype))
    if why is not None:
        pytest.skip(why)


def drawn(shape: tuple[int, ...], order: str, seed: int, dtype: str = "float32") -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    made = layouts.empty(shape, order, torch.empty(0), getattr(torch, dtype))
    return made.copy_(torch.randn(shape, generator=generator))


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", layouts.ORDERS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_against_the_oracle(
    sizes: tuple[int, ...], order: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    skipped(dtype)
    _, length, groups, k, n = sizes
    x = drawn((*sizes[:3], k), order, 1, dtype)
    dy = drawn((*sizes[:3], n), order, 2, dtype)
    weight = (torch.randn(groups, n, k) / k**0.5).to(x.dtype)
    if length % 2:
        weight = weight.transpose(1, 2).contiguous().transpose(1, 2)
    bias = torch.randn(groups, n).to(x.dtype)
    made = layouts.empty
    monkeypatch.setattr(layouts, "empty", lambda *a: made(*a).fill_(float("nan")))
    for act in ("none", "gelu", "tanh", "relu"):
        rest = (act, act == "gelu", order)
        y, pre = cpp.forward(x, weight, bias, *rest)
        assert layouts.is_dense(y, order)
        ty, tpre = reference.forward(x, weight, bias, *rest)
        oy, opre = reference.forward(x.double(), weight.double(), bias.double(), *rest)
        last = (act, (True, True, True), order)
        kept = (y, ty, oy) if act == "tanh" else (pre, tpre, opre)
        if act == "relu":  # one side of every kink
            kept = (ty, ty, ty.double())
        grads = cpp.backward(dy, kept[0], x, weight, *last)
        theirs = reference.backward(dy, kept[1], x, weight, *last)
        oracle = reference.backward(dy.double(), kept[2], x.double(), weight.double(), *last)
        found = zip(("y", "dx", "dW", "db"), (y, *grads), (ty, *theirs), (oy, *oracle), strict=True)
        for name, a, t, o in found:
            verdict = judge(name, a, t, o)
            assert verdict.passed, f"{act} {verdict}"
        assert grads[0] is not None
        assert layouts.is_dense(grads[0], order)


@runs
@pytest.mark.parametrize("order", layouts.ORDERS)
@pytest.mark.parametrize("n", [1, 40])
def test_a_bias_joins_the_finished_sums(n: int, order: str) -> None:
    """Sums that begin with a large bias are rounded at its size once for every product."""
    x, weight = drawn((1, 60, 9, 128), order, 1), torch.randn(9, n, 128) / 128**0.5
    bias = 8.0 * torch.randn(9, n)
    y, _ = cpp.forward(x, weight, bias, "none", False, order)
    theirs, _ = reference.forward(x, weight, bias, "none", False, order)
    oracle, _ = reference.forward(x.double(), weight.double(), bias.double(), "none", False, order)
    verdict = judge("y", y, theirs, oracle)
    assert verdict.passed, str(verdict)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["tokens", "channels"])
@pytest.mark.parametrize("groups", [1, 3, 9])
def test_the_number_of_threads_changes_no_bit(groups: int, order: str, dtype: str) -> None:
    skipped(dtype)
    x, dy = drawn((1, 600, groups, 48), order, 1, dtype), drawn((1, 600, groups, 40), order, 2)
    weight = torch.randn(groups, 40, 48).to(x.dtype)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            y, _ = cpp.forward(x, weight, None, "relu", False, order)
            needs = (True, True, True)
            grads = cpp.backward(dy.to(x.dtype), y, x, weight, "relu", needs, order)
            found.append((y, *grads))
    finally:
        torch.set_num_threads(before)
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, found[0], strict=True))


@runs
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2), (1, 2)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_only_what_is_wanted(dtype: str, wanted: tuple[int, ...]) -> None:
    skipped(dtype)
    x, dy = drawn((2, 90, 4, 33), "channels", 1, dtype), drawn((2, 90, 4, 20), "channels", 2, dtype)
    weight = torch.randn(4, 20, 33).to(x.dtype)
    rest = ("none", (True, True, True), "channels")
    whole = cpp.backward(dy, None, x, weight, *rest)
    needs = tuple(i in wanted for i in range(3))
    part = cpp.backward(dy, None, x, weight, "none", needs, "channels")  # type: ignore[arg-type]
    for need, a, b in zip(needs, part, whole, strict=True):
        assert (a is not None) == need
        assert a is None or torch.equal(a, b)


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["tokens", "channels"])
@pytest.mark.parametrize("rows", [2, 20])
def test_bad_numbers_stay_where_they_belong(rows: int, order: str, dtype: str) -> None:
    """A NaN of x in its token and group, one of the weight in its output, one of dy likewise."""
    skipped(dtype)
    nan = float("nan")
    x, dy = drawn((1, rows, 3, 20), order, 1, dtype), drawn((1, rows, 3, 24), order, 2, dtype)
    weight = torch.randn(3, 24, 20).to(x.dtype)
    bad_x, bad_w, bad_dy = x.clone(), weight.clone(), dy.clone()
    bad_x[0, 1, 1, 3] = bad_w[1, 5, 0] = bad_dy[0, 1, 1, 3] = nan
    expected = torch.zeros(2, rows, 3, 24, dtype=torch.bool)
    expected[0, 1, 1], expected[1, :, 1, 5] = True, True
    for activation in ("none", "relu"):
        found = [
            cpp.forward(given, w, None, activation, False, order)[0][0].isnan()
            for given, w in ((bad_x, weight), (x, bad_w))
        ]
        assert torch.equal(torch.stack(found), expected), activation
    rest = ("none", (True, True, True), order)
    dx, dw, db = (t.isnan() for t in cpp.backward(bad_dy, None, x, weight, *rest) if t is not None)
    assert dx.nonzero()[:, 1:3].unique(dim=0).tolist() == [[1, 1]]
    assert dw.nonzero()[:, :2].unique(dim=0).tolist() == [[1, 3]]
    assert db.nonzero().tolist() == [[1, 3]]
    through = cpp.backward(dy, None, x, bad_w, *rest)[0]
    assert through is not None
    assert through.isnan().nonzero()[:, 2:].unique(dim=0).tolist() == [[1, 0]]


@runs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lies", ["x", "dy", "both"])
def test_features_that_lie_apart_with_results_in_another_order(lies: str, dtype: str) -> None:
    skipped(dtype)
    x, dy = drawn((2, 70, 3, 33), "tokens", 1, dtype), drawn((2, 70, 3, 20), "tokens", 2, dtype)
    weight = torch.randn(3, 20, 33).to(x.dtype)
    turned_x = layouts.dense(x, "tokens" if lies == "dy" else "channels")
    turned_dy = layouts.dense(dy, "tokens" if lies == "x" else "channels")
    rest = ("relu", (True, True, True), "tokens")
    y, _ = cpp.forward(x, weight, None, "relu", False, "tokens")
    again, _ = cpp.forward(turned_x, weight, None, "relu", False, "tokens")
    tight = {"rtol": 1e-5, "atol": 1e-5} if dtype == "float32" else {"rtol": 0.02, "atol": 0.02}
    torch.testing.assert_close(again, y, **tight)
    saved = layouts.dense(y, "tokens" if lies == "x" else "channels")
    grads = cpp.backward(turned_dy, saved, turned_x, weight, *rest)
    for a, b in zip(grads, cpp.backward(dy, y, x, weight, *rest), strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b, rtol=tight["rtol"], atol=10 * tight["atol"])
    assert grads[0] is not None
    assert layouts.is_dense(grads[0], "tokens")


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


@runs
def test_a_library_that_cannot_be_compiled_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = torch.randn(11, 12), torch.randn(3, 5, 4)
    expected = fl.grouped_linear(x, w, backend="eager")
    monkeypatch.setattr(cpp_build, "failed", lambda _: "broken")
    FRONT.forget()
    torch.testing.assert_close(fl.grouped_linear(x, w), expected)
    assert fl.explain(x, w).choices[0].backend.name != "cpp"
    with pytest.raises(UnsupportedError, match="broken"):
        fl.grouped_linear(x, w, backend="cpp")
    monkeypatch.undo()
    FRONT.forget()


def test_reasons_are_given() -> None:
    p = problem("forward", 64, 4, 8, 8, dtype="bfloat16", device="cpu")
    assert cpp.reason_not(replace(p, dtype="float16")) == "float32 and bfloat16 only, not float16"
    x = torch.ones(2, 6, dtype=torch.float64)
    with pytest.raises(UnsupportedError, match="float32 and bfloat16 only"):
        fl.grouped_linear(x, torch.ones(2, 3, 3, dtype=torch.float64), backend="cpp")
