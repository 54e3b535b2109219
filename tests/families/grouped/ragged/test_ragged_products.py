"""ragged_linear on a CPU: every way of dividing rows, and every gradient."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import fastlinear as fl
from fastlinear.core.compare import judge
from fastlinear.families.grouped.ragged import products
from fastlinear.families.grouped.ragged.cpu import cpp
from fastlinear.families.grouped.ragged.problem import problem_of

SIZES = ([4, 4, 4], [5, 0, 7], [0, 0, 0], [12, 0, 0], [1, 2, 3], [2, 2, 2])  # of 12 rows


def drawn(dtype: torch.dtype, bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    torch.manual_seed(0)
    x, w, b, dy = (torch.randn(s) for s in ((12, 6), (3, 5, 6), (3, 5), (12, 5)))
    made = [t.to(dtype).requires_grad_() for t in (x, w, b)]
    return made[0], made[1], made[2] if bias else None, dy.to(dtype)


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "sigmoid", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("backend", ["cpp", "eager"])
def test_all_gradients(backend: str, sizes: list[int], activation: str, bias: bool) -> None:
    x, w, b, dy = drawn(torch.float32, bias)
    if backend == "cpp" and (why := cpp.reason_not(problem_of(x, w, b, activation, True))):
        pytest.skip(why)
    counts = torch.tensor(sizes)
    y = fl.ragged_linear(x, w, counts, b, activation=activation, backend=backend)
    # not PyTorch's ops
    assert type(y.grad_fn).__name__ in ("RaggedBackward", "ProductsBackward", "CppFunction")
    leaves = [t for t in (x, w, b) if t is not None]
    found = [y, *torch.autograd.grad(y, leaves, dy)]

    def by_composed(dtype: torch.dtype) -> list[Tensor]:
        own = [None if t is None else t.detach().to(dtype).requires_grad_() for t in (x, w, b)]
        assert own[0] is not None
        assert own[1] is not None
        z = products.composed(*own, sizes, activation)
        leaves = [t for t in own if t is not None]
        return [z, *torch.autograd.grad(z, leaves, dy.to(dtype))]

    for mine, theirs, oracle in zip(
        found, by_composed(torch.float32), by_composed(torch.float64), strict=True
    ):
        assert mine.shape == oracle.shape
        verdict = judge("result", mine.detach(), theirs.detach(), oracle.detach())
        assert verdict.passed, str(verdict)
    assert not found[0][sum(sizes) :].any()
    assert not found[1][sum(sizes) :].any()
    for g, size in enumerate(sizes):
        assert size or not any(t[g].any() for t in found[2:])


def test_any_subset_of_gradients() -> None:
    x, w, b, dy = drawn(torch.float32, True)
    leaves = [t for t in (x, w, b) if t is not None]
    counts = torch.tensor([5, 0, 6])
    whole = torch.autograd.grad(fl.ragged_linear(x, w, counts, b, activation="silu"), leaves, dy)
    for needs in itertools.product((False, True), repeat=3):
        if not any(needs):
            continue
        own = [t.detach().requires_grad_(n) for t, n in zip(leaves, needs, strict=True)]
        y = fl.ragged_linear(own[0], own[1], counts, own[2], activation="silu")
        found = iter(torch.autograd.grad(y, [t for t in own if t.requires_grad], dy))
        for full, need in zip(whole, needs, strict=True):
            assert not need or torch.equal(next(found), full)


def test_second_derivatives_and_transforms() -> None:
    x, w, b, _ = drawn(torch.float64, True)
    counts = torch.tensor([5, 0, 6])

    def call(*given: Tensor) -> Tensor:
        return fl.ragged_linear(given[0], given[1], counts, given[2], activation="tanh")

    assert b is not None
    assert torch.autograd.gradcheck(call, (x, w, b))
    assert torch.autograd.gradgradcheck(call, (x, w, b))
    many = torch.stack([x.detach(), 2 * x.detach()])
    both = torch.func.vmap(lambda rows: call(rows, w.detach(), b.detach()))(many)
    assert torch.allclose(both[1], call(many[1], w.detach(), b.detach()))


def test_rows_and_weights_that_lie_anywhere() -> None:
    x, w, b, dy = drawn(torch.float32, True)
    counts = torch.tensor([5, 0, 6])
    plain = fl.ragged_linear(x, w, counts, b)
    strided = torch.randn(6, 12).t().copy_(x.detach()).requires_grad_()
    turned = w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    y = fl.ragged_linear(strided, turned, counts, b)
    assert torch.allclose(y, plain, atol=1e-6)
    for a, t in zip(
        torch.autograd.grad(y, (strided, turned), dy.t().contiguous().t()),
        torch.autograd.grad(plain, (x, w), dy),
        strict=True,
    ):
        assert torch.allclose(a, t, atol=1e-5)


def test_what_no_group_has_is_not_looked_at() -> None:
    x, w, b, dy = drawn(torch.float32, True)
    with torch.no_grad():
        x[11:], dy[11:] = float("nan"), float("inf")
    y = fl.ragged_linear(x, w, torch.tensor([5, 0, 6]), b, activation="gelu")
    leaves = [t for t in (x, w, b) if t is not None]
    for t in (y, *torch.autograd.grad(y, leaves, dy)):
        assert t.isfinite().all()


def test_autocast_and_bfloat16() -> None:
    x, w, b, dy = drawn(torch.float32, True)
    counts = torch.tensor([5, 0, 6])
    with torch.autocast("cpu", torch.bfloat16):
        y = fl.ragged_linear(x, w, counts, b, activation="relu")
    assert y.dtype is torch.bfloat16
    found = torch.autograd.grad(y, (x, w), dy.bfloat16())
    assert [t.dtype for t in found] == [torch.float32] * 2
    with torch.no_grad():
        assert torch.allclose(
            y.float(), fl.ragged_linear(x, w, counts, b, activation="relu"), 0.05, 0.05
        )


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_batched_and_dual_gradients(activation: str) -> None:
    x, w, b, _ = drawn(torch.float32, True)
    assert b is not None
    counts = torch.tensor([5, 0, 6])
    many = torch.randn(3, 12, 5)

    def gradients(dy: Tensor, batched: bool) -> tuple[Tensor, ...]:
        y = fl.ragged_linear(x, w, counts, b, activation=activation)
        return torch.autograd.grad(y, (x, w, b), dy, is_grads_batched=batched)

    one_by_one = [gradients(dy, False) for dy in many]
    for found, singles in zip(gradients(many, True), zip(*one_by_one, strict=True), strict=True):
        torch.testing.assert_close(found, torch.stack(singles))
    y = fl.ragged_linear(x, w, counts, b, activation=activation)
    with forward_ad.dual_level():
        (dx,) = torch.autograd.grad(y, x, forward_ad.make_dual(many[0], many[1]))
        tangent = forward_ad.unpack_dual(dx).tangent
    assert tangent is not None
    torch.testing.assert_close(tangent, one_by_one[1][0])
