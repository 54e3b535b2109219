"""Steps of the compiled fast path's tapes, one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastlinear.ops.common import fastpath, fastpath_node
from fastlinear.ops.common.tape import Tape

pytestmark = pytest.mark.skipif(fastpath_node.reason_not() is not None, reason="no C++ tapes here")


def test_a_product_is_added_to_what_is_there() -> None:
    assert fastpath.wait(), fastpath.reason_not()
    assert fastpath_node.wait(), fastpath_node.reason_not()
    table = fastpath.table("common.test_tape")
    assert table is not None
    table.clear()
    p = Tape(3)
    total = p.product(0, 1)
    p.accumulate(total, 0, 2)
    a, b, c = given = tuple(torch.randn(s) for s in ((5, 6), (6, 7), (6, 7)))

    def fails(*_: Tensor) -> Tensor:
        raise AssertionError("in Python")

    assert table.admit(*given, fastpath_node.tape(p.spec(total), given, fails))
    with torch.no_grad():
        expected = (a @ b).addmm_(a, c)
        for _ in range(2):
            y = table.call(*given)
            assert y is not None
            assert torch.equal(y, expected)


def test_batched_products_and_their_layouts() -> None:
    """Views of any strides, products into them, copies, sums over some dimensions."""
    assert fastpath.wait(), fastpath.reason_not()
    assert fastpath_node.wait(), fastpath_node.reason_not()
    table = fastpath.table("common.test_tape")
    assert table is not None
    table.clear()
    a, b, c = given = tuple(torch.randn(s) for s in ((4, 3, 5), (3, 5, 6), (3, 6)))
    p = Tape(3)
    by_group = p.strided(0, (3, 4, 5), (5, 15, 1))
    total = p.empty((4, 3, 6), a.dtype, 0)
    p.copy(total, 2)
    p.accumulate_batched(p.strided(total, (3, 4, 6), (6, 18, 1)), by_group, 1)
    other = p.empty((4, 3, 6), a.dtype, 0)
    p.batched(p.dense(by_group), 1, into=p.strided(other, (3, 4, 6), (6, 18, 1)))
    rows = p.row_sum(total, (0, 1))
    y = p.batched(p.strided(rows, (3, 2, 3), (0, 3, 1)), p.strided(other, (3, 3, 2), (5, 1, 1)))

    def fails(*_: Tensor) -> Tensor:
        raise AssertionError("in Python")

    plan = fastpath_node.tape(p.spec(y), given, fails)
    assert table.admit(*given, plan)
    with torch.no_grad():
        sums = c.expand(4, 3, 6).clone()
        sums.transpose(0, 1).baddbmm_(a.transpose(0, 1), b)
        products = torch.empty(4, 3, 6)
        torch.bmm(a.transpose(0, 1).contiguous(), b, out=products.transpose(0, 1))
        left = sums.sum((0, 1)).as_strided((3, 2, 3), (0, 3, 1))
        expected = torch.bmm(left, products.as_strided((3, 3, 2), (5, 1, 1)))
        for _ in range(2):
            found = table.call(*given)
            assert found is not None
            assert torch.equal(found, expected)


@pytest.mark.parametrize("spends", [True, False])
def test_what_a_backward_spends_is_freed_at_its_last_use(spends: bool) -> None:
    """Two kept tensors, each read by one product: the first is freed before the second product."""
    assert fastpath.wait(), fastpath.reason_not()
    assert fastpath_node.wait(), fastpath_node.reason_not()
    table = fastpath.table("common.test_tape")
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

    def recorder(needs: object, dy: Tensor, given: object, kept: object, last: bool) -> object:
        over.append(last)
        p = Tape(6)
        made = [p.product(number, 1, a_turned=True) for number in (4, 5)]
        if spends and last:
            p.spend(4)
            p.spend(5)
        return p.spec(None, *made)

    kept = fastpath_node.SPENT, fastpath_node.SPENT
    plan = fastpath_node.node(
        "TestBackward", (x, u, v), forward, backward, recorder, None, kept, (-1,) * 3
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
