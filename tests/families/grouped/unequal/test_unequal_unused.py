"""Results of unequal_linear that are not used, or are written over: each group is as a layer of its
own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fastlinear as fl
from fastlinear.families.grouped.unequal.autograd import Formula, applied, loop
from fastlinear.families.grouped.unequal.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup
from tests.families.unserved import unserved

BACKENDS = ("eager", "together")
SIZES = ((5, 3, 4), (6, 7, 9), (1, 8, 5))  # (M, K, N)
Run = Callable[[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor]]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    FRONT.forget()
    yield
    FRONT.forget()


def groups() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    xs = [torch.randn(m, k).requires_grad_() for m, k, _ in SIZES]
    ws = [torch.randn(n, k).requires_grad_() for _, k, n in SIZES]
    return xs, ws, [torch.randn(n).requires_grad_() for *_, n in SIZES]


def running(backend: str, activation: str) -> Run:
    if backend == "together" and unserved(torch.float32) is not None:
        pytest.skip("not served here")
    return lambda *lists: fl.unequal_linear(*lists, activation=activation, backend=backend)


def calls(run: Run, given: tuple[list[Tensor], ...]) -> Iterator[list[Tensor]]:
    """Results of the formula in Python, then of the node in C++ where there is one."""
    _ = lookup.wait() and autograd_node.wait()
    for _ in range(4):
        yield run(*given)


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours is None) == (theirs is None)
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("graph", [False, True], ids=["", "create_graph"])
def test_an_unused_group_has_no_gradients(activation: str, backend: str, graph: bool) -> None:
    """Not zeros, nor the NaN that zeros make of what is infinite."""
    run = running(backend, activation)
    for used in ([0], [1, 2], [2, 0], []):
        lists = groups()
        with torch.no_grad():
            for g in set(range(3)) - set(used):
                lists[0][g].fill_(torch.inf)
        wanted = [t for ts in lists for t in ts]

        def gradients(ys: list[Tensor], used: list[int] = used) -> list[Tensor | None]:
            total = sum((ys[g].square().sum() for g in used), torch.zeros((), requires_grad=True))
            return list(
                torch.autograd.grad(total, wanted, create_graph=graph, allow_unused=True)  # noqa: B023
            )

        expected = gradients(loop(*lists, activation))
        for ys in calls(run, lists):
            same(gradients(ys), expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "tanh"])
def test_a_result_written_over_leaves_the_others(activation: str, backend: str) -> None:
    run, lists = running(backend, activation), groups()
    wanted = [t for ts in lists for t in ts]

    def gradients(ys: list[Tensor]) -> list[Tensor | None]:
        ys[1].mul_(2.0)
        total = ys[0].square().sum() + ys[2].square().sum()
        return list(torch.autograd.grad(total, wanted, allow_unused=True))

    expected = gradients(loop(*lists, activation))
    for ys in calls(run, lists):
        same(gradients(ys), expected)


def changed(lists: tuple[list[Tensor], ...], which: str) -> None:
    """Write to what the gradients of the first group's weight do not read."""
    with torch.no_grad():
        for t in {
            "biases": lists[2],
            "weights": lists[1],
            "inputs of others": lists[0][1:],
        }[which]:
            t.add_(1.0)


@pytest.mark.skipif(autograd_node.reason_not() is not None, reason="no nodes in C++ here")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("which", ["biases", "weights", "inputs of others"])
def test_what_no_gradient_reads_may_be_written_over(activation: str, which: str) -> None:
    run = running("together", activation)
    lists = groups()
    for x in lists[0]:
        x.requires_grad_(False)
    for _ in calls(run, lists):
        pass
    for _ in range(3):
        results = []
        for made in (run, lambda *given: loop(*given, activation)):
            lists = groups()
            for x in lists[0]:
                x.requires_grad_(False)  # PyTorch saves no weight then
            ys = made(*lists)
            changed(lists, which)
            results.append(torch.autograd.grad(ys[0].square().sum(), lists[1][0]))
        same(*results)


@pytest.mark.skipif(autograd_node.reason_not() is not None, reason="no nodes in C++ here")
def test_what_a_gradient_reads_may_not() -> None:
    run, lists = running("together", "silu"), groups()
    for _ in calls(run, lists):
        pass
    ys = run(*lists)
    with torch.no_grad():
        lists[0][0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(ys[0].sum(), lists[1][0])


def test_outputs_that_are_kept_are_copied_at_once() -> None:
    """One operation for all groups, also where another was changed in place."""

    class Clones(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            self.count += func is torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    if unserved(torch.float32) is not None:
        pytest.skip("not served here")
    given = groups()
    xs, ws, _ = given
    with Clones() as clones:
        ys = applied(Formula("relu"), *given)
    assert clones.count == 1
    expected = loop(*given, "relu")
    for y, theirs in zip(ys, expected, strict=True):
        torch.testing.assert_close(y, theirs)
    with torch.no_grad():
        ys[0].zero_()
    found = torch.autograd.grad([y.sum() for y in ys[1:]], [*xs[1:], *ws[1:]])
    same(found, torch.autograd.grad([y.sum() for y in expected[1:]], [*xs[1:], *ws[1:]]))
