"""Training calls recorded in C++: the very results of the Python formula."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.dispatch import cache
from fastlinear.families.linear import reference
from fastlinear.families.linear.autograd import LinearAct
from tests.families.compiled_nodes import needs_nodes
from tests.families.linear.node_ways import CPU, Way, able, close, leaves, same, trained

pytestmark = needs_nodes


@pytest.mark.parametrize("names", CPU, ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_the_bits_of_the_python_formula(activation: str, names: dict[str, str]) -> None:
    """Every subset of gradients, with and without bias, matrices and batches of them."""
    if not able(names, activation, "cpu"):
        pytest.skip("a backend does not know it")
    for shape, bias in itertools.product(((3, 16), (2, 3, 16)), (True, False)):
        for needs in itertools.product((False, True), repeat=3):
            x, w, b = leaves(*shape, n=8, needs=needs)
            given = (x, w, b if bias else None)
            wanted = [t for t in given if t is not None and t.requires_grad]
            if not wanted:
                continue
            way = Way(trained(activation, **names), *given)
            expected = LinearAct.apply(*given, way.formula)
            dys = [torch.randn(expected.shape) for _ in range(3)]
            for dy in dys:
                y = way(*given)
                before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
                ran = way.ran
                found = torch.autograd.grad(y, wanted, dy)
                same([y, *found], [expected, *before])
            assert way.ran == ran  # the third was no longer Python's


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_against_the_oracle(activation: str, dtype: torch.dtype) -> None:
    x, w, b = leaves(33, 40, n=24, dtype=dtype)
    way = Way(trained(activation), x, w, b)
    dy = torch.randn(33, 24, dtype=dtype)
    for _ in range(2):
        y = way(x, w, b)
        ours = [y, *torch.autograd.grad(y, (x, w, b), dy)]
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]

    def graded(f: Any, tensors: Any, dy: Tensor) -> list[Tensor]:
        y = f(*tensors, activation)
        return [y, *torch.autograd.grad(y, tensors, dy)]

    exact = graded(reference.linear_act, wide, dy.double())
    theirs = graded(reference.linear_act, (x, w, b), dy)
    for name, *triple in zip(("y", "dx", "dw", "db"), ours, theirs, exact, strict=True):
        assert judge(name, *triple).passed


@pytest.mark.parametrize("activation", NAMES)
@pytest.mark.parametrize("needs", [n for n in itertools.product((False, True), repeat=3) if any(n)])
def test_second_and_third_order(activation: str, needs: tuple[bool, ...]) -> None:
    given = leaves(2, 3, 4, needs=needs)
    wanted = [t for t in given if t.requires_grad]
    dy = torch.randn(2, 3, 5, requires_grad=True)

    def orders(f: Any) -> list[Tensor]:
        first = torch.autograd.grad(f(*given), wanted, dy, create_graph=True)
        value = sum((g * g.detach().cos()).sum() + g.square().sum() for g in first)
        second = torch.autograd.grad(
            value, [dy, *wanted], create_graph=True, materialize_grads=True
        )
        value = sum(g.square().sum() for g in second)
        third = torch.autograd.grad(value, [dy, *wanted], materialize_grads=True)
        return [*first, *second, *third]

    way = Way(trained(activation), *given)
    theirs = orders(lambda *t: reference.linear_act(*t, activation))
    for a, c in zip(orders(way), theirs, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-3, atol=1e-3)


def test_create_graph_after_a_plain_backward() -> None:
    x, w, b = leaves(3, 4)
    way = Way(trained("gelu"), x, w, b)
    y = way(x, w, b)
    dy = torch.randn(3, 5)
    plain = torch.autograd.grad(y, (x, w, b), dy, retain_graph=True)
    graph = torch.autograd.grad(y, (x, w, b), dy, create_graph=True)
    again = torch.autograd.grad(y, (x, w, b), dy)
    close(graph, plain)
    same(plain, again)
    assert all(g.requires_grad for g in graph)
    assert not any(g.requires_grad for g in again)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_gradients_of_every_layout(activation: str) -> None:
    x, w, b = leaves(4, 6)
    way = Way(trained(activation), x, w, b)
    dys = [
        torch.ones(()).expand(4, 5),
        torch.randn(5, 4).t(),
        torch.randn(4, 10)[:, ::2],
        torch._neg_view(torch.randn(4, 5)),
        torch._efficientzerotensor((4, 5)),
        torch.randn(4, 5),
    ]
    for dy in dys * 2:
        ours = torch.autograd.grad(way(x, w, b), (x, w, b), dy)
        theirs = torch.autograd.grad(
            reference.linear_act(x, w, b, activation), (x, w, b), dy + torch.zeros(4, 5)
        )
        close(ours, theirs)


@pytest.fixture
def _forgotten() -> Iterator[None]:
    cache.forget()
    yield
    cache.forget()


@pytest.mark.usefixtures("_forgotten")
@pytest.mark.parametrize("names", CPU, ids=str)
def test_a_row_has_one_tape_wherever_its_gradient_lies(names: dict[str, str]) -> None:
    """With one row a piece of a longer one is contiguous, whatever its strides say."""
    if not able(names, "relu", "cpu"):
        pytest.skip("a backend does not know it")
    given = leaves(1, 16, n=8)
    way = Way(trained("relu", **names), *given)
    for i, wide in enumerate((11, 8, 13, 8)):
        dy = torch.randn(1, wide)[:, wide - 8 :]
        expected = torch.autograd.grad(LinearAct.apply(*given, way.formula), given, dy)
        ran = way.ran + (i == 0)
        same(torch.autograd.grad(way(*given), given, dy), expected)
        assert way.ran == ran


def test_the_op_records_small_layers_so() -> None:
    layer = fl.nn.Linear(16, 16, activation="relu")
    x = torch.randn(4, 16)
    for _ in range(3):
        y = layer(x)
        y.sum().backward()
    assert y.grad_fn.name() == "LinearActBackward"
    with torch.no_grad():
        assert layer(x).grad_fn is None
