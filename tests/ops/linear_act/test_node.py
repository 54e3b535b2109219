"""Training calls recorded in C++: the very results of the Python formula, and all that autograd
may ask of a node."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import fastlinear as fl
from fastlinear.core.compare import judge
from fastlinear.dispatch import cache
from fastlinear.ops.common import door, door_node
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import backends, onednn, programs, reference
from fastlinear.ops.linear_act.autograd import Formula, LinearAct, backward_from
from fastlinear.ops.linear_act.backends import problem
from fastlinear.ops.linear_act.plans import Training

pytestmark = pytest.mark.skipif(door_node.reason_not() is not None, reason="no C++ nodes here")

Given = tuple[Tensor, Tensor, Tensor | None]
ONEDNN = onednn.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu")) is None
PIECES = ("grad_pre", "grad_input", "grad_weight")
EAGER = {"forward": "eager", **dict.fromkeys(PIECES, "eager")}
ALL = (True, True, True)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert door.wait(), door.reason_not()
    assert door_node.wait(), door_node.reason_not()


def loaded(piece: str, name: str) -> Callable[..., Any]:
    (found,) = [b for b in backends.FAMILY.candidates(piece) if b.name == name]
    return found.load()


def trained(activation: str, **names: str) -> Training:
    """A training call's recipe out of named backends."""
    names = {**EAGER, **names}
    if "backward" in names:
        backward = loaded("backward", names["backward"])
        pieces = {"backward": names["backward"]}
    else:
        pieces = {p: names[p] for p in PIECES}
        backward = backward_from(*(loaded(p, n) for p, n in pieces.items()))
    forward = loaded("forward", names["forward"])
    formula = Formula(activation, activation_of(activation).saved, forward, backward)
    return Training(formula, names["forward"], pieces)


class Way:
    """Calls of one recipe through the door, and the backwards that Python ran."""

    def __init__(self, training: Training, *given: Tensor | None) -> None:
        self.ran = 0
        plain = training.formula.backward

        def counted(*arguments: Any) -> Any:
            self.ran += 1
            return plain(*arguments)

        formula = Formula(
            training.formula.activation, training.formula.saved, training.formula.run, counted
        )
        self.formula = formula
        self.training = Training(formula, training.forward, training.backward)
        found = door.table("linear_act.test")
        assert found is not None
        self.table = found
        found.clear()
        self.admit(*given)

    def admit(self, x: Tensor, w: Tensor, b: Tensor | None) -> None:
        LinearAct.apply(x, w, b, self.formula)
        if x.is_cuda:
            assert door.serves_cuda()
            assert door_node.serves_cuda()
        plan = programs.node(self.training, x, w, b)
        assert plan is not None
        assert self.table.admit(x, w, b, self.formula.activation, None, plan)

    def __call__(self, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
        y = self.table.call(x, w, b, self.formula.activation, None)
        if not torch.is_grad_enabled():  # a checkpoint's first run
            assert y is None
            return reference.linear_act(x, w, b, self.formula.activation)
        assert y is not None
        assert y.grad_fn.name() == "LinearActBackward"
        assert not isinstance(y.grad_fn, torch.autograd.function.BackwardCFunction)
        return y  # type: ignore[no-any-return]


def leaves(*x_shape: int, n: int = 5, needs: tuple[bool, ...] = ALL, **kind: Any) -> Any:
    k = x_shape[-1]
    made = torch.randn(x_shape, **kind), torch.randn(n, k, **kind) / k**0.5, torch.randn(n, **kind)
    return tuple(t.requires_grad_(need) for t, need in zip(made, needs, strict=True))


def close(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual, expected, rtol=2e-5, atol=2e-5)


def same(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert (s is None) == (t is None)
        if s is not None:
            assert s.shape == t.shape
            assert s.dtype == t.dtype
            assert torch.equal(s, t), (s - t).abs().max()


CPU = [{}]
if backends.FAMILY.candidates("grad_pre")[0] is not None:
    CPU += [{"forward": "cpp"}, {"grad_pre": "cpp"}, {"forward": "cpp", "grad_pre": "cpp"}]
if ONEDNN:
    CPU += [{"forward": "onednn", "grad_input": "onednn", "grad_weight": "onednn"}]


def able(names: dict[str, str], activation: str, device: str, dtype: str = "float32") -> bool:
    for piece, name in names.items():
        (backend,) = [b for b in backends.FAMILY.candidates(piece) if b.name == name]
        p = problem(piece, 4, 8, 8, dtype=dtype, device=device, activation=activation)
        if backend.reason_not(p) is not None:
            return False
    return True


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
        way(*given).sum().backward()  # from here on by the program
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
        way(x, w, b).sum().backward()  # from here on by the program
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
    del way.training
    y = way(*given)
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
    training = trained("relu")

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("of ours")

    broken = Formula("relu", "output", training.formula.run, fails)
    way = Way(Training(broken, "eager", training.backward), x, w, b)
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


@pytest.fixture
def _forgotten() -> Iterator[None]:
    cache.forget()
    yield
    cache.forget()


@pytest.mark.usefixtures("_forgotten")
def test_the_op_records_small_layers_so() -> None:
    layer = fl.nn.Linear(16, 16, activation="relu")
    x = torch.randn(4, 16)
    for _ in range(3):
        y = layer(x)
        y.sum().backward()
    assert y.grad_fn.name() == "LinearActBackward"
    with torch.no_grad():
        assert layer(x).grad_fn is None


# --------------------------------------------------------------------------------------------
# On a GPU

LAUNCHED = [
    ({"forward": "triton", "backward": "triton"}, (2, 64)),
    ({"forward": "triton", "grad_pre": "triton"}, (300,)),
    ({"grad_pre": "triton", "grad_input": "triton", "grad_weight": "triton"}, (64, 300)),
    ({"forward": "cuda", "backward": "triton"}, (1, 64)),
    ({"forward": "cuda", "grad_pre": "triton"}, (300, 4096)),
    ({}, (1, 300)),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's own thread, at first
@pytest.mark.parametrize("case", LAUNCHED, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_launches_give_the_bits_of_the_python_formula(case: Any, dtype: str) -> None:
    names, rows = case
    if not able(names, "gelu", "cuda", dtype):
        pytest.skip("a backend does not serve this")
    kind: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype)}
    for m, activation in itertools.product(rows, ("none", "relu", "gelu_tanh")):
        for shape, needs in (((m, 160), ALL), ((2, m, 160), ALL), ((m, 160), (False, True, True))):
            if activation == "relu" and (len(shape) == 3 or needs != ALL):
                continue
            if "backward" in names and shape[0] * m > 64 and len(shape) == 3:
                continue
            given = leaves(*shape, n=96, needs=needs, **kind)
            wanted = [t for t in given if t.requires_grad]
            way = Way(trained(activation, **names), *given)
            expected = LinearAct.apply(*given, way.formula)
            for _ in range(3):
                dy = torch.randn(expected.shape, **kind)
                before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
                ran = way.ran
                y = way(*given)
                same(
                    [y, *torch.autograd.grad(y, wanted, dy)],
                    [expected, *before],
                )
            # what takes descriptors or more than launches is Python's
            more = ("grad_weight" in names and m > 64) or (activation == "none" and m > 2000)
            assert way.ran == ran or more, (m, activation, shape)


@pytest.mark.gpu
def test_streams_and_threads() -> None:
    x, w, b = leaves(64, 128, n=128, device="cuda", dtype=torch.bfloat16)
    way = Way(trained("gelu_tanh", forward="triton", backward="triton"), x, w, b)
    dy = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    expected = torch.autograd.grad(way(x, w, b), (x, w, b), dy)
    same(torch.autograd.grad(way(x, w, b), (x, w, b), dy), expected)
    side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            late = dy * 1
            found = torch.autograd.grad(way(x, w, b), (x, w, b), late)
        torch.cuda.current_stream().wait_stream(side)
        same(found, expected)
    results: list[Any] = []

    def work() -> None:
        torch.cuda.current_stream().synchronize()  # a thread's first call makes it known to CUDA
        results.extend(torch.autograd.grad(way(x, w, b), (x, w, b), dy) for _ in range(30))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    assert len(results) == 120
    for found in results:
        same(found, expected)


@pytest.mark.gpu
def test_memory_on_the_device_is_given_back() -> None:
    x, w, b = leaves(64, 512, n=512, device="cuda")
    way = Way(trained("gelu_tanh"), x, w, b)
    for _ in range(3):
        torch.autograd.grad(way(x, w, b).sum(), (x, w, b))
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        torch.autograd.grad(way(x, w, b).sum(), (x, w, b))
    assert torch.cuda.memory_allocated() == before
