"""The Triton backend of ragged_linear as tapes: the very bits of the Python path, and no Python.

Without a GPU Triton's kernels run under its interpreter, in a process of their own, on the memory
that a launch is given: what is tested is all around them. With one, the kernels themselves.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.families.grouped.ragged import formula
from fastlinear.families.grouped.ragged.formula import Formula, Ragged
from fastlinear.families.grouped.ragged.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup, recorded, recorder
from fastlinear.fastpath.launch import FastpathLaunch
from tests.families.grouped import tape_checks as checks
from tests.families.grouped.tape_checks import at, fails, same, stood
from tests.families.interpreted import DEVICE, ON_GPU, compares, run_interpreted, starts_it

pytestmark = pytest.mark.skipif(autograd_node.reason_not() is not None, reason="no C++ tapes here")
TABLE = "ragged_linear.test"
Given = list[Tensor | None]


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture
def _launched(monkeypatch: pytest.MonkeyPatch, nodes_built: None) -> Iterator[None]:
    """Launches of Triton run by the fast path; without a GPU, under the interpreter."""
    if ON_GPU:
        assert lookup.serves_cuda()
        assert autograd_node.serves_cuda()
        yield
        return
    from fastlinear.families.grouped.ragged.triton import backend
    from fastlinear.kernels.triton.launch import Launch

    python, known = Launch.__call__, dict[int, Any]()

    def call(self: Launch, *tensors: Tensor | None) -> None:
        known[id(self)] = self, tensors
        python(self, *tensors)

    def in_fastpath(self: Launch, numbers: Any, described: Any = None) -> FastpathLaunch | None:
        like = known[id(self)][1]
        for i in self._blocks:
            if numbers[i] is not None:
                assert described[i].shape == like[i].shape
                assert described[i].stride() == like[i].stride()
        assert [t is None for t in like] == [n is None for n in numbers]
        arguments = [ctypes.c_void_p(0) for _ in numbers]

        def run() -> None:
            python(self, *(at(a.value or 0, t) for a, t in zip(arguments, like, strict=True)))

        slots = (ctypes.c_void_p * len(arguments))(*map(ctypes.addressof, arguments))
        pairs = zip(arguments, numbers, strict=True)
        found = [(a, n) for a, n in pairs if n is not None]
        places, offsets = tuple((a, n.number) for a, n in found), tuple(n.offset for _, n in found)
        return FastpathLaunch(*stood(run, slots), places, arguments, offsets=offsets)

    monkeypatch.setattr(Launch, "__call__", call)
    monkeypatch.setattr(Launch, "in_fastpath", in_fastpath)
    backend._plans.clear()
    with checks.python_driver():
        yield
        _table().clear()


def _table() -> Any:
    table = lookup.table(TABLE)
    assert table is not None
    return table


def drawn(
    rows: int,
    k: int,
    n: int,
    needs: Sequence[bool] = (True,) * 3,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
) -> Given:
    """x, weight of three groups, bias."""

    def one(need: bool, *shape: int) -> Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype).requires_grad_(need)

    return [
        one(needs[0], rows, k),
        one(needs[1], 3, n, k),
        one(needs[2], 3, n) if bias else None,
    ]


class Way:
    """Calls of one formula through the fast path; ``python`` says whether they may run in
    Python."""

    def __init__(self, activation: str, given: Given, sizes: Tensor) -> None:
        self.python, self.formula = True, Formula(activation, "triton")
        x, w, b = given
        Ragged.apply(x, w, sizes, b, self.formula)
        _table().clear()
        plan = recorded.node(self.formula, x, w, (sizes, b))  # type: ignore[arg-type]
        assert plan is not None
        assert _table().admit(x, w, (sizes, b), activation, None, plan)

    def compare(
        self, given: Given, sizes: Tensor, others: Sequence[Sequence[int]], patch: Any
    ) -> None:
        """Once in Python, then by tapes alone, which read the sizes of each call."""
        x, w, b = given
        wanted = [t for t in given if t is not None and t.requires_grad]
        for python, values in [(True, sizes.tolist()), *((False, other) for other in others)]:
            sizes.copy_(torch.tensor(values, device=sizes.device))
            expected = Ragged.apply(x, w, sizes, b, self.formula)
            dy = torch.randn_like(expected)
            before = torch.autograd.grad(expected, wanted, dy)
            with patch.context() as watched:
                if not python:
                    watched.setattr(formula.Formula, "functions", fails)
                y = _table().call(x, w, (sizes, b), self.formula.activation, None)
                assert y.grad_fn.name() == formula.Formula.node
                same([y, *torch.autograd.grad(y, wanted, dy)], [expected, *before])


def compare_inference(activation: str, given: Given, sizes: Tensor, patch: Any) -> None:
    own = Formula(activation, "triton")
    x, w, b = (None if t is None else t.detach() for t in given)
    assert x is not None
    assert w is not None
    expected = own.inference(x, w, (sizes, b))
    plan = recorded.inference(own.inference, x, w, (sizes, b))
    _table().clear()
    assert _table().admit(x, w, (sizes, b), activation, None, plan)
    with patch.context() as watched:
        watched.setattr(formula.Formula, "functions", fails)
        same([_table().call(x, w, (sizes, b), activation, None)], [expected])


# What is interpreted is the same kernel on either way: a launch is few of its programs then.
ROWS, K, N = (40, 20, 36) if ON_GPU else (13, 7, 9)
SIZES = [ROWS // 4, 0, ROWS // 3]
OTHERS = ([0, 4, 0], [ROWS // 2, ROWS // 2, 0], [-3, 50, 2])


@compares
@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_tapes(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes of either dtype, dense or not; tensors read in place and ones that are copied."""
    for bias, dtype in itertools.product((True, False), (torch.int32, torch.int64)):
        given = drawn(ROWS, K, N, bias=bias)
        apart = [n for size in SIZES for n in (size, 7)]
        sizes = torch.tensor(apart, dtype=dtype, device=DEVICE)[::2]
        Way(activation, given, sizes).compare(given, sizes, OTHERS, monkeypatch)
        compare_inference(activation, given, sizes, monkeypatch)
    x = torch.randn(ROWS, K + 30, device=DEVICE)[:, 2 : K + 2].requires_grad_()
    columns = torch.randn(K, ROWS, device=DEVICE).t().requires_grad_()
    turned = torch.randn(3, K, N, device=DEVICE).transpose(1, 2).requires_grad_()
    b = torch.randn(N, 3, device=DEVICE).t().requires_grad_()
    sizes = torch.tensor(SIZES, device=DEVICE)
    for given in ([x, turned, b], [columns, turned, None]):
        Way(activation, given, sizes).compare(given, sizes, OTHERS, monkeypatch)
        compare_inference(activation, given, sizes, monkeypatch)


@compares
@pytest.mark.usefixtures("_launched")
def test_any_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    for needs in itertools.product((False, True), repeat=3):
        if any(needs):
            given, sizes = drawn(ROWS, K, N, needs), torch.tensor(SIZES, device=DEVICE)
            Way("silu", given, sizes).compare(given, sizes, OTHERS, monkeypatch)


@compares
@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_through_descriptors(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from fastlinear.families.grouped.ragged.triton import backend

    size = 64 if ON_GPU else 16
    config = backend.Config(size, size, size, 4, 3, tma=True)
    for name in ("product_config", "weight_config"):
        monkeypatch.setattr(backend, name, lambda *_: config)
    backend._plans.clear()
    given = drawn(3 * size, 2 * size, 3 * size, dtype=torch.float16)
    sizes = torch.tensor([size, 5, 9], device=DEVICE)
    Way(activation, given, sizes).compare(given, sizes, OTHERS, monkeypatch)
    assert [launch.described for launch in backend._plans.values()] == [True] * 3
    compare_inference(activation, given, sizes, monkeypatch)
    backend._plans.clear()


@compares
@pytest.mark.skipif(ON_GPU, reason="takes large weights, which the GPU's tests have")
@pytest.mark.usefixtures("_launched")
@pytest.mark.parametrize("bias", [True, False])
def test_pytorchs_grouped_product_for_weights(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the tape, which follows the sizes of each call and serves dy and x only as
    aligned as they were."""
    from fastlinear.families.grouped.ragged.triton import backend

    monkeypatch.setattr(backend, "pytorch_pays", lambda *_: True)
    given, sizes = drawn(16, 8, 24, bias=bias), torch.tensor([4, 0, 9])
    Way("none", given, sizes).compare(given, sizes, ([0, 4, 0], [-3, 50, 2]), monkeypatch)
    found = recorder.record(
        lambda *tensors: (backend._by_pytorch(*tensors),),
        [torch.randn(16, 24), torch.randn(16, 8), sizes],
    )
    assert found is not None
    assert found[2] == (15, 15, 0)


@pytest.mark.gpu
class TestOnTheDevice:
    @pytest.mark.parametrize("grad", [True, False])
    def test_calls_run_without_python(
        self, grad: bool, monkeypatch: pytest.MonkeyPatch, nodes_built: None
    ) -> None:
        """Once a call is known, neither direction comes back to Python, on any stream."""
        x, w, b = drawn(300, 64, 48, (grad,) * 3, torch.bfloat16)
        sizes = torch.tensor([100, 0, 150], device="cuda")

        def run() -> list[Tensor]:
            y = fl.ragged_linear(x, w, sizes, b, activation="silu")  # type: ignore[arg-type]
            dy = torch.ones_like(y)
            return [y.detach(), *(torch.autograd.grad(y, [x, w, b], dy) if grad else ())]  # type: ignore[list-item]

        FRONT.clear_table()
        expected = run()
        for _ in range(3):  # the kind is seen, wanted, known
            run()
        with monkeypatch.context() as watched:
            watched.setattr(FRONT, "looked_up", fails)
            watched.setattr(formula.Formula, "functions", fails)
            same(run(), expected)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = run()
            torch.cuda.current_stream().wait_stream(side)
            same(found, expected)

    def test_graphs_follow_the_sizes(self) -> None:
        """A captured step, of a kind that the fast path knows, reads the sizes of each replay."""
        x, w, b = drawn(300, 64, 48, dtype=torch.bfloat16)
        sizes = torch.tensor([100, 0, 150], device="cuda")
        dy = torch.randn(300, 48, device="cuda", dtype=torch.bfloat16)

        def run() -> list[Tensor]:
            y = fl.ragged_linear(x, w, sizes, b, activation="silu")  # type: ignore[arg-type]
            return [y, *torch.autograd.grad(y, [x, w, b], dy)]  # type: ignore[list-item]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(4):
                run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            found = run()
        for values in ([100, 0, 150], [7, 290, 3]):
            sizes.copy_(torch.tensor(values))
            graph.replay()
            torch.cuda.synchronize()
            same([t.detach() for t in found], [t.detach() for t in run()])
