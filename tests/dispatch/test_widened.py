"""Backend widened: float16 and bfloat16 on a CPU as float32 computes them, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.dispatch import prices
from fastlinear.dispatch.backend import WIDENED, families, family
from fastlinear.dispatch.select import select
from fastlinear.families.linear.problem import problem
from fastlinear.families.mlp.layerwise import layers_of
from fastlinear.families.mlp.problem import problem as chain
from fastlinear.fastpath import autograd_node, lookup

HALVES = (torch.float16, torch.bfloat16)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


CALLS: dict[str, Callable[[Callable[..., Tensor], str | None], Tensor]] = {
    "linear_act": lambda d, name: fl.linear_act(
        d(40, 33), d(17, 33), d(17), activation="gelu", backend=name
    ),
    "mlp": lambda d, name: fl.mlp(
        d(9, 32), [d(16, 32), d(5, 16)], [d(16), d(5)], activation="silu", backend=name
    ),
    "gated_mlp": lambda d, name: fl.gated_mlp(
        d(9, 32), d(48, 32), d(48, 32).flip(0), d(24, 48), backend=name
    ),
    "grouped_linear": lambda d, name: fl.grouped_linear(d(9, 60), d(3, 7, 20), backend=name),
}


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_results_are_float32s_rounded_once(name: str, dtype: torch.dtype) -> None:
    """Of the same numbers, by the backend that dispatch takes for float32."""
    found = CALLS[name](lambda *shape: draw(*shape).to(dtype), WIDENED)
    wide = CALLS[name](lambda *shape: draw(*shape).to(dtype).float(), None)
    assert torch.equal(found, wide.to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_gradients(dtype: torch.dtype) -> None:
    p = problem("grad_weight", 40, 33, 17, dtype=str(dtype)[6:], device="cpu", activation="none")
    dy, x = draw(40, 17).to(dtype), draw(40, 33).to(dtype)
    (backend,) = [b for b in family("linear_act").candidates("grad_weight") if b.name == WIDENED]
    found = backend.load(p)(dy, x)
    assert found.dtype is dtype
    torch.testing.assert_close(found, (dy.double().t() @ x.double()).to(dtype))


def test_expanded_rows_in_repeated_calls() -> None:
    """C++ repeats the conversions from the second call of a kind on."""
    assert lookup.wait()
    assert autograd_node.wait()
    w, b = ((draw(*s) / 10).half().requires_grad_() for s in ((100, 100), (100,)))
    for turn in range(4):
        x = draw(turn + 1, 100)[-1:].half().expand(8, 100).requires_grad_()
        dy = draw(8, 100 + turn)[:, :100].half()
        y = fl.linear_act(x, w, b, activation="tanh", backend=WIDENED)
        found = (y, *torch.autograd.grad(y, (x, w, b), dy))
        wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
        exact = torch.tanh(wide[0] @ wide[1].t() + wide[2])
        oracle = (exact, *torch.autograd.grad(exact, wide, dy.double()))
        for ours, true in zip(found, oracle, strict=True):
            assert (ours.double() - true).abs().max() < 0.002 * true.abs().max()


def test_float32_products_that_may_be_less_exact_are_left_alone() -> None:
    """Of ``medium`` precision they may have fewer bits than float16."""
    p = problem("forward", 8, 8, 8, dtype="float16", device="cpu", activation="relu")
    (backend,) = [b for b in family("linear_act").candidates("forward") if b.name == WIDENED]
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert "precision" in str(backend.reason_not(p))
    finally:
        torch.set_float32_matmul_precision(before)
    assert backend.reason_not(p) is None


def test_where_it_serves() -> None:
    p = problem("forward", 8, 8, 8, dtype="float16", device="cpu", activation="relu")
    (backend,) = [b for b in family("linear_act").candidates("forward") if b.name == WIDENED]
    assert backend.reason_not(p) is None
    assert "CPU" in str(backend.reason_not(replace(p, device="cuda")))
    assert "float16" in str(backend.reason_not(replace(p, dtype="float32")))


def test_the_families_that_have_it_are_tested() -> None:
    having = {n for n, f in families().items() if any(b.name == WIDENED for b in f.backends)}
    assert having == set(CALLS)


def test_predictions_add_passes_to_the_work_in_float32() -> None:
    p = problem("forward", 512, 256, 256, dtype="float16", device="cpu", activation="relu")
    work = family("linear_act").work_of(p, WIDENED)
    q = problem("forward", 512, 256, 256, dtype="float32", device="cpu", activation="relu")
    inner = family("linear_act").work_of(q, select(q, ready=False).backend.name)
    assert work is not None
    assert inner is not None
    assert work[: len(inner)] == tuple(replace(w, dtype="float32") for w in inner)
    (passes,) = [w for w in work if w.kind == WIDENED]
    assert passes.units == 512 * 256 * 2 + 256 * 256 + 256


def test_layers_that_take_it_are_no_work_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of chains by layers, and of training calls by pieces, on a Zen 5."""
    known = prices.of_device("amd-zen5")
    monkeypatch.setattr(prices, "shipped", lambda _: known)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    p = chain("forward", 4096, [64, 64, 64], dtype="float16", device="cpu", activation="silu")
    taken = select(replace(layers_of(p)[0], piece="forward"), ready=False)
    assert taken.backend.name == WIDENED
    work = family("mlp").work_of(p, "layerwise")
    assert work is not None
    assert sum(w.kind == WIDENED for w in work) == 2
    step = chain("step", 4096, [64, 64], dtype="float16", device="cpu", needs_grad=True)
    pieces = family("mlp").work_of(step, "pieces")
    assert pieces is not None
    assert any(w.kind == WIDENED for w in pieces)
