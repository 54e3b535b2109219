"""The compiled passes: torch's thread count in every thread, equal results with any."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fastlinear.activations.reference import activation
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear.cpu import cpp
from fastlinear.families.linear.problem import problem
from fastlinear.kernels.cpu import elementwise
from fastlinear.native import cpp_build

pytestmark = pytest.mark.skipif(elementwise.why_not_loaded() is not None, reason="no C++ compiler")


def all_passes() -> None:
    y = torch.rand(200, 160)
    elementwise.activate("silu", y, torch.empty_like(y))
    elementwise.differentiate("silu", y, y, True)
    elementwise.activate_with_bias("relu", y, y[0], torch.empty_like(y), None)


def test_threads_follow_torch() -> None:
    """Each pass asks torch how many threads there are, in the thread that calls it."""
    counts: list[int] = []

    @ctypes.CFUNCTYPE(ctypes.c_int)
    def count() -> int:
        counts.append(torch.get_num_threads())
        return counts[-1]

    before, ask = torch.get_num_threads(), elementwise._library().fastlinear_threads
    ask(ctypes.cast(count, ctypes.c_void_p))
    try:
        for threads in (2, 1, 2):
            torch.set_num_threads(threads)
            all_passes()
    finally:
        torch.set_num_threads(before)
        cpp_build.ask_torch_for_threads(ask)
    assert counts == [2] * 3 + [1] * 3 + [2] * 3


@pytest.mark.parametrize("shape", [(1, 1), (7, 33), (600, 129), (3, 20000)])
def test_any_thread_count_gives_the_same_bits(shape: tuple[int, int]) -> None:
    dy, saved = torch.randn(shape), torch.randn(shape)
    before = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            y = torch.full_like(saved, torch.nan)
            elementwise.activate("gelu_tanh", saved, y)
            results.append((y, *elementwise.differentiate("gelu_tanh", dy, saved, True)))
            with_bias = torch.full_like(saved, torch.nan)
            elementwise.activate_with_bias("gelu", saved, dy[0], with_bias, None)
            results[-1] += (with_bias,)
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["none", "relu", "gelu", "silu", "leaky_relu"])
@pytest.mark.parametrize("kept", ["no", "yes", "over the product"])
@pytest.mark.parametrize(
    "shape", [(0, 5), (1, 1), (7, 33), (40, 1500), (3, 4099), (1001, 3), (4111, 1), (77, 127)]
)
def test_the_bias_is_added_in_the_same_pass(shape: tuple[int, int], kept: str, name: str) -> None:
    product, bias = torch.randn(shape), torch.randn(shape[1])
    expected = activation(name).value((product + bias).double())
    sums = product + bias
    pre = {"no": None, "yes": torch.empty_like(product)}.get(kept, product)
    out = product if kept == "no" else torch.empty_like(product)
    elementwise.activate_with_bias(name, product, bias, out, pre)
    torch.testing.assert_close(out.double(), expected, rtol=2e-6, atol=2e-6)
    if pre is not None:
        assert torch.equal(pre, sums)


@pytest.mark.parametrize("rows", [1, 4, 63, 64, 1001, 20_000])
@pytest.mark.parametrize("columns", [1, 3, 16, 127, 128])
def test_short_rows_are_taken_together(rows: int, columns: int) -> None:
    """Every number is what it is in a row of its own; the sums over rows are of all of them."""
    dy, saved = torch.randn(rows, columns), torch.randn(rows, columns)
    dpre, db = elementwise.differentiate("silu", dy, saved, True)
    alone, _ = elementwise.differentiate("silu", dy.view(1, -1), saved.view(1, -1), False)
    assert torch.equal(dpre, alone.view_as(dpre))
    assert db is not None
    exact = dpre.double().sum(0)
    assert ((db - exact).abs() <= 1e-6 * dpre.double().abs().sum(0)).all()


def test_gelu_is_as_exact_as_torchs() -> None:
    x = torch.cat([torch.randn(200_000), torch.linspace(-40, 40, 50_001)])
    y, dy = torch.empty_like(x), torch.randn(1, x.numel())
    elementwise.activate("gelu", x, y)
    dx, _ = elementwise.differentiate("gelu", dy, x[None], False)
    exact, wide = F.gelu(x.double()), dy.double()
    slope = torch.ops.aten.gelu_backward(wide, x[None].double())
    theirs = torch.ops.aten.gelu_backward(dy, x[None])
    assert (y - exact).norm() <= 1.2 * (F.gelu(x) - exact).norm()
    assert (y - exact).abs().max() <= (F.gelu(x) - exact).abs().max()
    assert (dx - slope).norm() <= 1.2 * (theirs - slope).norm()


def test_gelu_of_what_is_not_a_number_or_infinite() -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30, -1e30, 0.0, -0.0, -13.0, 100.0])
    y = torch.empty_like(x)
    elementwise.activate("gelu", x, y)
    torch.testing.assert_close(y, F.gelu(x.double()).float(), equal_nan=True)


@pytest.mark.own_builds
def test_a_failed_compile_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The automatic choice leaves the backend out from then on; a forced one says why, at once."""
    runs: list[list[str]] = []

    def broken(_: Any, command: list[str], *__: Any) -> str:
        runs.append(command)
        return "the compiler's words"

    monkeypatch.setattr(cpp_build.Compiler, "failure", broken)
    monkeypatch.setattr(cpp_build, "_builds", {})
    elementwise._library.cache_clear()
    p = problem("forward", 64, 64, 64, dtype="float32", device="cpu", activation="silu")
    assert cpp.reason_not_forward(p) is None
    x = torch.randn(4, 4)
    try:
        for _ in range(3):
            with pytest.raises(UnsupportedError, match="the compiler's words"):
                cpp.forward(x, x, None, "silu", False)
        assert len(runs) == 1
        assert "the compiler's words" in str(cpp.reason_not_forward(p))
    finally:
        elementwise._library.cache_clear()
