"""The CPU backends of gated_mlp: C++ passes, what they leave alone."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import select
from fastlinear.families.gated import reference
from fastlinear.families.gated.cpu import gate as cpp_gate
from fastlinear.families.gated.cpu import gemm, onednn
from fastlinear.families.gated.problem import problem
from fastlinear.families.gated.stacking import NO_BIASES, ORDERS, Biases, Pre, Weights

HAS_ONEDNN = onednn.reason_not(problem("forward", *(7, 8, 8, 8), dtype="float32", device="cpu"))
HAS_ONEDNN_BFLOAT16 = onednn.reason_not(
    problem("forward", *(7, 8, 8, 8), dtype="bfloat16", device="cpu")
)
needs_onednn = pytest.mark.skipif(HAS_ONEDNN is not None, reason=str(HAS_ONEDNN))
needs_cpp = pytest.mark.skipif(cpp_gate.reason_not() is not None, reason="no C++ compiler")


def weights_of(k: int, h: int, n: int, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(*(torch.randn(s).to(dtype) for s in ((h, k), (h, k), (n, h))))


def by_hand(x: Tensor, w: Weights) -> Tensor:
    assert w.up is not None
    assert w.down is not None
    return F.linear(F.silu(F.linear(x, w.gate)) * F.linear(x, w.up), w.down)


def gates(m: int, h: int, order: str, dtype: torch.dtype) -> Pre:
    if order == "apart":
        return torch.randn(m, h).to(dtype), torch.randn(m, h).to(dtype)
    return torch.randn(m, 2 * h).to(dtype), None


@needs_cpp
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_passes_are_as_exact_as_torchs(activation: str, dtype: torch.dtype) -> None:
    """Blocks of columns, chunks of rows and their tails, each order; in place or not."""
    for order, (m, h) in itertools.product(ORDERS, ((3, 5), (70, 33), (9, 1030))):
        pre, dh = gates(m, h, order, dtype), torch.randn(m, h).to(dtype)
        kept = [t if t is None else t.clone() for t in pre]
        narrow = _passes(dh, pre, activation, order)
        exact = _passes(
            dh.double(),
            (pre[0].double(), None if pre[1] is None else pre[1].double()),
            activation,
            order,
        )
        ours: list[Tensor | None] = [cpp_gate.forward(pre, activation, order)]
        for in_place, over in ((False, False), (True, False), (True, True)):
            given = dh.clone()
            read: Any = tuple(t if t is None else t.clone() for t in pre)
            needs = (True, order == "apart")
            rest = activation, order, needs, in_place, over
            dpre, hidden, sums = cpp_gate.backward(given, read, *rest)
            assert (hidden.data_ptr() == given.data_ptr()) is in_place
            assert (dpre[0].data_ptr() == read[0].data_ptr()) is over
            assert in_place or torch.equal(given, dh)
            assert over or all(a is b or torch.equal(a, b) for a, b in zip(read, pre, strict=True))
            found = [*ours, hidden, *dpre, *sums]
            for name, a, t, o in zip(range(6), found, narrow, exact, strict=True):
                assert (a is None) == (t is None)
                if a is not None and t is not None and o is not None:
                    verdict = judge(f"{order} {m} {h} {name}", a, t, o)
                    assert verdict.passed, str(verdict)
        assert all(a is None or torch.equal(a, b) for a, b in zip(pre, kept, strict=True))  # type: ignore[arg-type]
        h = cpp_gate.forward(pre, activation, order, over=True)
        assert ours[0] is not None
        assert torch.equal(h, ours[0])
        assert (h.data_ptr() == pre[0].data_ptr()) is (order == "apart")


def _passes(dh: Tensor, pre: Pre, activation: str, order: str) -> tuple[Tensor | None, ...]:
    """h twice, dpre and its sums by the reference: a gated_linear whose products are the identity
    would give the same."""
    eye = torch.eye(pre[0].shape[1], dtype=dh.dtype)
    x = pre[0] if pre[1] is None else torch.cat([pre[0], pre[1]], 1)
    h = dh.shape[1]
    if pre[1] is None:
        weights = Weights(eye, None, None)
    else:
        wide = torch.eye(2 * h, dtype=dh.dtype)
        weights = Weights(wide[:h], wide[h:], None)
    needs = (True, False, False, False, True, order == "apart", False)
    y = reference.forward(x, weights, NO_BIASES, activation, order, False)[0]
    dx, _, _, _, first, second, _ = reference.backward(
        dh, pre, x, weights, NO_BIASES, activation, order, needs
    )
    assert dx is not None
    if pre[1] is None:
        return y, y, dx, None, first, None
    return y, y, dx[:, :h], dx[:, h:], first, second


@needs_cpp
def test_sums_do_not_depend_on_threads() -> None:
    pre, dh = gates(300, 70, "apart", torch.float32), torch.randn(300, 70)
    threads = torch.get_num_threads()
    found = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(cpp_gate.backward(dh, pre, "silu", "apart", (True, True), False))
    finally:
        torch.set_num_threads(threads)
    for other in found[1:]:
        for a, b in zip(found[0][2], other[2], strict=True):
            assert a is not None
            assert torch.equal(a, b)  # type: ignore[arg-type]


@needs_onednn
def test_interleaved_weights_are_multiplied_as_dense_ones() -> None:
    """Every second row of a weight has gaps between: sums of all products in a row, before."""
    x, stacked, down = torch.randn(18, 872), torch.randn(20, 872), torch.randn(96, 10)
    together = onednn.forward(
        x, Weights(stacked, None, down), NO_BIASES, "gelu_tanh", "interleaved", False
    )
    gate, up = (stacked[i::2].contiguous() for i in (0, 1))
    apart = onednn.forward(x, Weights(gate, up, down), NO_BIASES, "gelu_tanh", "apart", False)
    assert torch.equal(together[0], apart[0])


@needs_cpp
def test_the_callers_gradient_is_not_overwritten() -> None:
    """Without a down projection dy is dh, and belongs to the caller."""
    x, (wg, wu, _) = torch.randn(40, 16, requires_grad=True), weights_of(16, 24, 8)
    for backend in ("cpp", "gemm_cpp", "onednn"):
        if backend == "onednn" and HAS_ONEDNN is not None:
            continue
        y = fl.gated_linear(x, wg, wu, backend=backend)
        dy = torch.randn_like(y)
        before = dy.clone()
        torch.autograd.grad(y, x, dy)
        assert torch.equal(dy, before)


@needs_cpp
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nan_passes_and_finite_stays_finite(activation: str) -> None:
    """A NaN in either half is one in h, and in the gradients where torch's formulas have it."""
    special = [0.0, -0.0, 1.0, -1.0, 90.0, -90.0, math.nan]
    gate = torch.tensor([special]).repeat(1, len(special))
    up = torch.tensor([special]).repeat_interleave(len(special), 1)
    h = cpp_gate.forward((gate, up), activation, "apart")
    expected = activation_of(activation).value(gate) * up
    assert torch.equal(torch.isnan(h), torch.isnan(gate) | torch.isnan(up))
    torch.testing.assert_close(h, expected, equal_nan=True)
    act = activation_of(activation)
    value = act.value(gate)
    theirs = act.backward(up, value if act.saved == "output" else gate), value
    dpre, _, _ = cpp_gate.backward(
        torch.ones_like(h), (gate, up), activation, "apart", (False, False), False
    )
    for a, t in zip(dpre, theirs, strict=True):
        assert a is not None
        torch.testing.assert_close(a, t, equal_nan=True)


@pytest.mark.parametrize("bad", [math.inf, math.nan])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("backend", ["eager", "cpp", "gemm_cpp", "onednn"])
def test_what_a_closed_gate_lets_back(backend: str, activation: str, bad: float) -> None:
    """It stops what is not finite, as PyTorch does, and other gates have PyTorch's gradients."""
    by_name = {b.name: b for b in family("gated_mlp").candidates("backward")}
    p = problem("backward", *(6, 8, 8, 8), dtype="float32", device="cpu", needs_grad=True)
    why = by_name[backend].reason_not(p)
    if why is not None:
        pytest.skip(why)
    x, wg, wu, wd = torch.randn(6, 8), *(torch.randn(8, 8) for _ in range(3))
    wg[2], bg, bu = 0.0, torch.zeros(8), torch.zeros(8)
    bg[2], bu[2] = -1.0, bad  # closed for every token
    bg.requires_grad_()
    how: Any = {"activation": activation, "backend": backend, "recompute": 0}
    y = fl.gated_mlp(x, wg, wu, wd, bg, bu, **how)
    theirs = reference.gated_mlp(x, Weights(wg, wu, wd), Biases(bg, bu, None), activation, "apart")
    assert torch.isnan(y).all()
    assert torch.isnan(theirs).all()
    (found,), (expected,) = (torch.autograd.grad(t.sum(), bg) for t in (y, theirs))
    assert expected[2] == 0
    assert found[2] == 0
    others = [i for i in range(8) if i != 2]
    torch.testing.assert_close(found[others], expected[others], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", [None, 0, 1])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_users_get_at_size(dtype: torch.dtype, order: str, level: int | None) -> None:
    """Sizes from which the backends of this file are the default: judged as the contract does."""
    m, k, h, n = 220, 40, 160, 24
    apart = order == "apart"
    shapes = [(m, k), (h if apart else 2 * h, k), (h, k) if apart else None, (n, h)]
    shapes += [(shapes[1][0],), (h,) if apart else None, (n,)]  # type: ignore[index]
    drawn = [None if s is None else torch.randn(s) / s[-1] ** 0.5 for s in shapes]
    dy = torch.randn(m, n).to(dtype)

    def results(given: list[Any], dy: Tensor, ours: bool) -> list[Tensor]:
        leaves = [None if t is None else t.detach().requires_grad_() for t in given]
        if ours:
            stacked = None if apart else order
            y = fl.gated_mlp(*leaves, activation="gelu", stacked=stacked, recompute=level)
        else:
            named = Weights(*leaves[1:4]), Biases(*leaves[4:7])
            y = reference.gated_mlp(leaves[0], *named, "gelu", order)
        return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)]

    narrow = [None if t is None else t.to(dtype) for t in drawn]
    wide = [None if t is None else t.double() for t in narrow]
    columns = (
        results(narrow, dy, True),
        results(narrow, dy, False),
        results(wide, dy.double(), False),
    )
    for i, (a, t, o) in enumerate(zip(*columns, strict=True)):
        verdict = judge(str(i), a, t, o)
        assert verdict.passed, str(verdict)


@needs_cpp
@pytest.mark.parametrize("order", ORDERS)
def test_registered_ops_at_size(order: str) -> None:
    x = torch.randn(220, 40, requires_grad=True)
    rows = 160 if order == "apart" else 320
    gate = torch.randn(rows, 40, requires_grad=True)
    up = torch.randn(160, 40, requires_grad=True) if order == "apart" else None
    down = torch.randn(24, 160, requires_grad=True)
    for weights in ((gate, up, down), (gate, up, None)):
        call = (x, *weights, None, None, None, "silu", order, False, True, "")
        torch.library.opcheck(
            torch.ops.fastlinear.gated_mlp,
            call,
            test_utils=("test_schema", "test_faketensor", "test_autograd_registration"),
        )


def test_autocast_at_size() -> None:
    x, w = torch.randn(220, 40), [torch.randn(s) / s[1] ** 0.5 for s in ((160, 40),) * 2]
    x.requires_grad_()
    for t in w:
        t.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = fl.gated_linear(x, *w)
        expected = F.silu(F.linear(x, w[0])) * F.linear(x, w[1])
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    ours = torch.autograd.grad(y.float().sum(), (x, *w))
    theirs = torch.autograd.grad(expected.float().sum(), (x, *w))
    for a, t in zip(ours, theirs, strict=True):
        assert a.dtype is torch.float32
        assert float((a - t).norm() / t.norm()) < 1e-2


def test_deep_float32_layers_are_not_left_to_onednn() -> None:
    """It is over twice as inexact as PyTorch there; who names it gets it."""
    for size, avoided in ((2048, True), (1024, False)):
        p = problem("forward", 64, size, size, size, dtype="float32", device="cpu")
        if gemm.reason_not(p) is not None:
            pytest.skip("needs a C++ compiler")
        why = dict(select(p, ready=False).passed_over).get("onednn", "chosen")
        assert ("less exact" in why) == avoided
        assert select(p, "onednn", ready=False).backend.name == "onednn"
