"""Second and third derivatives of smooth activations as one pass each, and products by products."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import ACTIVATIONS, SMOOTH
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import Verdict, judge, over_draws
from fastlinear.families.linear import higher_order
from fastlinear.families.linear import reference as linear
from fastlinear.families.mlp import reference as mlp
from fastlinear.kernels.cpu import elementwise
from fastlinear.op import differentiable
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

NAMES = sorted(SMOOTH)
SHAPES = [(1, 1), (70, 33), (3, 2048)]
Run = Callable[..., Tensor]


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


def passes(name: str, given: list[Tensor], module: Any) -> list[Tensor]:
    """What ``second`` and ``third`` give for (a, b, g, e, saved); without them by PyTorch's ops."""
    a, b, g, e, saved = given
    if module is not None:
        return [*module.second(name, g, e, saved), *module.third(name, a, b, g, e, saved)]
    act = activation_of(name)
    leaves = [t.detach().requires_grad_() for t in (g, e, saved)]
    found = differentiable._second(act, *leaves)
    return [t.detach() for t in (*found, *torch.autograd.grad(found, leaves, (a, b)))]


def check(name: str, module: Any, dtype: torch.dtype, device: str, shape: tuple[int, ...]) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b, g, e, pre = (torch.randn(shape, generator=draw).to(device, dtype) for _ in range(5))
    pre = pre * 3
    act = activation_of(name)
    saved = act.value(pre) if act.saved == "output" else pre
    given = [a, b, g, e, saved]
    exact = passes(name, [t.double() for t in given], None)
    names = "second by e", "second by saved", "third by g", "third by e", "third by saved"
    rivals = passes(name, given, None), exact
    for said, ours, theirs, oracle in zip(names, passes(name, given, module), *rivals, strict=True):
        assert ours.dtype == dtype
        verdict = judge(said, ours, theirs, oracle)
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [*SHAPES, (200, 100)])
@pytest.mark.skipif(INTERPRETED, reason="C++")
def test_numbers_in_cpp(name: str, shape: tuple[int, int]) -> None:
    check(name, elementwise, torch.float32, "cpu", shape)


@compares
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_in_triton(name: str, shape: tuple[int, int], dtype: torch.dtype) -> None:
    from fastlinear.kernels.triton import elementwise as by_triton

    check(name, by_triton, dtype, DEVICE, shape)


@compares
@pytest.mark.parametrize("name", NAMES)
def test_far_numbers(name: str) -> None:
    """No NaN where PyTorch's first derivative has none."""
    from fastlinear.kernels.triton import elementwise as by_triton

    act = activation_of(name)
    pre = torch.tensor([0.0, -0.0, 1e-30, 12.0, -12.0, 90.0, -90.0, 1e4, -1e4, 1e19, -1e19])
    saved = (act.value(pre) if act.saved == "output" else pre).to(DEVICE)
    ones = torch.ones_like(saved)
    modules = [by_triton] if ON_GPU else [by_triton, elementwise]
    for module in modules:
        for t in passes(name, [ones, ones, ones, ones, saved], module):
            assert t.isfinite().all(), (name, t)


# --------------------------------------------------------------------------------------------
# Through the ops


@pytest.fixture
def worth(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """All passes and products are taken, whatever their sizes; how often each was."""
    counts: dict[str, int] = {}
    monkeypatch.setattr(higher_order, "passes_pay", lambda *_: True)
    monkeypatch.setattr(higher_order, "_with_nodes", lambda *_: float("-inf"))
    higher_order._chosen.cache_clear()
    for function in (differentiable._GradPre, differentiable._Second, higher_order._Product):
        for way in ("forward", "backward"):
            plain, key = getattr(function, way), f"{function.__name__}.{way}"

            def counted(*given: Any, plain: Any = plain, key: str = key) -> Any:
                counts[key] = counts.get(key, 0) + 1
                return plain(*given)

            monkeypatch.setattr(function, way, staticmethod(counted))
    yield counts
    higher_order._chosen.cache_clear()


def layer(activation: str) -> tuple[Run, Run]:
    def fast(x: Any, *rest: Any) -> Tensor:
        h = fl.linear_act(x, rest[0], rest[1], activation=activation)
        return fl.linear_act(h, rest[2], rest[3], activation=activation)

    def plain(x: Any, *rest: Any) -> Tensor:
        return linear.linear_act(linear.linear_act(x, *rest[:2], activation), *rest[2:], activation)

    return fast, plain


def chain(activation: str) -> tuple[Run, Run]:
    def fast(x: Any, *rest: Any) -> Tensor:
        return fl.mlp(x, list(rest[::2]), list(rest[1::2]), activation, activation)

    def plain(x: Any, *rest: Any) -> Tensor:
        return mlp.mlp(x, rest[::2], rest[1::2], activation, activation)

    return fast, plain


def orders(run: Run, dtype: torch.dtype, device: str, rows: int, seed: int) -> list[Tensor]:
    """y, dx, the gradient of a function of dx, and what functions of all of them derive."""
    draw = torch.Generator().manual_seed(seed)
    shapes = [(rows, 5), (16, 5), (16,), (9, 16), (9,)]
    leaves = [torch.randn(s, generator=draw).to(device, dtype) * 0.5 for s in shapes]
    leaves = [t.requires_grad_() for t in leaves]
    y = run(*leaves)
    (dx,) = torch.autograd.grad(y.square().sum(), leaves[0], create_graph=True)
    (second,) = torch.autograd.grad(dx.pow(3).sum(), leaves[0], create_graph=True)
    third = torch.autograd.grad(second.square().sum() + dx.sum(), leaves)
    return [y, dx, second, *third]


def agree(ways: tuple[Run, Run], device: str = "cpu", rows: int = 40) -> None:
    kinds = (ways[0], torch.float32), (ways[1], torch.float32), (ways[1], torch.float64)

    def judged(seed: int, _: Any = None) -> dict[str, list[Verdict]]:
        found = zip(*(orders(*k, device, rows, seed) for k in kinds), strict=True)
        return {"": [judge(str(i), *results) for i, results in enumerate(found)]}

    for verdict in over_draws(judged(0), judged)[""]:  # a few numbers are few roundings
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("made", [layer, chain])
@pytest.mark.parametrize("activation", [*NAMES, "relu", "mish"])
@pytest.mark.skipif(INTERPRETED, reason="C++")
def test_three_orders(made: Any, activation: str, worth: dict[str, int]) -> None:
    agree(made(activation))
    taken = {name for name in worth if name.startswith("_Second")}
    assert taken == ({"_Second.forward", "_Second.backward"} if activation in SMOOTH else set())


@pytest.mark.parametrize("made", [layer, chain])
@pytest.mark.skipif(INTERPRETED, reason="C++")
def test_products_are_differentiated_by_products(
    made: Any, worth: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the prices: each product by the first backend that is not PyTorch's."""

    def other(p: Any, forced: str | None = None, **how: Any) -> Any:
        return select(p, forced or "onednn", **how)

    select = higher_order.select
    monkeypatch.setattr(higher_order, "select", other)
    agree(made("tanh"))
    assert worth["_Product.forward"] > worth["_Product.backward"] > 1


@pytest.mark.parametrize("broken", ["second", "third"])
@pytest.mark.skipif(INTERPRETED, reason="C++")
def test_wrong_passes_are_found(
    broken: str, worth: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(elementwise, broken)

    def wrong(*given: Any) -> Any:
        *found, last = right(*given)
        return *found, last * 1.01

    monkeypatch.setattr(elementwise, broken, wrong)
    with pytest.raises(AssertionError):
        agree(chain("silu"))


@pytest.mark.skipif(INTERPRETED, reason="C++")
def test_a_fourth_order_and_batches(worth: dict[str, int]) -> None:
    """PyTorch's own ops follow."""
    found = []
    for run, dtype in zip(
        (*chain("tanh"), chain("tanh")[1]), (torch.float32,) * 2 + (torch.float64,), strict=True
    ):
        x = torch.linspace(-1, 1, 20).view(4, 5).to(dtype).requires_grad_()
        draw = torch.Generator().manual_seed(1)
        rest = [torch.randn(s, generator=draw).to(dtype) for s in ((8, 5), (8,), (3, 8), (3,))]
        t = run(x, *rest)
        for _ in range(4):
            (t,) = torch.autograd.grad(t.square().sum(), x, create_graph=True)
        y = run(x, *rest)
        (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        each = torch.eye(20, dtype=dtype).view(20, 4, 5)
        (hessian,) = torch.autograd.grad(dx, x, each, is_grads_batched=True)
        found.append((t, hessian))
    for results in zip(*found, strict=True):
        verdict = judge("", *results)
        assert verdict.passed, str(verdict)


@pytest.mark.parametrize("made", [layer, chain])
@pytest.mark.parametrize("how", ["constant", "batched", "negative", "turned when saved"])
@pytest.mark.skipif(INTERPRETED, reason="C++")
def test_gradients_of_any_kind(how: str, made: Any, worth: dict[str, int]) -> None:
    """Constants, batches, numbers whose sign is apart, saved tensors that come back turned."""

    def run(way: Run) -> tuple[Tensor, ...]:
        draw = torch.Generator().manual_seed(1)
        x = torch.randn(4, 5, generator=draw).requires_grad_()
        rest = [torch.randn(s, generator=draw) for s in ((6, 5), (6,), (3, 6), (3,))]
        y = way(x, *rest)
        dy = torch.ones_like(y)
        dy = torch._neg_view(dy) if how == "negative" else dy
        (first,) = torch.autograd.grad(y, x, dy, create_graph=True)
        if how == "batched":
            each = torch.eye(20).view(20, 4, 5)
            return torch.autograd.grad(first, x, each, is_grads_batched=True, create_graph=True)
        (second,) = torch.autograd.grad(first.pow(3).sum(), x, create_graph=True)
        return (*torch.autograd.grad(second.square().sum(), x, create_graph=True), second)

    def turned(t: Tensor) -> Tensor:
        return t.t() if t.dim() == 2 else t

    saved = (lambda t: turned(t.detach()).contiguous()), turned
    hooks = saved if how == "turned when saved" else (lambda t: t, lambda t: t)
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        ours = run(made("tanh")[0])
    torch.testing.assert_close(ours, run(made("tanh")[1]), rtol=1e-4, atol=1e-4)


def test_small_layers_are_left_to_pytorch() -> None:
    pay = higher_order.passes_pay
    small, large = torch.empty(8, 8), torch.empty(100_000, 128)
    assert not pay(small, "tanh")
    assert pay(large, "tanh")
    assert not pay(large, "none")
    assert not pay(large.to("meta"), "tanh")
    assert not pay(large.double(), "tanh")
    assert set(ACTIVATIONS) > SMOOTH


@pytest.mark.parametrize("activation", ["tanh", "gelu"])
@pytest.mark.parametrize("made", [layer, chain])
@pytest.mark.gpu
def test_on_a_gpu(made: Any, activation: str, worth: dict[str, int]) -> None:
    agree(made(activation), "cuda", 4096)
    assert worth["_Second.backward"]
