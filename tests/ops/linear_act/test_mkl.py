"""MKL with packed weights: always the weight of now, few copies, torch's numbers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.dispatch.backend import Backend
from fastlinear.ops.common import cpp_elementwise
from fastlinear.ops.common.activations import NAMES as ACTIVATIONS
from fastlinear.ops.linear_act import mkl, reference
from fastlinear.ops.linear_act.problem import problem

WHY = mkl.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu"))
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))
BACKEND = Backend(
    "linear_act",
    "forward",
    "mkl_packed",
    "fastlinear.ops.linear_act.mkl:forward",
    mkl.reason_not,
    ("../common/packed.py", "../common/cpp_elementwise.py", "../common/elementwise.cpp"),
)


@pytest.fixture(autouse=True)
def no_packs() -> Iterator[None]:
    mkl.forget_packed()
    yield
    mkl.forget_packed()


@pytest.fixture
def packed_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of each call served by a pack."""
    calls: list[int] = []
    linear = torch.ops.mkl._mkl_linear

    def counted(x: Tensor, pack: Tensor, weight: Tensor, bias: Any, rows: int) -> Tensor:
        calls.append(rows)
        return linear(x, pack, weight, bias, rows)  # type: ignore[no-any-return]

    monkeypatch.setattr(torch.ops.mkl, "_mkl_linear", counted)
    return calls


def check(weight: Tensor, rows: int = 16, bias: Tensor | None = None) -> None:
    x = torch.randn(rows, weight.shape[1])
    with torch.no_grad():
        y, _ = mkl.forward(x, weight, bias, "relu", False)
        torch.testing.assert_close(y, F.relu(F.linear(x, weight, bias)), rtol=1e-5, atol=1e-5)


def test_contract(contract: Any) -> None:
    served = 0
    for p in contract.problems("linear_act", "forward", "float32", "cpu"):
        if mkl.reason_not(p) is None:
            served += 1
            assert contract.failures(BACKEND, p) == [], p.describe()
    assert served > 20


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("save_pre", [True, False])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -0.0])
def test_special_values_as_torchs(activation: str, save_pre: bool, bad: float) -> None:
    x, w, b = torch.randn(6, 5), torch.randn(4, 5), torch.randn(4)
    x[2, 3] = bad
    for _ in range(2):
        y, pre = mkl.forward(x, w, b, activation, save_pre)
        truth = reference.forward(x, w, b, activation, save_pre)
        torch.testing.assert_close(y, truth[0], rtol=1e-5, atol=1e-5, equal_nan=True)
        assert (pre is None) == (not save_pre)
        if pre is not None:
            assert truth[1] is not None
            torch.testing.assert_close(pre, truth[1], rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("activation", ["gelu_tanh", "quick_gelu", "relu2"])
def test_without_a_compiler(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_elementwise, "why_not_loaded", lambda: "no compiler")
    monkeypatch.setattr(cpp_elementwise, "activate", None)
    x, w = torch.randn(6, 5), torch.randn(4, 5)
    y, _ = mkl.forward(x, w, None, activation, False)
    torch.testing.assert_close(y, reference.linear_act(x, w, None, activation))


def data_mul(w: nn.Parameter) -> None:
    w.data.mul_(2)


def data_assigned(w: nn.Parameter) -> None:
    w.data = torch.randn_like(w)


@torch.no_grad()
def one_element(w: nn.Parameter) -> None:
    w[3, 5] = 100.0


def optimizer_step(w: nn.Parameter) -> None:
    w.grad = torch.randn_like(w)
    torch.optim.AdamW([w], lr=0.5, foreach=True).step()


def transposed(w: nn.Parameter) -> None:
    w.data = w.data.t()


@pytest.mark.parametrize(
    "change", [data_mul, data_assigned, one_element, optimizer_step, transposed]
)
def test_pack_follows_the_weight(
    change: Callable[[nn.Parameter], None], packed_calls: list[int]
) -> None:
    w = nn.Parameter(torch.randn(40, 40))
    check(w)
    for _ in range(2):
        change(w)
        check(w)
        check(w)
    assert packed_calls == [16] * 5


def test_few_copies_whatever_the_batch_sizes(packed_calls: list[int]) -> None:
    w, b = torch.randn(24, 40), torch.randn(24)
    for rows in (16, 3, 16, 5, 1, 3, 5, 16):
        check(w, rows, b)
    assert packed_calls == [16, 3, 16, 3, 16]
    ((_, entry),) = mkl._packs.held.values()
    assert sorted(entry.value) == [3, 16]


def test_pack_dies_with_its_weight() -> None:
    w = torch.randn(24, 40)
    check(w)
    assert len(mkl._packs.held) == 1
    del w
    gc.collect()
    assert mkl._packs.held == {}


def test_layouts_and_slices(packed_calls: list[int]) -> None:
    base = torch.randn(3 * 24, 40)
    for weight in (*base.chunk(3), base.t()[:, :30], base[:, 8:32], base[::2]):
        check(weight)
        check(weight)
    x = torch.randn(40, 16).t()
    w, b = torch.randn(24, 40), torch.randn(24, 2)[:, 0]
    y, _ = mkl.forward(x, w, b, "none", False)
    torch.testing.assert_close(y, F.linear(x, w, b), rtol=1e-5, atol=1e-5)
    assert packed_calls == [16] * 13


def test_inference_tensors_are_never_kept(packed_calls: list[int]) -> None:
    with torch.inference_mode():
        w = torch.randn(24, 40)
        check(w)
        w.mul_(2)
        check(w)
    assert mkl._packs.held == {}
    assert packed_calls == []


def test_pack_made_in_inference_mode_serves_outside_it(packed_calls: list[int]) -> None:
    w = nn.Parameter(torch.randn(24, 40))
    with torch.inference_mode():
        check(w)
    check(w)
    assert packed_calls == [16, 16]


def test_reasons() -> None:
    def why(dtype: str = "float32", device: str = "cpu", needs_grad: bool = False) -> str | None:
        return mkl.reason_not(
            problem("forward", 4, 4, 4, dtype=dtype, device=device, needs_grad=needs_grad)
        )

    assert why() is None
    assert "float32 only" in str(why("bfloat16"))
    assert "CPU only" in str(why(device="cuda"))
    assert "inference only" in str(why(needs_grad=True))
