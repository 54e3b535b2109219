"""Steps of the compiled fast path's tapes, one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from fastlinear.fastpath import autograd_node, lookup, recorded, recorder

pytestmark = pytest.mark.skipif(autograd_node.reason_not() is not None, reason="no C++ tapes here")


def test_steps_compute_what_python_does() -> None:
    """Products of each kind, sums, views of any strides and offsets, copies, and boxed ops."""
    assert lookup.wait(), lookup.reason_not()
    assert autograd_node.wait(), autograd_node.reason_not()
    table = lookup.table("common.test_tape")
    assert table is not None

    def products(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        total = torch.mm(a.t().contiguous().t(), b)
        total.addmm_(a, c)
        return functional.linear(total, b, total[0, :6]).sum((0,)) * 2

    def batches(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        total = a.new_empty(4, 3, 6)
        total.copy_(c)
        total.transpose(0, 1).baddbmm_(a.transpose(0, 1), b)
        other = torch.empty_like(total)
        torch.bmm(a.transpose(0, 1).contiguous(), b, out=other.transpose(0, 1))
        sums = total.sum((0, 1)).as_strided((3, 2, 3), (0, 3, 1))
        return torch.bmm(sums, other[1:].as_strided((3, 3, 2), (5, 1, 1), 3))

    def activations(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        made = functional.leaky_relu(functional.gelu(a.t(), approximate="tanh"), 0.2)
        return torch.where(made > b[0, 0], made * 2.0, a.new_zeros(1)) + c[:1, :1]

    shapes = ((5, 6), (6, 7), (6, 7)), ((4, 3, 5), (3, 5, 6), (3, 6)), ((4, 5), (3, 3), (2, 2))
    for function, sizes in zip((products, batches, activations), shapes, strict=True):
        table.clear()
        given = tuple(torch.randn(size) for size in sizes)

        def python(*given: Tensor, function: Any = function) -> Tensor:
            assert recorder.active() is not None, "in Python"
            return function(*given)  # type: ignore[no-any-return]

        with torch.no_grad():
            assert table.admit(*given, recorded.inference(python, *given))
            for _ in range(2):
                found = table.call(*given)
                assert found is not None
                assert torch.equal(found, function(*given))


@pytest.mark.parametrize("spends", [True, False])
def test_what_a_backward_spends_is_freed_at_its_last_use(spends: bool) -> None:
    """Two kept tensors, each read by one product: the first is freed before the second product."""
    assert lookup.wait(), lookup.reason_not()
    assert autograd_node.wait(), autograd_node.reason_not()
    table = lookup.table("common.test_tape")
    assert table is not None
    table.clear()
    x = torch.randn(512, 32)
    u, v = (torch.randn(64, 32, requires_grad=True) for _ in range(2))
    over: list[bool] = []

    def forward(x: Tensor, u: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        first, second = x @ u.t(), x @ v.t()
        return first + second, first, second

    def backward(dy: Tensor, hidden: None, shape: object, given: tuple[Tensor, ...], *rest: object):
        return None, dy.t() @ given[0], dy.t() @ given[0]

    def tape(needs: object, dy: Tensor, given: Any, kept: Any, last: bool) -> object:
        over.append(last)

        def made(dy: Tensor, *rest: Tensor) -> tuple[Tensor | None, ...]:
            return None, torch.mm(rest[3].t(), rest[0]), torch.mm(rest[4].t(), rest[0])

        return recorder.record(made, (dy, *given, *kept), (4, 5) if spends and last else ())

    kept = autograd_node.SPENT, autograd_node.SPENT
    plan = autograd_node.node(
        "TestBackward", (x, u, v), forward, backward, tape, None, kept, (-1,) * 3
    )
    assert table.admit(x, u, v, plan)
    large, small = 512 * 64 * 4, 64 * 32 * 4
    for turn in range(3):
        u.grad = v.grad = None
        one = torch.ones(512, 64)
        with torch.profiler.profile(profile_memory=True) as profile:
            y = table.call(x, u, v)
            assert y is not None
            y.backward(one)
        found = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
        bytes_ = [e.nbytes() for e in found if e.name() == "[memory]"]
        assert u.grad is not None
        if turn == 0:
            continue  # in Python
        assert over == [True]
        torch.testing.assert_close(u.grad, (x @ u.t()).t() @ x)
        order = [b for b in bytes_ if b in (-large, small)][-4:]
        freed_early = [small, -large, small, -large]
        assert order == (freed_early if spends else [small, small, -large, -large])
