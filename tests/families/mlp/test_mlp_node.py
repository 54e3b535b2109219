"""Chains in training as one C++ node of autograd: the very results of the Python formula."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.families.linear.cpu import onednn
from fastlinear.families.linear.problem import problem
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.autograd import Formula, Mlp
from fastlinear.families.mlp.backends import FAMILY
from fastlinear.fastpath import autograd_node, lookup, recorded, recorder
from tests.families.compiled_nodes import needs_nodes

pytestmark = needs_nodes

ONEDNN = onednn.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu")) is None


def loaded(piece: str, name: str) -> Callable[..., Any]:
    (found,) = [b for b in FAMILY.candidates(piece) if b.name == name]
    return found.load()


class Way:
    """Calls of two backends through the fast path, and the backwards that Python ran."""

    def __init__(self, forward: str, backward: str, names: tuple[str, str], layers: int) -> None:
        self.ran = 0
        plain = loaded("backward", backward)

        def counted(*arguments: Any) -> Any:
            self.ran += recorder.active() is None
            return plain(*arguments)

        self.names = names
        self.formula = Formula(*names, layers, loaded("forward", forward), counted)
        found = lookup.table("mlp.test")
        assert found is not None
        self.table = found
        found.clear()

    def python(self, x: Tensor, ws: Any, bs: Any) -> Tensor:
        biases = (None,) * len(ws) if bs is None else bs
        return Mlp.apply(self.formula, x, *ws, *biases)  # type: ignore[no-any-return]

    def admit(self, x: Tensor, ws: Any, bs: Any) -> None:
        if x.is_cuda:
            assert lookup.serves_cuda()
            assert autograd_node.serves_cuda()
        self.python(x, ws, bs)
        plan = recorded.node(self.formula, x, ws, bs)
        assert plan is not None
        assert self.table.admit(x, ws, bs, *self.names, plan)

    def __call__(self, x: Tensor, ws: Any, bs: Any) -> Tensor:
        y = self.table.call(x, ws, bs, *self.names)
        assert y is not None
        assert y.grad_fn.name() == "MlpBackward"
        return y  # type: ignore[no-any-return]


def net(shape: tuple[int, ...], widths: tuple[int, ...], bias: str = "yes", **kind: Any) -> Any:
    """x, weights and biases, all of them leaves; biases as a caller may give them."""
    x = torch.randn(*shape, widths[0], **kind)
    ws = [torch.randn(n, k, **kind) * (2.0 / k) ** 0.5 for k, n in pairwise(widths)]
    bs: Any = [torch.randn(n, **kind) for n in widths[1:]]
    if bias == "some":
        bs = [b if i % 2 == 0 else None for i, b in enumerate(bs)]
    if bias == "no":
        bs = None
    for t in (x, *ws, *(bs or ())):
        if t is not None:
            t.requires_grad_()
    return x, ws, bs


def flat(x: Tensor, ws: Any, bs: Any) -> list[Tensor]:
    return [t for t in (x, *ws, *(bs or ())) if t is not None and t.requires_grad]


def same(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert s.shape == t.shape
        assert s.dtype == t.dtype
        assert torch.equal(s, t), (s - t).abs().max()


WAYS = ["eager", "layerwise", "whole_cpp"]


@pytest.mark.parametrize("bias", ["yes", "no", "some"])
@pytest.mark.parametrize("backend", WAYS)
@pytest.mark.parametrize("activation", NAMES)
def test_the_bits_of_the_python_formula(activation: str, backend: str, bias: str) -> None:
    finals = NAMES if backend == "eager" and bias == "yes" else ("none", "gelu", "sigmoid")
    for final, shape in itertools.product(finals, ((5,), (2, 3))):
        given = net(shape, (7, 9, 4, 6), bias)
        way = Way(backend, backend, (activation, final), 3)
        way.admit(*given)
        expected = way.python(*given)
        wanted = flat(*given)
        for subset in (wanted, wanted[1:], wanted[2:4], wanted[-1:]):
            for _ in range(2):
                dy = torch.randn_like(expected)
                before = torch.autograd.grad(expected, subset, dy, retain_graph=True)
                ran = way.ran
                y = way(*given)
                same([y, *torch.autograd.grad(y, subset, dy)], [expected, *before])
            assert way.ran == ran


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_of_16_bits(dtype: torch.dtype) -> None:
    """A recorded call of the whole net in C++ gives the bits of one from Python."""
    given = net((5,), (7, 9, 4, 6), dtype=dtype)
    way = Way("whole_cpp", "whole_cpp", ("gelu", "tanh"), 3)
    way.admit(*given)
    expected, wanted = way.python(*given), flat(*given)
    dy = torch.randn_like(expected)
    before = torch.autograd.grad(expected, wanted, dy)
    for _ in range(2):
        ran = way.ran
        y = way(*given)
        same([y, *torch.autograd.grad(y, wanted, dy)], [expected, *before])
    assert way.ran == ran


@pytest.mark.parametrize("frozen", [(), (0,), (0, 1), (2, 3), (0, 1, 2, 4)])
def test_frozen_parts(frozen: tuple[int, ...]) -> None:
    given = net((4,), (6, 5, 5, 3))
    tensors = flat(*given)
    for i in frozen:
        tensors[i].requires_grad_(False)
    way = Way("eager", "eager", ("silu", "tanh"), 3)
    way.admit(*given)
    wanted = flat(*given)
    for _ in range(2):
        ours = torch.autograd.grad(way(*given).sum(), wanted)
        theirs = torch.autograd.grad(reference.mlp(*given, "silu", "tanh").sum(), wanted)
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", NAMES)
def test_against_the_oracle(activation: str, dtype: torch.dtype) -> None:
    given = net((24,), (20, 24, 16), dtype=dtype)
    way = Way("eager", "eager", (activation, "none"), 2)
    way.admit(*given)
    dy = torch.randn(24, 16, dtype=dtype)

    def graded(f: Any, x: Any, ws: Any, bs: Any, dy: Tensor) -> list[Tensor]:
        y = f(x, ws, bs)
        return [y, *torch.autograd.grad(y, flat(x, ws, bs), dy)]

    def plain(x: Any, ws: Any, bs: Any) -> Tensor:
        return reference.mlp(x, ws, bs, activation, "none")

    for _ in range(2):
        ours = graded(way, *given, dy)
    wide = [t.detach().double().requires_grad_() for t in flat(*given)]
    exact = graded(plain, wide[0], wide[1:3], wide[3:], dy.double())
    for triple in zip(ours, graded(plain, *given, dy), exact, strict=True):
        assert judge("tensor", *triple).passed


@pytest.mark.parametrize("activation", ["relu", "gelu", "tanh"])
def test_second_order_hooks_and_errors(activation: str) -> None:
    given = net((3,), (4, 5, 4))
    way = Way("eager", "eager", (activation, "silu"), 2)
    way.admit(*given)
    wanted = flat(*given)

    def orders(f: Any) -> list[Tensor]:
        first = torch.autograd.grad(f(*given).square().sum(), wanted, create_graph=True)
        value = sum(g.square().sum() for g in first)
        return [*first, *torch.autograd.grad(value, wanted)]

    theirs = orders(lambda *t: reference.mlp(*t, activation, "silu"))
    for a, c in zip(orders(way), theirs, strict=True):
        torch.testing.assert_close(a, c, rtol=1e-3, atol=1e-3)
    for _ in range(2):
        y = way(*given).sum()
        torch.autograd.grad(y, wanted)
        with pytest.raises(RuntimeError, match=r"second time|freed"):
            torch.autograd.grad(y, wanted)
        y = way(*given)
        with torch.no_grad():
            given[1][1].mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_what_was_saved_is_given_back_and_threads_agree() -> None:
    given = net((8,), (6, 6, 6))
    way = Way("eager", "eager", ("gelu", "none"), 2)
    way.admit(*given)
    wanted = flat(*given)
    x = given[0] * 1
    y = way(x, *given[1:])
    gone = weakref.ref(x)
    del x
    y.sum().backward()
    gc.collect()
    assert gone() is None
    dy = torch.randn(8, 6)
    expected = torch.autograd.grad(way(*given), wanted, dy)
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(40):
                same(torch.autograd.grad(way(*given), wanted, dy), expected)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_the_op_records_chains_so() -> None:
    x, ws, bs = net((4,), (8, 8, 8, 8))
    for _ in range(3):
        y = fl.mlp(x, ws, bs)
        y.sum().backward()
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "MlpBackward"
    with torch.no_grad():
        assert fl.mlp(x, ws, bs).grad_fn is None


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's own thread, at first
@pytest.mark.parametrize("backends", [("eager", "eager"), ("layerwise", "layerwise")], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_bits_on_a_gpu(backends: tuple[str, str], dtype: torch.dtype) -> None:
    kind: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    for activation, m in (("relu", 64), ("gelu_tanh", 300)):
        given = net((m,), (128, 256, 128, 64), **kind)
        way = Way(*backends, (activation, "none"), 3)
        way.admit(*given)
        expected = way.python(*given)
        wanted = flat(*given)
        for _ in range(3):
            dy = torch.randn_like(expected)
            before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
            ran = way.ran
            y = way(*given)
            same([y, *torch.autograd.grad(y, wanted, dy)], [expected, *before])
        assert way.ran == ran or backends[1] == "layerwise"
