"""Training calls recorded in C++: all that autograd may ask of a node."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from fastlinear.families.linear import reference
from fastlinear.families.linear.autograd import Formula
from tests.families.compiled_nodes import needs_nodes
from tests.families.linear.node_ways import CPU, Way, able, close, leaves, same, trained

pytestmark = needs_nodes


def test_retain_graph_then_an_error() -> None:
    x, w, b = leaves(4, 6)
    for activation in ("none", "relu", "gelu"):
        way = Way(trained(activation), x, w, b)
        for wanted in ((x, w, b), (b,)):
            for _ in range(2):
                y = way(x, w, b).sum()
                first = torch.autograd.grad(y, wanted, retain_graph=True)
                same(first, torch.autograd.grad(y, wanted))
                with pytest.raises(RuntimeError, match=r"second time|freed"):
                    torch.autograd.grad(y, wanted)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_a_change_of_what_was_saved_is_noticed(activation: str) -> None:
    for changed in (0, 1, None):
        given = leaves(4, 6)
        way = Way(trained(activation), *given)
        way(*given).sum().backward()  # from here on by the tape
        y = way(*given)
        with torch.no_grad():
            if changed is not None:
                given[changed].mul_(2)
            elif activation == "relu":
                y.mul_(2)
            else:
                continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_y_may_be_changed_in_place_where_it_is_not_saved() -> None:
    for shape in ((4, 6), (2, 2, 6)):
        given = leaves(*shape)
        way = Way(trained("gelu"), *given)
        y = way(*given)
        y.mul_(2)
        y[0].add_(1)
        (z := 2 * F.gelu(F.linear(*given)))[0].add_(1)
        close(torch.autograd.grad(y.sum(), given), torch.autograd.grad(z.sum(), given))


def test_hooks() -> None:
    x, w, b = leaves(4, 6)
    way = Way(trained("silu"), x, w, b)
    seen: list[str] = []
    for _ in range(2):
        seen.clear()
        y = way(x, w, b)
        y.retain_grad()
        y.register_hook(lambda g: (seen.append("y"), g * 2)[1])
        y.grad_fn.register_prehook(lambda gs: seen.append(f"pre {len(gs)}"))
        y.grad_fn.register_hook(lambda gi, go: seen.append(f"post {len(gi)} {len(go)}"))
        handle = w.register_hook(lambda g: (seen.append("w"), g + 1)[1])
        y.sum().backward()
        handle.remove()
        assert seen[:2] == ["y", "pre 2"]
        assert sorted(seen[2:]) == ["post 3 2", "w"]
        assert y.grad is not None
        close(y.grad, torch.full((4, 5), 2.0))
        dx, dw, db = torch.autograd.grad(F.silu(F.linear(x, w, b)), (x, w, b), y.grad)
        close([x.grad, w.grad, b.grad], [dx, dw + 1, db])
        x.grad = w.grad = b.grad = None


def test_subsets_and_accumulation() -> None:
    x, w, b = leaves(4, 6)
    way = Way(trained("gelu"), x, w, b)
    for wanted in ((x,), (w,), (b,), (x, b), (w, b), (b, w, x)):
        for _ in range(3):
            dy = torch.randn(4, 5)
            ours = torch.autograd.grad(way(x, w, b), wanted, dy)
            close(ours, torch.autograd.grad(F.gelu(F.linear(x, w, b)), wanted, dy))
    y = way(x * 2, w, b)
    (y.sum() + way(x, w, b).square().sum() + x.sum()).backward()
    z = F.gelu(F.linear(x * 2, w, b)).sum() + F.gelu(F.linear(x, w, b)).square().sum() + x.sum()
    close([x.grad, w.grad, b.grad], list(torch.autograd.grad(z, (x, w, b))))
    assert w.grad is not None
    assert w.grad.is_contiguous()


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(reentrant: bool) -> None:
    from torch.utils.checkpoint import checkpoint

    x, w, b = leaves(4, 6)
    for activation in ("relu", "gelu_tanh"):
        way = Way(trained(activation), x, w, b)
        for _ in range(2):
            x.grad = w.grad = b.grad = None
            checkpoint(lambda t, f=way: f(t, w, b), x, use_reentrant=reentrant).sum().backward()
            y = reference.linear_act(x, w, b, activation)
            close([x.grad, w.grad, b.grad], list(torch.autograd.grad(y.sum(), (x, w, b))))


@pytest.mark.parametrize("names", CPU, ids=str)
def test_saved_tensors_hooks(names: dict[str, str]) -> None:
    """What is saved is seen and given back, even as tensors laid out otherwise."""
    x, w, b = leaves(4, 6)
    for activation in ("none", "relu", "silu"):
        if not able(names, activation, "cpu"):
            continue
        way = Way(trained(activation, **names), x, w, b)
        way(x, w, b).sum().backward()  # from here on by the tape
        for unpack in (lambda t: t, lambda t: t.clone(), lambda t: t.t().contiguous().t()):
            seen: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda t, s=seen: s.append(t) or t, unpack
            ):
                y = way(x, w, b)
            assert len(seen) == (2 if activation == "none" else 3)
            z = reference.linear_act(x, w, b, activation)
            close(torch.autograd.grad(y.sum(), (x, w, b)), torch.autograd.grad(z.sum(), (x, w, b)))


@pytest.mark.parametrize("needs", [n for n in itertools.product((False, True), repeat=3) if any(n)])
def test_only_what_is_read_is_kept(needs: tuple[bool, ...]) -> None:
    given = [t * 1 for t in leaves(4, 6, needs=needs)]
    way = Way(trained("none"), *given)
    y = way(*given)
    del way
    kept = [weakref.ref(t) for t in given[:2]]
    del given
    gc.collect()
    assert [r() is not None for r in kept] == [needs[1], needs[0]]
    y.sum().backward()
    gc.collect()
    assert [r() is None for r in kept] == [True, True]


def test_nothing_leaks() -> None:
    x, w, b = leaves(8, 6)
    way = Way(trained("gelu"), x, w, b)

    def objects() -> int:
        gc.collect()
        return sum(issubclass(type(o), Tensor) for o in gc.get_objects())

    for _ in range(3):
        way(x, w, b).sum().backward()
    before = objects()
    for _ in range(50):
        way(x, w, b).sum().backward()
        way(x, w, b)
        torch.autograd.grad(way(x, w, b).sum(), x, create_graph=True)
    assert objects() == before


def test_an_error_in_python_keeps_its_type() -> None:
    x, w, b = leaves(4, 6)
    formula = trained("relu")

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("of ours")

    broken = Formula("relu", "output", formula.run, fails)
    way = Way(broken, x, w, b)
    for _ in range(2):
        y = way(x, w, b)
        with pytest.raises(ZeroDivisionError, match="of ours"):
            y.sum().backward()
    way = Way(trained("relu"), x, w, b)  # the engine is as good as before
    way(x, w, b).sum().backward()


def test_threads() -> None:
    """Graphs of many threads through one plan, and one graph of many threads."""
    x, w, b = leaves(16, 32, n=32)
    way = Way(trained("gelu"), x, w, b)
    dy = torch.randn(16, 32)
    expected = torch.autograd.grad(way(x, w, b), (x, w, b), dy)
    shared = way(x, w, b)
    wrong: list[Any] = []

    def work() -> None:
        try:
            for _ in range(40):
                same(torch.autograd.grad(way(x, w, b), (x, w, b), dy), expected)
                same(torch.autograd.grad(shared, (x, w, b), dy, retain_graph=True), expected)
        except AssertionError as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


@pytest.mark.filterwarnings("ignore:This process")
def test_a_forked_child_trains() -> None:
    x, w, b = leaves(4, 6)
    way = Way(trained("relu"), x, w, b)
    y = way(x, w, b)
    child = os.fork()
    if child == 0:
        try:
            y.sum().backward()
            for _ in range(3):
                way(x, w, b).sum().backward()
            os._exit(7 if x.grad is not None else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    y.sum().backward()


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
def test_modes_take_the_way_through_python() -> None:
    x, w, b = leaves(4, 6)
    way = Way(trained("relu"), x, w, b)
    for _ in range(2):
        way(x, w, b).sum().backward()
    ran = way.ran
    y = way(x, w, b).sum()
    with FlopCounterMode(display=False) as counter:
        y.backward()
    assert counter.get_total_flops() == 2 * 2 * 4 * 6 * 5
    assert way.ran == ran + 1
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert way.table.call(x, w, b, "relu", None) is None
    with torch.autograd.detect_anomaly(check_nan=True):
        way(x, w, b).sum().backward()
        bad = way(x, w, b)
        with pytest.raises(RuntimeError, match="LinearActBackward"):
            torch.autograd.grad(bad, w, torch.full((4, 5), float("nan")))
    with torch.no_grad():
        assert way.table.call(x, w, b, "relu", None) is None


def test_the_profiler_sees_forward_and_backward() -> None:
    x, w, b = leaves(4, 6)
    way = Way(trained("relu"), x, w, b)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        way(x, w, b).sum().backward()
    events = {e.name: e.sequence_nr for e in found.events() if "LinearAct" in e.name}
    assert events["LinearAct"] >= 0
    assert events["LinearAct"] == events["LinearActBackward"]


@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_batched_gradients(activation: str) -> None:
    """A Jacobian in one batched backward, as torch.autograd.functional takes it."""
    x, w, b = leaves(3, 4)
    way = Way(trained(activation), x, w, b)
    for _ in range(2):
        way(x, w, b).sum().backward()
    found = torch.autograd.functional.jacobian(lambda t: way(t, w, b), x, vectorize=True)
    close(
        found,
        torch.autograd.functional.jacobian(lambda t: reference.linear_act(t, w, b, activation), x),
    )


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_compiled_autograd(activation: str) -> None:
    from torch._dynamo import compiled_autograd

    given = leaves(4, 6)
    way = Way(trained(activation), *given)
    expected = torch.autograd.grad(reference.linear_act(*given, activation).sum(), given)
    for _ in range(3):
        y = way(*given)
        with compiled_autograd._enable(lambda g: torch.compile(g, backend="eager")):
            y.sum().backward()
        close([t.grad for t in given], list(expected))
        for t in given:
            t.grad = None
