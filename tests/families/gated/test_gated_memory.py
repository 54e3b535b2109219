"""What a training call holds: the last backward of a graph writes over what the forward kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from fastlinear.dispatch.backend import family
from fastlinear.families.gated.autograd import Formula, GatedMLP
from fastlinear.families.gated.cpu import cpp
from fastlinear.families.gated.problem import problem
from fastlinear.families.gated.stacking import ORDERS, Biases, Weights
from fastlinear.fastpath import lookup, recorded, recorder
from tests.families.compiled_nodes import needs_nodes
from tests.families.gated.gated_layers import stored
from tests.families.gated.gated_ways import draw, same

pytestmark = needs_nodes

ABLE = [
    (f.name, f.load(), b.load())
    for f in family("gated_mlp").candidates("forward")
    for b in family("gated_mlp").candidates("backward")
    if f.name == b.name
    and all(
        c.reason_not(problem(p, *(64, 16, 24, 40), dtype="float32", device="cpu", needs_grad=True))
        is None
        for p, c in (("forward", f), ("backward", b))
    )
]
by_backend = pytest.mark.parametrize("backend", ABLE, ids=[name for name, *_ in ABLE])


class Calls:
    """Training calls by the node, which say whether a backward in Python may write over what it
    got."""

    def __init__(
        self,
        given: Sequence[Tensor | None],
        order: str = "apart",
        functions: Any = ("cpp", cpp.forward, cpp.backward),
        save: bool = True,
    ) -> None:
        name, forward, backward = functions
        self.over: list[bool] = []

        def watched(*arguments: Any) -> Any:
            if recorder.active() is None:
                self.over.append(arguments[-1])
            return backward(*arguments)

        self.plain = Formula("gelu", order, save, forward, backward, name, name)
        formula = Formula("gelu", order, save, forward, watched, name, name)
        table = lookup.table("gated_mlp.test")
        assert table is not None
        self.table = table
        table.clear()
        x, weights, biases = self._split(given)
        GatedMLP.apply(*given, self.plain)
        plan = recorded.node(formula, x, weights, biases)
        assert table.admit(x, weights[:], biases[:], "a", plan)

    @staticmethod
    def _split(given: Any) -> tuple[Tensor, Weights, Biases]:
        return given[0], Weights(*given[1:4]), Biases(*given[4:])

    def __call__(self, given: Any) -> Tensor:
        x, weights, biases = self._split(given)
        y: Tensor = self.table.call(x, weights[:], biases[:], "a")
        return y


def wanted(given: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in given if t is not None and t.requires_grad]


def expect(calls: Calls, given: Sequence[Tensor | None], dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(GatedMLP.apply(*given, calls.plain), wanted(given), dy)


@by_backend
@pytest.mark.parametrize("order", ORDERS)
def test_the_last_backward_writes_over_what_was_kept(order: str, backend: Any) -> None:
    given = draw((64, 16), order, "yes")
    calls = Calls(given, order, backend)
    dy = torch.randn(64, 40)
    expected = expect(calls, given, dy)
    y = calls(given)
    for again in (True, True, False):
        same(torch.autograd.grad(y, wanted(given), dy, retain_graph=again), expected)
    assert calls.over == [False, True]  # the second runs by the first one's tape
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, wanted(given), dy)


def test_a_graph_of_gradients_reads_no_pre_activations() -> None:
    given = draw((64, 16), "apart", "yes")
    calls = Calls(given)
    grads = torch.autograd.grad(calls(given).sum(), wanted(given), create_graph=True)
    theirs = GatedMLP.apply(*given, calls.plain)
    others = torch.autograd.grad(theirs.sum(), wanted(given), create_graph=True)
    for ours in (True, False):
        same(
            torch.autograd.grad(grads[0].pow(2).sum(), given[1], retain_graph=ours),
            torch.autograd.grad(others[0].pow(2).sum(), given[1], retain_graph=ours),
        )
    assert not calls.over


@by_backend
@pytest.mark.parametrize("save", [True, False])
def test_nothing_is_kept_for_the_down_bias_alone(save: bool, backend: Any) -> None:
    """By the node and by Python, by a tape and by the formula, first and second derivatives."""
    needs = (*[False] * 6, True)
    given = draw((64, 16), "apart", "yes", needs)
    calls = Calls(given, "apart", backend, save)
    bias = given[6]
    assert bias is not None
    for call in (calls, lambda given: GatedMLP.apply(*given, calls.plain)):
        alive = torch.zeros(64, 16)
        for _ in range(3):
            mine = [alive, *given[1:]]
            y, kept = stored(lambda c=call, g=mine: c(g), [])  # not even what the caller gave
            assert kept == 0
            dy = torch.randn(64, 40, requires_grad=True)
            (found,) = torch.autograd.grad(y, bias, dy, retain_graph=True)
            same([found], [dy.sum(0)])
            (again,) = torch.autograd.grad(y, bias, dy.sin(), create_graph=True)
            (second,) = torch.autograd.grad(again.square().sum(), dy)
            torch.testing.assert_close(second, 2 * dy.sin().sum(0) * dy.cos())
            expanded = torch.autograd.grad(call(mine).sum(), bias)
            same(expanded, [torch.full((40,), 64.0)])
    # a checkpoint may record by one of them and repeat by the other
    ways = [calls, lambda given: GatedMLP.apply(*given, calls.plain)]
    y = checkpoint(lambda *t: ways.pop()(t), *given, use_reentrant=False)
    same(torch.autograd.grad(y.sum(), bias), [torch.full((40,), 64.0)])


@by_backend
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("save", [True, False])
def test_x_is_kept_for_the_down_weight_only_to_form_the_rest_again(
    save: bool, order: str, backend: Any
) -> None:
    given = draw((64, 16), order, "yes", (*[False] * 3, True, False, False, True))
    calls = Calls(given, order, backend, save)
    plain = [None if t is None else t.detach().requires_grad_() for t in given]
    weight, bias = plain[3], plain[6]
    for call in (calls, lambda given: GatedMLP.apply(*given, calls.plain)):
        for _ in range(2):
            y, kept = stored(lambda c=call: c(given), given[1:])
            assert kept == 4 * 64 * (2 * 24 if save else 16)
            dy = torch.randn(64, 40, requires_grad=True)
            expected = torch.autograd.grad(
                GatedMLP.apply(*plain, calls.plain), [weight, bias], dy.detach()
            )
            for graph in (True, False):
                found = torch.autograd.grad(y, wanted(given), dy * 1, create_graph=graph)
                torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
            y = call(given)
            first = torch.autograd.grad(y, wanted(given), dy, create_graph=True)
            theirs = torch.autograd.grad(
                GatedMLP.apply(*plain, calls.plain), [weight, bias], dy, create_graph=True
            )
            second, others = (
                torch.autograd.grad(sum(t.square().sum() for t in ts), dy) for ts in (first, theirs)
            )
            torch.testing.assert_close(second, others, rtol=1e-5, atol=1e-3)


def test_a_part_of_the_gradients_first() -> None:
    given = draw((64, 16), "apart", "yes")
    calls = Calls(given)
    dy = torch.randn(64, 40)
    expected = expect(calls, given, dy)
    y = calls(given)
    same(torch.autograd.grad(y, wanted(given)[1], dy, retain_graph=True), expected[1:2])
    same(torch.autograd.grad(y, wanted(given)[3], dy), expected[3:4])
    assert calls.over == [False, True]


def held_elsewhere(kept: list[Tensor]) -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Ways to save a tensor after which somebody else can still read its memory."""

    def remember(t: Tensor) -> Tensor:
        kept.append(t)
        return t

    def part(t: Tensor) -> Tensor:
        kept.append(t.view(-1)[:8])
        return t

    def numbers(t: Tensor) -> Any:
        kept.append(torch.from_numpy(t.detach().numpy().copy()))
        return kept[-1].numpy()

    def lazily(t: Tensor) -> Tensor:
        kept.append(t.detach().clone())
        return kept[-1]

    return {
        "the tensor": (remember, lambda t: t),
        "a view": (part, lambda t: t),
        "an array": (numbers, lambda a: torch.from_numpy(a) if isinstance(a, np.ndarray) else a),
        "a lazy copy": (lazily, lambda t: torch._lazy_clone(t)),
    }


@pytest.mark.parametrize("how", held_elsewhere([]))
def test_what_others_can_read_stays_what_it_is(how: str) -> None:
    given = draw((64, 16), "apart", "yes")
    calls = Calls(given)
    dy = torch.randn(64, 40)
    expected = expect(calls, given, dy)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(*held_elsewhere(kept)[how]):
        y = calls(given)
    before = [t.clone() for t in kept]
    same(torch.autograd.grad(y, wanted(given), dy), expected)
    assert calls.over == [False]
    assert len(kept) >= 2
    same(kept, before)


def test_checkpoints_and_copies_elsewhere() -> None:
    given = draw((64, 16), "apart", "yes")
    calls = Calls(given)
    dy = torch.randn(64, 40)
    expected = expect(calls, given, dy)
    y = checkpoint(lambda *t: calls(t), *given, use_reentrant=False)
    for again in (True, False):
        same(torch.autograd.grad(y, wanted(given), dy, retain_graph=again), expected)
    with torch.autograd.graph.save_on_cpu():
        y = calls(given)
    for again in (True, False):
        same(torch.autograd.grad(y, wanted(given), dy, retain_graph=again), expected)
    assert calls.over[0] is False


def test_a_backward_that_fails_is_not_tried_again_on_what_it_wrote() -> None:
    given = draw((64, 16), "apart", "yes")
    calls = Calls(given)
    y, dy = calls(given), torch.randn(64, 40)

    def refuse(*_: Any) -> None:
        raise MemoryError("no more")

    assert given[0] is not None
    given[0].register_hook(refuse)
    with pytest.raises(MemoryError):
        torch.autograd.grad(y, wanted(given), dy)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, wanted(given), dy)


def peak(run: Callable[[], object]) -> int:
    """Most bytes that were allocated at once meanwhile, by the profiler's account."""
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profiler:
        found = run()
    events = [e for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]"]  # type: ignore[union-attr]
    del found
    now = most = 0
    for e in sorted(events, key=lambda e: e.start_ns()):
        now += e.nbytes()
        most = max(most, now)
    return most


@pytest.mark.parametrize("order", ["apart", "gate_up"])
def test_peaks(order: str) -> None:
    """In numbers of M by H: two pre-activations, what the gate lets through, and the outer ones."""
    m, k, h = 512, 128, 1024
    given = draw((m, k), order, "no", sizes=(h, k))
    dy = torch.randn(m, k)
    own, outer = 4 * m * h, 4 * m * k
    weights = 4 * h * k
    for save in (True, False):
        calls = Calls(given, order, save=save)

        def step(again: bool, calls: Calls = calls) -> Any:
            return torch.autograd.grad(calls(given), wanted(given), dy, retain_graph=again)

        for _ in range(3):
            step(False)
        # beside h, y; or beside the gradients of all weights, dx and y
        least = 2 * own + max(own + outer + weights, 3 * weights + 2 * outer)
        assert least <= peak(lambda: step(False)) <= least + outer
        retained = peak(lambda: step(True))
        if save:
            assert retained >= least + 2 * own
        else:
            assert retained <= least + outer
    # without gradients, or where they are formed again, h takes the gate's memory
    halves = 2 if order == "apart" else 3
    assert peak(lambda: calls(given)) <= halves * own + outer
