"""A recorded call gives libraries the very strides that Python gives them, of single elements too:
they choose between kernels by them, and so the numbers would change from the third call on."""

from __future__ import annotations

import pytest
import torch

import fastlinear as fl
from fastlinear.fastpath import autograd_node, lookup


@pytest.mark.parametrize(
    ("groups", "rows", "k", "n"),
    [(9, 238, 896, 1), (9, 12, 1024, 1), (5, 1, 300, 7), (3, 40, 1, 9)],
)
@pytest.mark.parametrize("layout", ["... g k", "g ... k"])
@pytest.mark.parametrize("backend", ["eager", "baddbmm", "loop"])
def test_repeated_calls_give_the_same_bits(
    groups: int, rows: int, k: int, n: int, layout: str, backend: str
) -> None:
    assert lookup.wait(lookup.PATIENCE_S)
    autograd_node.wait(lookup.PATIENCE_S)
    x = torch.randn(rows, groups, k) if layout == "... g k" else torch.randn(groups, rows, k)
    w, b = torch.randn(groups, n, k), torch.randn(groups, n)
    with torch.no_grad():
        ys = [fl.grouped_linear(x, w, b, layout=layout, backend=backend) for _ in range(4)]
    assert all(torch.equal(ys[0], y) for y in ys[1:])
