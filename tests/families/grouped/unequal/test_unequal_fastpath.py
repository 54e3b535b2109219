"""unequal_linear through the compiled fast path: the same numbers as in Python, and what it must
not serve."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError
from fastlinear.families.grouped.unequal import autograd, layout
from fastlinear.families.grouped.unequal.autograd import Formula, applied
from fastlinear.families.grouped.unequal.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup, recorder
from tests.families.unserved import unserved

pytestmark = [
    pytest.mark.skipif(autograd_node.reason_not() is not None, reason="no C++ tapes here"),
    pytest.mark.skipif(unserved(torch.float32) is not None, reason="no kernels here"),
]
# (tokens, K, N)
SIZES = ((5, 3, 4), (1, 7, 65), (70, 100, 33), (130, 31, 1), (0, 8, 9), (2, 130, 70), (4, 0, 5))
LARGE = ((300, 200, 210), (20, 260, 130), (257, 64, 320))
Lists = tuple[list[Tensor], list[Tensor], list[Tensor | None] | None]


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    assert lookup.wait(), lookup.reason_not()
    assert autograd_node.wait(), autograd_node.reason_not()
    FRONT.forget()
    yield
    FRONT.forget()


def drawn(sizes: Sequence[Sequence[int]] = SIZES, dtype: torch.dtype = torch.float32) -> Lists:
    torch.manual_seed(len(sizes))

    def values(*shape: int) -> Tensor:
        return (torch.randn(shape) / max(1, shape[-1]) ** 0.5).to(dtype).requires_grad_()

    biases = [values(n) if g % 3 else None for g, (_, _, n) in enumerate(sizes)]
    return [values(m, k) for m, k, _ in sizes], [values(n, k) for _, k, n in sizes], biases


def leaves(lists: Lists) -> list[Tensor]:
    return [t for ts in lists for t in ts or () if t is not None and t.requires_grad]


def together(lists: Lists, activation: str = "relu") -> list[Tensor]:
    return fl.unequal_linear(*lists, activation=activation, backend="together")


def by_python(lists: Lists, activation: str = "relu") -> list[Tensor]:
    return applied(Formula(activation), *lists)


def served(ys: Sequence[Tensor]) -> bool:
    node = next((y.grad_fn for y in ys if y.requires_grad), None)
    return node is not None and node.name() == "UnequalLinearBackward"


def admitted(run: Callable[[], list[Tensor]]) -> list[Tensor]:
    """The third result: the first two calls and their backwards run in Python."""
    for _ in range(2):
        ys = run()
        trained = [y for y in ys if y.requires_grad]
        if trained:
            zeros = [torch.zeros_like(y) for y in trained]
            torch.autograd.backward(trained, zeros, inputs=trained[:1])
    return run()


def dys_of(ys: Sequence[Tensor]) -> list[Tensor]:
    return [torch.linspace(-1, 0.9, y.numel()).view(y.shape).to(y) for y in ys]


def same(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
    for a, e in zip(found, expected, strict=True):
        assert (a is None) == (e is None)
        if a is not None and e is not None:
            assert (a.shape, a.dtype, a.stride()) == (e.shape, e.dtype, e.stride())
            assert torch.equal(a, e)


def gradients(ys: Sequence[Tensor], wanted: Sequence[Tensor]) -> list[Tensor]:
    trained = [y for y in ys if y.requires_grad]
    return list(torch.autograd.grad(trained, wanted, dys_of(trained), retain_graph=True))


def compare(lists: Lists, activation: str = "relu", *, python: bool = False) -> None:
    """Calls through the fast path against the formula in Python: the first ones, and those that
    follow, by tapes alone unless they may run in ``python``."""
    wanted = leaves(lists)
    ys = admitted(lambda: together(lists, activation))
    assert served(ys)
    expected = by_python(lists, activation)
    same(ys, expected)
    grads = gradients(expected, wanted)
    same(gradients(ys, wanted), grads)
    with torch.no_grad():
        same(admitted(lambda: together(lists, activation)), expected)
    with pytest.MonkeyPatch.context() as watched:
        if not python:
            watched.setattr(autograd, "kernels", fails)
        for _ in range(2):
            ys = together(lists, activation)
            same(ys, expected)
            same(gradients(ys, wanted), grads)
        with torch.no_grad():
            same(together(lists, activation), expected)


def fails(_: Tensor) -> Any:
    raise AssertionError("in Python")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels_by_the_oracle_and_the_fast_path_by_them(
    activation: str, dtype: torch.dtype
) -> None:
    if unserved(dtype) is not None:
        pytest.skip("not served here")
    for sizes in (SIZES, LARGE):
        lists = drawn(sizes, dtype)
        torch.full((1 << 16,), float("nan"))  # what new memory holds
        compare(lists, activation)
        wide: Any = [[None if t is None else t.detach().double() for t in ts or ()] for ts in lists]
        for t in (t for ts in wide for t in ts if t is not None):
            t.requires_grad_()

        def results(run: Any, given: Any) -> list[Tensor]:
            ys = run(*given)
            dys = [dy.to(y) for dy, y in zip(dys_of(ys), ys, strict=True)]
            return [*ys, *torch.autograd.grad(ys, leaves(given), dys)]

        def loop(*given: Any) -> Any:
            return autograd.loop(*given, activation)

        ours = results(lambda *given: together(given, activation), lists)  # type: ignore[arg-type]
        theirs, oracle = results(loop, lists), results(loop, wide)
        count, end = len(sizes), len(ours)
        for i, name in enumerate(("y", "dx", "dW", "db")):
            kind = slice(i * count, end if i == 3 else (i + 1) * count)
            a, t, o = (torch.cat([r.flatten() for r in rs[kind]]) for rs in (ours, theirs, oracle))
            verdict = judge(name, a, t, o)
            assert verdict.passed, str(verdict)


def test_results_do_not_depend_on_threads() -> None:
    lists = drawn(LARGE)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            ys = by_python(lists, "gelu")
            found.append([*ys, *gradients(ys, leaves(lists))])
    finally:
        torch.set_num_threads(before)
    same(*found)


def test_no_biases_strides_dimensions_and_expanded_tensors() -> None:
    xs = [
        torch.randn(2, 8, 5).transpose(1, 2),
        torch.randn(6),
        torch.randn(7).expand(3, 2, 7),
        torch.randn(4, 20)[:, ::2],
    ]
    weights = [
        torch.randn(8, 3).t(),
        torch.randn(4, 12)[:, ::2],
        torch.randn(5, 7),
        torch.randn(1, 10),
    ]
    for biases in (None, [torch.randn(1).expand(3), None, torch.randn(10)[::2], torch.randn(1)]):
        lists: Lists = xs, weights, biases
        for t in (*xs, *weights, *(b for b in biases or () if b is not None)):
            t.requires_grad_()
        for activation in ("none", "relu", "gelu"):
            compare(lists, activation)
    ys = admitted(lambda: together(lists))
    assert [tuple(y.shape) for y in ys] == [(2, 5, 3), (4,), (3, 2, 5), (4, 1)]
    assert len({y.untyped_storage().data_ptr() for y in ys}) == 1
    expected = torch.autograd.grad([y.sum() for y in by_python(lists)], leaves(lists))
    for _ in range(3):  # expanded gradients
        same(torch.autograd.grad([y.sum() for y in together(lists)], leaves(lists)), expected)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_subsets_of_gradients(activation: str) -> None:
    lists = drawn()
    kinds: Any = lists
    everything = leaves(lists)
    for frozen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], []):
        for t in everything:
            t.requires_grad_()
        for i in frozen:
            for t in kinds[i][:: 2 if len(frozen) == 1 else 1]:
                if t is not None:
                    t.requires_grad_(False)
        compare(lists, activation)
    ys = admitted(lambda: together(lists, activation))
    for wanted in (everything[:1], lists[1][2:4], leaves(lists)[-1:]):
        expected = gradients(by_python(lists, activation), wanted)
        for _ in range(3):
            same(gradients(ys, wanted), expected)


def test_one_tensor_in_several_places() -> None:
    x, w, b = torch.randn(6, 8), torch.randn(8, 8), torch.randn(8)
    given = [t.requires_grad_() for t in (x, w, b)]
    lists: Lists = [x, torch.randn(3, 8), x], [w, w, w], [b, b, None]
    expected = gradients(autograd.loop(*lists, "relu"), given)
    ys = admitted(lambda: together(lists))
    assert served(ys)
    for _ in range(3):
        for a, e in zip(gradients(ys, given), expected, strict=True):
            torch.testing.assert_close(a, e)


def test_some_results_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = drawn()
    wanted = leaves(lists)

    def found(ys: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        total = ys[2].sum() + ys[0].sum()
        return torch.autograd.grad(total, wanted, retain_graph=True, allow_unused=True)

    for activation in ("relu", "gelu"):
        ys = admitted(lambda a=activation: together(lists, a))  # type: ignore[misc]
        expected = found(by_python(lists, activation))
        assert sum(t is not None for t in expected) < len(expected)
        same(found(ys), expected)
        with monkeypatch.context() as watched:
            watched.setattr(autograd, "kernels", fails)
            same(found(ys), expected)


def test_saved_tensors() -> None:
    lists = drawn()
    ys = admitted(lambda: together(lists))
    with torch.no_grad():
        ys[2].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(ys, leaves(lists))
    ys = together(lists)
    ys[2].backward(torch.ones_like(ys[2]))
    with pytest.raises(RuntimeError, match="second time"):
        ys[0].backward(torch.ones_like(ys[0]))
    ys = admitted(lambda: together(lists, "none"))
    expected = gradients(by_python(lists, "none"), leaves(lists))
    same(gradients([y.add_(1) for y in ys], leaves(lists)), expected)
    weight = lists[1][2]
    ys = admitted(lambda: together(lists))
    with torch.no_grad():
        weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(ys, leaves(lists))
    same(together(lists), by_python(lists))  # weights are read at every call


def saved_by(run: Any, lists: Lists, activation: str) -> list[Any]:
    packed: list[Any] = []

    def pack(t: Tensor) -> Tensor:
        packed.append((t.shape, t.dtype))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run(lists, activation)
    return packed


def test_the_same_is_saved_whichever_records() -> None:
    lists = drawn()
    for activation in ("none", "relu", "gelu"):
        admitted(lambda a=activation: together(lists, a))  # type: ignore[misc]
        assert saved_by(by_python, lists, activation) == saved_by(together, lists, activation)


def test_derivatives_of_every_kind() -> None:
    lists = drawn(SIZES[:3])
    wanted = leaves(lists)
    admitted(lambda: together(lists, "tanh"))

    def second(run: Any) -> Any:
        ys = run(lists, "tanh")
        assert run is by_python or served(ys)
        first = torch.autograd.grad([y.square().sum() for y in ys], wanted, create_graph=True)
        return torch.autograd.grad([g.square().sum() for g in first], wanted)

    for a, e in zip(second(together), second(by_python), strict=True):
        torch.testing.assert_close(a, e)
    ys = together(lists, "tanh")
    many = [torch.randn(3, *y.shape) for y in ys]
    found = torch.autograd.grad(ys, wanted, many, is_grads_batched=True, retain_graph=True)
    for i in range(3):
        one = torch.autograd.grad(ys, wanted, [dy[i] for dy in many], retain_graph=True)
        for a, e in zip(found, one, strict=True):
            torch.testing.assert_close(a[i], e)
    with forward_ad.dual_level():
        tangents = [torch.randn_like(y) for y in ys]
        dys = [forward_ad.make_dual(dy, t) for dy, t in zip(dys_of(ys), tangents, strict=True)]
        duals = torch.autograd.grad(ys, wanted, dys, retain_graph=True)
        found = [forward_ad.unpack_dual(d).tangent for d in duals]
    for a, e in zip(found, torch.autograd.grad(ys, wanted, tangents), strict=True):
        torch.testing.assert_close(a, e)


def test_checkpoints_and_accumulation() -> None:
    lists = drawn()
    admitted(lambda: together(lists))
    for reentrant in (False, True):
        for t in leaves(lists):
            t.grad = None
        for _ in range(2):
            ys = checkpoint(lambda *_: tuple(together(lists)), *lists[0], use_reentrant=reentrant)
            torch.autograd.backward(ys, dys_of(ys))
        once = gradients(by_python(lists), leaves(lists))
        for t, e in zip(leaves(lists), once, strict=True):
            torch.testing.assert_close(t.grad, 2 * e)


def test_compiled_autograd() -> None:
    from torch._dynamo import compiled_autograd

    lists = drawn(SIZES[:3])
    expected = gradients(by_python(lists), leaves(lists))
    admitted(lambda: together(lists))
    for _ in range(2):
        for t in leaves(lists):
            t.grad = None
        ys = together(lists)
        assert served(ys)
        with compiled_autograd._enable(lambda g: torch.compile(g, backend="eager")):
            torch.autograd.backward(ys, dys_of(ys))
        for t, e in zip(leaves(lists), expected, strict=True):
            torch.testing.assert_close(t.grad, e)


class Odd(Tensor):
    pass


def test_what_is_not_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = drawn(SIZES[:3])
    xs, weights, biases = lists
    assert biases is not None
    admitted(lambda: together(lists))
    calls: list[Any] = []
    looked_up = FRONT.looked_up
    monkeypatch.setattr(FRONT, "looked_up", lambda *g: calls.append(g) or looked_up(*g))
    assert served(together(lists))
    assert not calls

    def replaced(kind: list[Any], i: int, t: Any) -> list[Any]:
        return [*kind[:i], t, *kind[i + 1 :]]

    changed: list[tuple[str, Lists]] = [
        ("rows", (replaced(xs, 2, torch.randn(71, 100)), weights, biases)),
        ("dimensions", (replaced(xs, 2, xs[2].view(7, 10, 100)), weights, biases)),
        ("strides", (replaced(xs, 2, xs[2].t().contiguous().t()), weights, biases)),
        ("negative", (replaced(xs, 2, torch._neg_view(xs[2])), weights, biases)),
        ("a weight", (xs, replaced(weights, 1, torch.randn(64, 7)), [None, None, biases[2]])),
        ("a bias less", (xs, weights, [None, None, biases[2]])),
        ("no biases", (xs, weights, None)),
        ("less groups", (xs[:2], weights[:2], biases[:2])),
        ("a subclass", (xs, replaced(weights, 1, weights[1].as_subclass(Odd)), biases)),
    ]
    for name, given in changed:
        calls.clear()
        backend = None if name == "a subclass" else "together"
        ys = fl.unequal_linear(*given, activation="relu", backend=backend)
        assert calls, name
        for a, e in zip(ys, autograd.loop(*given, "relu"), strict=True):
            torch.testing.assert_close(a, e)
    calls.clear()
    with torch.no_grad():
        assert not together(lists)[0].requires_grad
    assert calls
    for t in leaves(lists):  # none wants gradients any longer
        t.requires_grad_(False)
    assert not together(lists)[0].requires_grad
    with pytest.raises(InputError):
        together((xs[:2], weights, biases))
    with pytest.raises(InputError, match="dtype"):
        together((replaced(xs, 0, xs[0].double()), weights, biases))
    with pytest.raises(InputError, match="input 0 to be a tensor"):
        together((replaced(xs, 0, 1.0), weights, biases))


def test_states_that_it_must_not_serve() -> None:
    lists = drawn(SIZES[:3])
    xs, weights, biases = lists
    admitted(lambda: fl.unequal_linear(*lists, activation="relu"))
    with torch.no_grad():
        admitted(lambda: fl.unequal_linear(*lists, activation="relu"))
    with torch.autocast("cpu", torch.bfloat16):
        ys = fl.unequal_linear(*lists, activation="relu")
    assert {y.dtype for y in ys} == {torch.bfloat16}
    with FlopCounterMode(display=False) as counter:
        fl.unequal_linear(*lists, activation="relu")
    assert counter.get_total_flops() == sum(2 * m * k * n for m, k, n in SIZES[:3])
    tangents = [torch.randn_like(x) for x in xs]
    with torch.no_grad(), forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(xs, tangents, strict=True)]
        ys = fl.unequal_linear(duals, weights, biases)
        found = [forward_ad.unpack_dual(y).tangent for y in ys]
    for a, t, w in zip(found, tangents, weights, strict=True):
        torch.testing.assert_close(a, t @ w.t())
    plain: Any = [[None if t is None else t.detach() for t in ts or ()] for ts in lists]

    def total(x: Tensor) -> Tensor:
        return sum(y.sum() for y in fl.unequal_linear([x, *plain[0][1:]], *plain[1:]))  # type: ignore[return-value]

    torch.testing.assert_close(torch.func.grad(total)(plain[0][0]), torch.ones(5, 4) @ plain[1][0])
    batch = torch.randn(4, *xs[0].shape)
    found = torch.func.vmap(lambda x: fl.unequal_linear([x, *plain[0][1:]], *plain[1:])[0])(batch)
    torch.testing.assert_close(found, batch @ plain[1][0].t())
    with torch.inference_mode():
        for _ in range(3):
            ys = fl.unequal_linear(*lists, activation="relu", backend="together")
            assert all(y.is_inference() for y in ys)
    same(ys, by_python(lists))


def test_sequences_of_any_kind() -> None:
    xs, weights, _ = drawn(SIZES[:3])
    expected = by_python((xs, weights, None))
    parameters = torch.nn.ParameterList(weights)
    for given in ((xs, weights), (tuple(xs), tuple(weights)), (xs, parameters)):
        for _ in range(3):
            ys = fl.unequal_linear(*given, activation="relu", backend="together")
            assert type(ys) is list
            same(ys, expected)
        assert served(ys)
    ys = fl.unequal_linear(iter(xs), iter(weights), activation="relu", backend="together")  # type: ignore[arg-type]
    same(ys, expected)


def test_more_groups_than_the_fast_path_reads_and_changing_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = tuple((1 + g % 5, 3 + g % 7, 2 + g % 4) for g in range(300))
    lists = drawn(sizes)
    for _ in range(3):
        same(together(lists), by_python(lists))
    compare(drawn(sizes[:240]))
    monkeypatch.setattr(FRONT, "spec", replace(FRONT.spec, most_plans=3))
    for rows in (1, 2, 3, 4, 5, 1, 2):
        compare(drawn(((rows, 5, 6), (2 * rows, 6, 7))), python=True)
        assert len(FRONT.plans) <= 3


def test_the_loop_too() -> None:
    lists = drawn(SIZES[:3], torch.float64)
    expected = autograd.loop(*lists, "relu")
    for _ in range(3):
        ys = fl.unequal_linear(*lists, activation="relu")
        same(ys, expected)
        same(gradients(ys, leaves(lists)), gradients(expected, leaves(lists)))


def test_threads_and_copies() -> None:
    lists = drawn(LARGE)
    admitted(lambda: together(lists, "gelu"))
    expected = by_python(lists, "gelu")
    found: list[Any] = [None] * 4

    def work(i: int) -> None:
        for _ in range(5):
            ys = together(lists, "gelu")
            found[i] = [*ys, *gradients(ys, leaves(lists))]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    for one in found:
        same(one, [*expected, *gradients(expected, leaves(lists))])
    with torch.no_grad():
        ys = copy.deepcopy(together(lists, "gelu"))
    same(ys, expected)


@pytest.mark.parametrize("activation", ["relu", "gelu", "none"])
def test_frozen_groups_have_no_gradients(activation: str) -> None:
    """As a layer of PyTorch whose tensors are all frozen; the others keep theirs."""
    lists = drawn()
    for ts in lists:
        for g in (0, 2):
            if ts is not None and ts[g] is not None:
                ts[g].requires_grad_(False)
    wanted = leaves(lists)
    for _ in range(4):  # the first two in Python
        ys = together(lists, activation)
        assert [y.requires_grad for y in ys] == [g not in (0, 2) for g in range(len(ys))]
        trained = [y.square().sum() for y in ys if y.requires_grad]
        found = torch.autograd.grad(trained, wanted, create_graph=True)
        torch.autograd.grad([t.square().sum() for t in found], wanted)
        loop = fl.unequal_linear(*lists, activation=activation, backend="eager")
        expected = torch.autograd.grad([y.square().sum() for y in loop if y.requires_grad], wanted)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
        ys = together(lists, activation)
        plain = torch.autograd.grad([y.square().sum() for y in ys if y.requires_grad], wanted)
        for a, b in zip(plain, expected, strict=True):
            torch.testing.assert_close(a, b)


def pieces(dtype: torch.dtype, dims: Sequence[int], widths: Sequence[int]) -> tuple[Tensor, ...]:
    """Parts of one tensor along its last dimension, which lie beside each other."""
    return torch.randn(*dims, sum(widths)).to(dtype).split(widths, -1)


def copies_of(run: Callable[[], Any]) -> int:
    """How many times PyTorch copies a tensor."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
        run()
    return sum(event.name in ("aten::clone", "aten::copy_") for event in found.events())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
def test_pieces_of_one_tensor_are_read_where_they_lie(activation: str, dtype: torch.dtype) -> None:
    if unserved(dtype) is not None:
        pytest.skip("not served here")
    sizes = [(k, n) for _, k, n in (*SIZES, *LARGE) if k]
    for dims in ((1,), (3,), (2, 20), (300,)):
        _, weights, biases = drawn([(1, *size) for size in sizes], dtype)
        xs = list(pieces(dtype, dims, [k for k, _ in sizes]))
        dys = pieces(dtype, dims, [n for _, n in sizes])
        lists = xs, weights, biases
        wanted = leaves((xs, weights, biases))
        own = [x.contiguous() for x in xs], weights, biases
        expected = by_python(own, activation)
        grads = torch.autograd.grad(expected, wanted, [dy.contiguous() for dy in dys])
        assert not any(y.is_contiguous() for y in dys) or dims == (1,)
        same(by_python(lists, activation), expected)
        same(torch.autograd.grad(by_python(lists, activation), wanted, dys), grads)
        ys = admitted(lambda given=lists: together(given, activation))  # type: ignore[misc]
        assert served(ys)
        for _ in range(2):
            same(torch.autograd.grad(ys, wanted, dys, retain_graph=True), grads)

        def step(given: Lists = lists, y: Sequence[Tensor] = dys, w: Any = wanted) -> None:
            torch.autograd.grad(together(given, activation), w, y)

        assert not copies_of(step)


def test_inputs_are_differentiated_behind_their_split() -> None:
    sizes = [(k, n) for _, k, n in SIZES if k]
    _, weights, biases = drawn([(1, *size) for size in sizes])
    x = torch.randn(9, sum(k for k, _ in sizes), requires_grad=True)

    def found(run: Any) -> tuple[Tensor, ...]:
        ys = run((list(x.split([k for k, _ in sizes], 1)), weights, biases))
        return torch.autograd.grad(torch.cat(ys, 1).square().sum(), [x, *weights])

    expected = found(by_python)
    for _ in range(4):
        for a, e in zip(found(together), expected, strict=True):
            assert torch.equal(a, e)


def test_gradients_that_lie_otherwise_have_tapes_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kind of memory asks Python once, a row's none, and no more than four are kept."""
    asked = 0
    gradients_of = Formula.gradients

    def counted(*given: Any, **more: Any) -> Any:
        nonlocal asked
        asked += recorder.active() is None
        return gradients_of(*given, **more)

    monkeypatch.setattr(Formula, "gradients", counted)
    for tokens, most in ((3, 1), (1, 0)):
        lists = drawn([(tokens, 8, 6)] * 3)
        wanted = leaves(lists)
        ys = admitted(lambda given=lists: together(given))  # type: ignore[misc]
        gradients(ys, wanted)
        asked = 0
        for skipped in (*range(1, 4), *range(1, 4)):
            dys = torch.randn(tokens, 3 * 6 + skipped)[:, skipped:].split(6, 1)
            grads = torch.autograd.grad(ys, wanted, dys, retain_graph=True)
            dense = torch.autograd.grad(
                ys, wanted, [dy.contiguous() for dy in dys], retain_graph=True
            )
            same(grads, dense)
        assert asked == 3 * most
        for skipped in (4, 5, 4, 5):  # one of these would be a fifth
            dys = torch.randn(tokens, 3 * 6 + skipped)[:, skipped:].split(6, 1)
            torch.autograd.grad(ys, wanted, dys, retain_graph=True)
        assert asked == 3 * most + (4 if most else 0)


def test_pitches() -> None:
    wide = torch.empty(2, 3, 10)
    assert layout.pitch_of(wide) == 10
    assert layout.pitch_of(wide[..., 2:7]) == 10
    assert layout.pitch_of(wide[:, :1, 2:7]) == 30
    assert layout.pitch_of(wide[:, :2, 2:7]) is None, "several distances"
    assert layout.pitch_of(wide[..., ::2]) is None
    assert layout.pitch_of(wide.transpose(1, 2)) is None
    assert layout.pitch_of(wide[0, 0].expand(4, 10)) == 0
    assert layout.pitch_of(wide[0, 0, ::2]) is None
    assert layout.pitch_of(wide[:, :, :1]) == 10
    assert layout.pitch_of(wide[:0]) == 10
    assert [layout.step_of(64 | pitch) for pitch in (72, 68, 66, 65)] == [8, 2, 2, 1]
    assert layout.pitch_of(torch.empty(2, 2**31, device="meta")[:, :5]) is None
