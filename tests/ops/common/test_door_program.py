"""Steps of the compiled door's programs, one by one."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastlinear.ops.common import door, door_node
from fastlinear.ops.common.door_program import Program

pytestmark = pytest.mark.skipif(door_node.reason_not() is not None, reason="no C++ programs here")


def test_a_product_is_added_to_what_is_there() -> None:
    assert door.wait(), door.reason_not()
    assert door_node.wait(), door_node.reason_not()
    table = door.table("common.test_program")
    assert table is not None
    table.clear()
    p = Program(3)
    total = p.product(0, 1)
    p.accumulate(total, 0, 2)
    a, b, c = given = tuple(torch.randn(s) for s in ((5, 6), (6, 7), (6, 7)))

    def fails(*_: Tensor) -> Tensor:
        raise AssertionError("in Python")

    assert table.admit(*given, door_node.program(p.spec(total), given, fails))
    with torch.no_grad():
        expected = (a @ b).addmm_(a, c)
        for _ in range(2):
            y = table.call(*given)
            assert y is not None
            assert torch.equal(y, expected)
