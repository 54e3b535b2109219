"""ragged_linear's C++ on a CPU, called from Python and by the compiled fast path's tapes."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.compare import Verdict, judge
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.families.grouped.ragged import backends, explain, formula, products
from fastlinear.families.grouped.ragged.cpu import cpp
from fastlinear.families.grouped.ragged.problem import problem
from fastlinear.families.grouped.ragged.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.rewrite.verify.verdicts import pool

_X, _W = torch.empty(2, 4), torch.empty(1, 3, 4)
DTYPES = [torch.float32, torch.bfloat16]
RESULTS = ("y", "dx", "dW", "db")
SIZES = (
    [3, 0, 20, 17],  # all rows
    [0, 0, 0, 0],
    [40, 0, 0, 0],
    [1, 2, 5, 9],  # few, and rows of no group
    [0, 33, 0, 0],
)


@pytest.fixture(autouse=True)
def _served(request: pytest.FixtureRequest) -> None:
    """Only what this processor serves; compiles the library at first."""
    dtype = getattr(request.node, "callspec", None) and request.node.callspec.params.get("dtype")
    name = DTYPE_NAMES[dtype or torch.float32]
    (backend,) = [b for b in backends.FAMILY.candidates("forward") if b.name == "cpp"]
    why = backend.why_not_ready(problem("forward", 2, 1, 4, 3, dtype=name, device="cpu"))
    if why is not None:
        pytest.skip(why)


@pytest.fixture(params=[1, 2, 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def drawn(k: int, n: int, dtype: torch.dtype = torch.float32, rows: int = 40) -> list[Tensor]:
    """x, weight and bias of four groups, which want gradients."""
    made = (torch.randn(rows, k), torch.randn(4, n, k) / k**0.5, torch.randn(4, n))
    return [t.to(dtype).requires_grad_() for t in made]


def everything(run: Any, given: list[Tensor], sizes: Any, activation: str) -> tuple[Tensor, ...]:
    """y, then the gradients of its sum of squares."""
    sizes = sizes if isinstance(sizes, Tensor) else torch.tensor(sizes)
    y = run(given[0], given[1], sizes, given[2], activation)
    return (y.detach(), *torch.autograd.grad(y.square().sum(), given))


def ours(x: Tensor, w: Tensor, sizes: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return fl.ragged_linear(x, w, sizes, bias, activation=activation, backend="cpp")


def compare(found: Any, given: list[Tensor], sizes: list[int], activation: str) -> None:
    """``found`` against the loop, by the loop in float64; exact zeros where nothing is owned."""
    for verdict in compared(found, given, sizes, activation):
        assert verdict.passed, f"{sizes}: {verdict}"


def compared(
    found: Any, given: list[Tensor], sizes: list[int], activation: str
) -> Iterator[Verdict]:
    theirs = everything(products.loop, given, sizes, activation)
    wide = [t.detach().double().requires_grad_() for t in given]
    oracle = everything(products.loop, wide, sizes, activation)
    for name, a, t, o in zip(RESULTS, found, theirs, oracle, strict=True):
        assert a.is_contiguous()
        yield judge(name, a, t, o)
    assert not found[0][sum(sizes) :].any()
    assert not found[1][sum(sizes) :].any()
    for g, size in enumerate(sizes):
        assert size or not (found[2][g].any() or found[3][g].any())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(20, 33), (64, 16), (1, 1), (7, 130), (256, 192)], ids=str)
def test_results(shape: tuple[int, int], dtype: torch.dtype, threads: int) -> None:
    """All sizes and activations judged together: a group of one feature has one number, of which
    PyTorch's error may be anything."""
    given = drawn(*shape, dtype)
    verdicts: dict[str, list[Verdict]] = {}
    for sizes, activation in itertools.product(SIZES, ("none", "relu", "silu")):
        for v in compared(everything(ours, given, sizes, activation), given, sizes, activation):
            verdicts.setdefault(v.name, []).append(v)
            assert max(shape) == 1 or v.passed, f"{sizes}, {activation}: {v}"
    for name, each in verdicts.items():
        assert (together := pool(name, each)).passed, together


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_all_activations(activation: str, dtype: torch.dtype) -> None:
    given = drawn(24, 40, dtype)
    compare(everything(ours, given, SIZES[0], activation), given, SIZES[0], activation)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_long_groups_are_cut(dtype: torch.dtype, threads: int) -> None:
    """One group, or one that is most of all: tasks are parts of it."""
    given = drawn(64, 320, dtype, rows=500)
    for sizes in ([500, 0, 0, 0], [3, 401, 0, 90], [0, 0, 7, 0]):
        for activation in ("none", "gelu"):
            compare(everything(ours, given, sizes, activation), given, sizes, activation)


@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides(dtype: torch.dtype, integers: torch.dtype) -> None:
    """Rows and matrices that lie anywhere, sizes far apart or all of one number."""
    _, w, b = drawn(24, 40, dtype)
    x = torch.randn(40, 30).to(dtype)[:, 3:27].requires_grad_()
    columns = torch.randn(24, 40).to(dtype).t().requires_grad_()
    turned = w.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    apart = torch.randn(4, 80, 48).to(dtype)[:, ::2, ::2].requires_grad_()
    one = (torch.randn(1, 40, 24).to(dtype) / 5).expand(4, -1, -1).detach().requires_grad_()
    bias = torch.randn(40, 4).to(dtype).t().requires_grad_()
    far = torch.tensor([5, 9, 0, 9, 21, 9, 6, 9], dtype=integers)[::2]
    alike = torch.tensor([8], dtype=integers).expand(4)
    for given in ([x, w, b], [columns, turned, bias], [x, apart, b], [x, one, bias]):
        for sizes in (far, alike):
            for _ in range(3):  # in Python, then by tapes
                found = everything(ours, given, sizes, "relu")
            compare(found, given, sizes.tolist(), "relu")


def test_gradients_that_lie_anywhere() -> None:
    x, w, b = drawn(24, 40)
    sizes = torch.tensor(SIZES[0])
    dy = torch.randn(40, 40)
    for one in (dy.t(), torch.randn(40, 90)[:, 1:41], torch.tensor(2.0).expand(40, 40)):
        for _ in range(3):
            y = ours(x, w, sizes, b, "tanh")
            found = torch.autograd.grad(y, (x, w, b), one)
        expected = torch.autograd.grad(products.loop(x, w, sizes, b, "tanh"), (x, w, b), one)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_what_no_group_has_is_not_looked_at() -> None:
    x, w, b = drawn(24, 40)
    with torch.no_grad():
        x[25:] = float("nan")
        w[3], b[3] = float("inf"), float("nan")
    sizes = torch.tensor([5, 0, 20, 0])
    dy = torch.ones(40, 40)
    dy[25:] = float("inf")
    for activation in ("none", "gelu"):
        y = ours(x, w, sizes, b, activation)
        for t in (y, *torch.autograd.grad(y, (x, w, b), dy)):
            assert t.isfinite().all()


def test_what_it_does_not_serve() -> None:
    sizes = torch.tensor([2])
    with pytest.raises(UnsupportedError, match="float32 and bfloat16"):
        fl.ragged_linear(_X.double(), _W.double(), sizes, backend="cpp")
    torch.set_float32_matmul_precision("medium")
    with pytest.raises(UnsupportedError, match="precision"):
        fl.ragged_linear(_X, _W, sizes, backend="cpp")
    (choice,) = explain(_X, _W, sizes).choices
    assert choice.backend.name == "eager"
    assert fl.ragged_linear(_X[:0], _W, sizes - 2).shape == (0, 3)


@pytest.mark.parametrize("sizes", [[-1, 2, 3, 4], [3, 9, 40, 0], [2**62] * 4, [2**63 - 1] * 4])
def test_bad_sizes_are_named(sizes: list[int]) -> None:
    x, w, b = drawn(4, 3)
    with pytest.raises(InputError, match="group_sizes of at least 0"):
        cpp.forward(x.detach(), w.detach(), torch.tensor(sizes), b.detach(), "none", False)
    rest = (torch.tensor(sizes), "none", (True, True, True))
    with pytest.raises(InputError, match="group_sizes of at least 0"):
        cpp.backward(torch.ones(40, 3), None, x.detach(), w.detach(), *rest)


# --------------------------------------------------------------------------------------------
# By the compiled fast path


@pytest.fixture
def _there() -> None:
    if not (lookup.wait(240) and autograd_node.wait(240)):
        pytest.skip("no compiler here")
    FRONT.clear_table()


def in_python(*_: Any) -> Any:
    raise AssertionError("in Python")


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_tapes_read_the_sizes_at_each_call(
    activation: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a kind of call is known neither direction comes back to Python, whatever its sizes."""
    given, counts = drawn(20, 36, dtype), torch.tensor(SIZES[0])
    for _ in range(3):
        everything(ours, given, counts, activation)
        with torch.no_grad():
            ours(*given[:2], counts, given[2], activation)
    with monkeypatch.context() as watched:
        for module, name in ((cpp, "forward"), (cpp, "backward"), (FRONT, "looked_up")):
            watched.setattr(module, name, in_python)
        watched.setattr(formula.Formula, "functions", in_python)
        fresh = drawn(20, 36, dtype)
        found = []
        for sizes in SIZES:
            counts.copy_(torch.tensor(sizes))
            y = ours(*fresh[:2], counts, fresh[2], activation)
            assert y.grad_fn is not None
            assert y.grad_fn.name() == "RaggedLinearBackward"
            found.append(everything(ours, fresh, counts, activation))
            with torch.no_grad():
                assert torch.equal(ours(*fresh[:2], counts, fresh[2], activation), found[-1][0])
    for one, sizes in zip(found, SIZES, strict=True):
        compare(one, fresh, sizes, activation)


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("grad", [True, False])
def test_bad_sizes_of_a_known_kind(grad: bool) -> None:
    x, w, b = (t.detach().requires_grad_(grad) for t in drawn(20, 36))
    counts = torch.tensor(SIZES[0])
    for _ in range(3):
        good = ours(x, w, counts, b, "silu")
    for bad in ([-1, 2, 3, 4], [30, 11, 0, 0], [2**62] * 4):
        with pytest.raises(InputError, match="group_sizes of at least 0"):
            ours(x, w, torch.tensor(bad), b, "silu")
    assert torch.equal(ours(x, w, counts, b, "silu"), good)


@pytest.mark.usefixtures("_there")
def test_a_backward_takes_the_sizes_of_its_forward() -> None:
    """The counts may be reused meanwhile."""
    given, counts = drawn(20, 36), torch.tensor(SIZES[0])
    for _ in range(3):
        expected = everything(ours, given, counts, "gelu")
        y = ours(*given[:2], counts, given[2], "gelu")
        counts.zero_()
        found = torch.autograd.grad(y.square().sum(), given)
        counts.copy_(torch.tensor(SIZES[0]))
        assert all(torch.equal(a, e) for a, e in zip(found, expected[1:], strict=True))


@pytest.mark.usefixtures("_there")
def test_any_subset_of_gradients() -> None:
    given, sizes = drawn(20, 36), torch.tensor(SIZES[0])
    expected = everything(ours, given, sizes, "silu")[1:]
    for needs in itertools.product((False, True), repeat=3):
        if not any(needs):
            continue
        own = [t.detach().requires_grad_(n) for t, n in zip(given, needs, strict=True)]
        for _ in range(3):
            y = ours(own[0], own[1], sizes, own[2], "silu")
            wanted = [t for t in own if t.requires_grad]
            found = iter(torch.autograd.grad(y.square().sum(), wanted))
            for full, need in zip(expected, needs, strict=True):
                assert not need or torch.equal(next(found), full)


@pytest.mark.usefixtures("_there")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_what_tapes_cannot_serve(activation: str) -> None:
    """Gradients of gradients, batched ones, checkpoints, y changed in place, other kinds."""
    given, sizes = drawn(20, 36), torch.tensor(SIZES[0])
    many = torch.randn(3, 40, 36)
    for _ in range(3):
        everything(ours, given, sizes, activation)

    def second(run: Any, t: list[Tensor]) -> Any:
        dx, dw = torch.autograd.grad(run(*t).sin().sum(), t[:2], create_graph=True)
        return torch.autograd.grad(dx.square().sum() + dw.square().sum(), t)

    for f in (
        lambda g, t: torch.autograd.grad(checkpoint(g, *t, use_reentrant=False).sin().sum(), t),
        lambda g, t: torch.autograd.grad(g(*t), t, many, is_grads_batched=True),
        second,
    ):
        found, expected = (
            f(lambda *t, r=r: r(t[0], t[1], sizes, t[2], activation), given)
            for r in (ours, products.loop)
        )
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    with torch.no_grad():
        assert ours(*given[:2], sizes, given[2], activation).add_(1).grad_fn is None
    y = ours(*given[:2], sizes, given[2], activation).add_(1)
    if activation == "relu":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    else:
        y.sum().backward()


@pytest.mark.usefixtures("_there")
def test_kinds_are_told_apart() -> None:
    """After plain calls are known: autocast, subclasses, modes, transforms, other dtypes."""
    x, w, b = (t.detach() for t in drawn(20, 36))
    sizes = torch.tensor(SIZES[0])
    for _ in range(3):
        plain = ours(x, w, sizes, b, "silu")

    class Own(Tensor):
        pass

    def call(*t: Any, **more: Any) -> Tensor:
        return fl.ragged_linear(*t, activation="silu", **more)

    with torch.autocast("cpu", torch.bfloat16):
        assert call(x, w, sizes, b).dtype is torch.bfloat16
    torch.testing.assert_close(call(x.as_subclass(Own), w, sizes, b).as_subclass(Tensor), plain)
    mapped = torch.func.vmap(lambda one: call(one, w, sizes, b))(torch.stack([x, x]))
    torch.testing.assert_close(mapped[1], plain)
    traced = torch.fx.experimental.proxy_tensor.make_fx(lambda t: call(t, w, sizes, b))(x)
    assert any(
        "mm" in str(node.target) or "linear" in str(node.target) for node in traced.graph.nodes
    )
    _, tangent = torch.func.jvp(lambda t: call(t, w, sizes, b), (x,), (torch.ones_like(x),))
    assert tangent.shape == plain.shape
    torch.testing.assert_close(call(x.double(), w.double(), sizes, b.double()).float(), plain)
    torch.testing.assert_close(call(x, w, sizes.int(), b), plain)
    negative = torch._neg_view(x)
    for _ in range(2):
        torch.testing.assert_close(call(negative, w, sizes, b), call(-x, w, sizes, b))
    for bad in (sizes[:2], sizes.float()):
        with pytest.raises(InputError, match="group_sizes of shape"):
            call(x, w, bad, b)


def test_other_default_devices_and_other_data() -> None:
    """The kept copy of the sizes lies where x lies; data swapped behind the forward are refused."""
    x, w = torch.randn(6, 8).requires_grad_(), torch.randn(2, 5, 8).requires_grad_()
    sizes = torch.tensor([3, 2])
    (expected,) = torch.autograd.grad(fl.ragged_linear(x, w, sizes, backend="cpp").sum(), w)
    for _ in range(3):
        with torch.device("meta"):
            y = fl.ragged_linear(x, w, sizes, backend="cpp")
        torch.testing.assert_close(torch.autograd.grad(y.sum(), w)[0], expected)
        y = fl.ragged_linear(x, w, sizes, backend="cpp")
        kept, w.data = w.data, torch.randn(1, 5000, 8)
        with pytest.raises(InputError, match="shapes they had in the forward"):
            torch.autograd.grad(y.sum(), x)
        w.data = kept


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are numbered elsewhere")
def test_one_thread_alone_starts_no_others() -> None:
    """Products of BLAS inside an OpenMP region of one thread would have threads of their own."""
    x, weight, sizes = torch.randn(7, 256), torch.randn(12, 128, 256), torch.zeros(12).long()
    sizes[3] = 1
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        cpp.forward(x, weight, sizes, None, "relu", False)
        first = _newest_thread()
        for _ in range(500):
            cpp.forward(x, weight, sizes, None, "relu", False)
        assert _newest_thread() - first < 250
    finally:
        torch.set_num_threads(before)


def _newest_thread() -> int:
    """The number of a thread that starts now: they count up, those of other processes as well."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(threading.get_native_id).result()
