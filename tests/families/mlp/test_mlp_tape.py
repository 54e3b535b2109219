"""Layers without gradients as one tape of the fast path: the very results of Python's loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.families.mlp import layerwise, reference
from fastlinear.families.mlp.cuda import backend as whole_cuda
from fastlinear.families.mlp.cuda.clusters import ClustersPlan
from fastlinear.families.mlp.cuda.grid import GridPlan
from fastlinear.families.mlp.cuda.stream import StreamPlan
from fastlinear.families.mlp.spec import FRONT
from fastlinear.families.mlp.triton import backend as whole_triton
from fastlinear.families.mlp.triton import plans as whole_triton_plans
from fastlinear.fastpath import lookup, recorded, recorder
from tests.families.compiled_nodes import needs_nodes

pytestmark = needs_nodes
WIDTHS = ((7,), (5, 9, 4), (16, 16, 16, 16))


class Way:
    """Calls of layers through the fast path, and those that went back to Python."""

    def __init__(self, names: tuple[str, str]) -> None:
        self.names = names
        self.back = 0
        found = lookup.table("mlp.test_tape")
        assert found is not None
        self.table = found
        found.clear()

    def python(self, x: Tensor, ws: Any, bs: Any) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        biases = (None,) * len(ws) if bs is None else tuple(bs)
        y = layerwise.forward(rows, tuple(ws), biases, *self.names, False)[0]
        return y.view(*x.shape[:-1], y.shape[-1])

    def fallback(self, *given: Any) -> Tensor:
        self.back += recorder.active() is None
        return self.python(*given)

    def admit(self, x: Tensor, ws: Any, bs: Any) -> None:
        self.python(x, ws, bs)
        plan = recorded.inference(self.fallback, x, ws, bs)
        assert plan is not None
        assert self.table.admit(x, ws, bs, *self.names, plan)

    def __call__(self, x: Tensor, ws: Any, bs: Any) -> Tensor:
        y = self.table.call(x, ws, bs, *self.names)
        assert y is not None
        return y  # type: ignore[no-any-return]


def draw(*shape: int, **kind: Any) -> Tensor:
    return torch.randn(*shape, **kind)


def chain(k: int, widths: tuple[int, ...], **kind: Any) -> tuple[list[Tensor], list[Tensor]]:
    sizes = (k, *widths)
    ws = [draw(n, m, **kind) / m**0.5 for m, n in zip(sizes, widths, strict=False)]
    return ws, [draw(n, **kind) for n in widths]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("activation", NAMES)
def test_the_bits_of_pythons_loop(
    activation: str, widths: tuple[int, ...], dtype: torch.dtype
) -> None:
    ws, bs = chain(6, widths, dtype=dtype)
    some: list[Tensor | None] = [b if i % 2 else None for i, b in enumerate(bs)]
    together: tuple[list[Tensor], ...] = ([], [], [])
    with torch.no_grad():
        for shape in ((3, 6), (1, 6), (2, 3, 6), (6,)):
            for final in ("none", activation):
                for biases in (bs, None, some):
                    way = Way((activation, final))
                    way.admit(draw(*shape, dtype=dtype), ws, biases)
                    x = draw(*shape, dtype=dtype)
                    before = x.clone()
                    y = way(x, ws, biases)
                    assert way.back == 0
                    assert torch.equal(x, before)
                    assert y.shape == (*shape[:-1], widths[-1])
                    given = (None,) * len(ws) if biases is None else biases
                    want = reference.mlp(x, ws, given, activation, final)
                    exact = reference.mlp(
                        x.double(),
                        [w.double() for w in ws],
                        [None if b is None else b.double() for b in given],
                        activation,
                        final,
                    )
                    assert torch.equal(y, way.python(x, ws, biases))
                    each = zip(together, (y, want, exact), strict=True)
                    for numbers, t in each:  # of a few alone torch's error is a matter of luck
                        numbers.append(t.flatten())
                    assert not torch.equal(y, way(x + 1, ws, biases))
    assert judge("tape", *map(torch.cat, together)).passed


def test_weights_changed_in_place_are_seen_and_results_are_new_memory() -> None:
    ws, bs = chain(6, (8, 8))
    with torch.no_grad():
        way, x = Way(("relu", "none")), draw(4, 6)
        way.admit(x, ws, bs)
        first = way(x, ws, bs)
        kept = first.clone()
        second = way(x, ws, bs)
        assert torch.equal(first, second)
        assert first.data_ptr() != second.data_ptr()
        ws[0].mul_(2)
        third = way(x, ws, bs)
        assert torch.equal(first, kept)
        assert torch.equal(third, way.python(x, ws, bs))
        assert not torch.equal(third, first)
    assert not third.requires_grad


def test_weights_of_another_device_are_another_kind_of_call() -> None:
    ws, bs = chain(6, (8, 8))
    with torch.no_grad():
        way, x = Way(("relu", "none")), draw(4, 6)
        way.admit(x, ws, bs)
        spoilt = [ws[0], torch.empty(8, 8, device="meta")]
        assert way.table.call(x, spoilt, bs, *way.names) is None


def test_too_many_tensors_stay_with_python() -> None:
    ws, bs = chain(4, (4,) * 40)
    assert recorded.inference(lambda *_: draw(1), draw(2, 4), ws, bs) is None


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_device_nothing_goes_back_to_python(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kind: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    served = 0
    with torch.no_grad():
        for k, widths in ((64, (64, 128, 64)), (256, (256,) * 8), (1024, (1024,)), (100, (60, 30))):
            ws, bs = chain(k, widths, **kind)
            for m in (1, 16, 64, 300):
                x = draw(m, k, **kind)
                expected = fl.mlp(x, ws, bs, backend="layerwise")
                back = 0

                def counted(*_: Any) -> None:
                    nonlocal back
                    back += 1

                with monkeypatch.context() as watched:
                    watched.setattr(FRONT, "looked_up", counted)
                    real = layerwise.forward

                    def slow(*given: Any, real: Any = real) -> Any:
                        counted()
                        return real(*given)

                    watched.setattr(layerwise, "forward", slow)
                    y = fl.mlp(x, ws, bs, backend="layerwise")
                if y is None or back:
                    continue  # a layer's backend has no such form
                served += 1
                assert torch.equal(y, expected)
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    beside = fl.mlp(x, ws, bs, backend="layerwise")
                torch.cuda.current_stream().wait_stream(stream)
                assert torch.equal(beside, expected)
                shifted = draw(m * k + 1, **kind)[1:].view(m, k)  # rows from an odd address
                shifted.copy_(x)
                want = reference.mlp(x, ws, bs, "relu", "none")
                exact = reference.mlp(
                    x.double(), [w.double() for w in ws], [b.double() for b in bs], "relu", "none"
                )
                assert judge(
                    "shifted", fl.mlp(shifted, ws, bs, backend="layerwise"), want, exact
                ).passed
    assert served > 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_whole_kernels_go_through_the_fast_path(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clusters, grids and streams: the bits of Python's launch, for any addresses and streams."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    kind: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    shapes = [(256, 8, 20), (256, 2, 64), (512, 4, 64), (1024, 8, 64), (1024, 8, 3)]
    shapes += [(2048, 4, 40)] if dtype is not torch.float32 else []
    with torch.no_grad():
        for width, layers, m in shapes:
            ws, bs = chain(width, (width,) * layers, **kind)
            others, _ = chain(width, (width,) * layers, **kind)
            xs = [draw(m, width, **kind) for _ in range(3)]
            side = torch.cuda.Stream()

            def call(x: Tensor, ws: Any, bs: Any = bs) -> Tensor:
                return fl.mlp(x, ws, bs, backend="whole_cuda")

            given = tuple(ws), tuple(bs)
            want = [whole_cuda.forward(x, *given, "relu", "none", False)[0] for x in xs]
            want_other = whole_cuda.forward(xs[0], tuple(others), given[1], "relu", "none", False)[
                0
            ]
            call(xs[0], ws)
            with _counted(monkeypatch) as ran:
                for x, y in zip(xs * 20, want * 20, strict=True):
                    assert torch.equal(call(x, ws), y)
            assert not ran, (width, layers, m)
            for _ in range(3):  # weights elsewhere, another stream: the same results
                assert torch.equal(call(xs[0], others), want_other)
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    beside = call(xs[1], ws)
                torch.cuda.current_stream().wait_stream(side)
                assert torch.equal(beside, want[1])
                assert torch.equal(call(xs[2], ws), want[2])
            deep = xs[0].view(1, m, width)
            for _ in range(3):
                assert torch.equal(call(deep, ws), want[0].view(1, m, width))
            shifted = draw(m * width + 1, **kind)[1:].view(m, width)
            shifted.copy_(xs[1])
            for _ in range(3):
                assert torch.equal(call(shifted, ws), want[1])
            ws[0].mul_(2)
            again = whole_cuda.forward(xs[0], *given, "relu", "none", False)[0]
            assert torch.equal(call(xs[0], ws), again)
            assert not torch.equal(again, want[0])
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                recorded = call(xs[0], ws)
            graph.replay()
            assert torch.equal(recorded, again)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_narrow_chains_in_triton_go_through_the_fast_path(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bits of Python's launch, for any number of rows, addresses, streams, and in a graph."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    kind: dict[str, Any] = {"dtype": dtype, "device": "cuda"}
    with torch.no_grad():
        for k, widths, m in ((64, (64,) * 8, 2048), (33, (17, 40), 300), (128, (128, 64), 64)):
            ws, bs = chain(k, widths, **kind)
            for biases in (tuple(bs), (None, *bs[1:])):
                xs = [draw(m, k, **kind) for _ in range(3)]
                given = tuple(ws), biases
                want = [whole_triton.forward(x, *given, "relu", "none", False)[0] for x in xs]

                def call(x: Tensor, given: Any = given) -> Tensor:
                    return fl.mlp(x, *given, backend="whole_triton")

                assert torch.equal(call(xs[0]), want[0])
                with _counted(monkeypatch, whole_triton_plans.ForwardPlan) as ran:
                    for x, y in zip(xs * 5, want * 5, strict=True):
                        assert torch.equal(call(x), y)
                assert not ran, (k, widths, m)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    beside = call(xs[1])
                torch.cuda.current_stream().wait_stream(side)
                assert torch.equal(beside, want[1])
                shifted = draw(m * k + 1, **kind)[1:].view(m, k)
                shifted.copy_(xs[2])
                for _ in range(3):
                    assert torch.equal(call(shifted), want[2])
                ws[0].mul_(2)
                again = whole_triton.forward(xs[0], *given, "relu", "none", False)[0]
                assert torch.equal(call(xs[0]), again)
                assert not torch.equal(again, want[0])
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    recorded = call(xs[0])
                graph.replay()
                assert torch.equal(recorded, again)


@contextmanager
def _counted(monkeypatch: pytest.MonkeyPatch, *plans: Any) -> Iterator[list[int]]:
    """Launches from Python."""
    ran: list[int] = []

    def watching(real: Any) -> Any:
        def run(*given: Any) -> Any:
            ran.append(1)
            return real(*given)

        return run

    with monkeypatch.context() as watched:
        for plan in plans or (ClustersPlan, GridPlan, StreamPlan):
            watched.setattr(plan, "run", watching(plan.run))
        yield ran
