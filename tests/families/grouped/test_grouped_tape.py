"""Calls of grouped_linear as tapes: the very results of the Python path, and no Python.

Without a GPU Triton's kernels run under its interpreter, in a process of their own, on the memory
that a launch is given: what is tested is all around them. With one, the kernels themselves.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.autograd import GroupedLinear
from fastlinear.families.grouped.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.fastpath.launch import FastpathLaunch
from tests.families.compiled_nodes import needs_nodes
from tests.families.grouped import tape_checks as checks
from tests.families.grouped.tape_checks import (
    LAYOUTS,
    Way,
    at,
    compare_inference,
    draw,
    formula_of,
    same,
    stood,
)
from tests.families.hopper_only import on_hopper
from tests.families.interpreted import DEVICE, INTERPRETED, run_interpreted, starts_it

pytestmark = needs_nodes
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter test")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="has run already")


@pytest.fixture
def _driver() -> Iterator[None]:
    with checks.python_driver():
        yield


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(params=["as here", "into the layout"])
def _products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As products are written on this device, and as they are on a GPU."""
    if request.param == "into the layout":
        monkeypatch.setattr(reference, "copied", checks.copied_on_a_gpu)


@not_interpreted
@pytest.mark.usefixtures("_products")
@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu_tanh", "leaky_relu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_batched_products(layout: str, activation: str) -> None:
    for tokens, dtype in itertools.product(((3, 16), (48, 1)), (torch.float32, torch.bfloat16)):
        formula = formula_of("eager", "eager", activation, layout)
        given = draw(layout, (4, 20, 12), tokens, dtype=dtype, bias=False)
        Way(formula, given).compare(given)
        compare_inference("eager", activation, layout, given)
        biased = draw(layout, (4, 20, 12), tokens, dtype=dtype)
        Way(formula, biased).compare(biased)
    turned = draw(layout, (4, 20, 12), bias=False)
    assert turned[1] is not None
    turned[1] = torch.randn(4, 20, 12, device=DEVICE).transpose(1, 2).requires_grad_()
    Way(formula, turned).compare(turned)


@not_interpreted
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_gradients_of_batched_products(layout: str) -> None:
    for needs in itertools.product((False, True), repeat=3):
        if not any(needs):
            continue
        given = draw(layout, (4, 20, 12), needs=needs, bias=True)
        way = Way(formula_of("eager", "eager", "tanh", layout), given)
        wanted = [t for t in given if t is not None and t.requires_grad]
        for _ in range(2):
            y, expected = way(given), GroupedLinear.apply(*given, way.plain)
            dy = torch.randn_like(y)
            same(*(torch.autograd.grad(t, wanted, dy) for t in (y, expected)))


@not_interpreted
def test_x_of_any_strides() -> None:
    """Rows far apart are read where they lie; tokens without a common stride are two axes."""
    rows = draw("... g k", (4, 40, 12), bias=False)
    assert rows[0] is not None
    assert rows[1] is not None
    rows[0] = rows[0].detach()[..., ::2].requires_grad_()
    rows[1] = rows[1].detach()[..., :20].requires_grad_()
    Way(formula_of("eager", "eager", "relu", "... g k"), rows).compare(rows)
    blocks = draw("... (g k)", (4, 20, 12), bias=False)
    assert blocks[0] is not None
    blocks[0] = blocks[0].detach()[:, 3:9].requires_grad_()
    Way(formula_of("eager", "eager", "relu", "... (g k)"), blocks).compare(blocks)


# ---------------------------------------------------------------- Triton, interpreted


@pytest.fixture
def _interpreted(_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of Triton run by the fast path under the interpreter."""
    from fastlinear.kernels.triton.launch import Launch

    python, known = Launch.__call__, dict[int, Any]()

    def call(self: Launch, *tensors: Tensor | None) -> None:
        known[id(self)] = self, tensors
        python(self, *tensors)

    def in_fastpath(self: Launch, numbers: Any, described: Any = None) -> FastpathLaunch | None:
        if id(self) not in known:
            return None
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


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton(layout: str, activation: str) -> None:
    """Several chunks of tokens, one, and features beyond what one pass takes."""
    for sizes, tokens in (((2, 20, 36), (3, 30)), ((1, 24, 16), (9, 1)), ((1, 136, 20), (2, 9))):
        given = draw(layout, sizes, tokens, bias=sizes[0] == 2)
        Way(formula_of("triton", "triton", activation, layout), given).compare(given)
    compare_inference("triton", activation, layout, given)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize(("sizes", "activation"), [((2, 20, 36), "relu"), ((1, 136, 20), "silu")])
def test_any_gradients_of_triton(sizes: tuple[int, int, int], activation: str) -> None:
    for needs in itertools.product((False, True), repeat=3):
        if any(needs):
            given = draw("... g k", sizes, (1, 40), needs)
            Way(formula_of("triton", "triton", activation, "... g k"), given).compare(given)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("activation", ["none", "silu"])
def test_wide_through_descriptors(activation: str) -> None:
    """And what descriptors cannot describe, by the other kernels."""
    kind: dict[str, Any] = {"dtype": torch.float16, "sizes": (2, 128, 128)}
    for layout in ("... (g k)", "... g k", "g ... k"):
        given = draw(layout, tokens=(2, 9), **kind)
        Way(formula_of("wide", "eager", activation, layout), given).compare(given)
        compare_inference("wide", activation, layout, given)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
def test_what_is_copied_first() -> None:
    given = draw("... g k", (3, 20, 36))
    given[2] = torch.randn(36, 3).t().requires_grad_()
    Way(formula_of("triton", "triton", "relu", "... g k"), given).compare(given)


# ---------------------------------------------------------------- on the device

# forward, backward, (G, K, N), tokens, dtype
KINDS = (
    ("triton", "triton", (8, 100, 100), (4, 16), torch.bfloat16),
    ("triton", "triton", (8, 100, 200), (3, 700), torch.bfloat16),
    ("triton", "triton", (8, 64, 64), (3, 700), torch.float32),
    ("triton", "eager", (8, 100, 100), (4, 16), torch.float32),
    ("triton", "eager", (4, 300, 72), (4, 16), torch.float16),
    ("packed_groups", "packed_groups", (8, 100, 100), (4, 1024), torch.bfloat16),
    ("packed_groups", "packed_groups", (16, 32, 32), (4, 64), torch.float16),
    ("packed_groups", "eager", (8, 100, 100), (4, 256), torch.float32),
    ("weight_stationary", "wide", (4, 256, 200), (3, 333), torch.bfloat16),
    ("weight_stationary", "wide", (4, 256, 200), (3, 336), torch.bfloat16),  # channels first, too
    ("weight_stationary", "eager", (4, 136, 328), (4, 16), torch.float16),
    ("wide", "wide", (4, 256, 256), (4, 1024), torch.bfloat16),
    ("wide", "eager", (4, 256, 384), (4, 16), torch.float16),
    ("eager", "eager", (8, 100, 100), (4, 16), torch.bfloat16),
)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's own thread, at first
@on_hopper
@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _ready(self) -> None:
        assert lookup.serves_cuda()
        assert autograd_node.serves_cuda()

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_bits_of_the_python_path(self, layout: str, kind: Any) -> None:
        forward, backward, sizes, tokens, dtype = kind
        for activation, bias in (("relu", True), ("silu", False)):
            given = draw(layout, sizes, tokens, dtype=dtype, bias=bias)
            Way(formula_of(forward, backward, activation, layout), given).compare(given)
            compare_inference(forward, activation, layout, given)

    @pytest.mark.parametrize("kind", [KINDS[i] for i in (0, 3, 6, 8, 10)], ids=str)
    def test_any_gradients(self, kind: Any) -> None:
        forward, backward, sizes, tokens, dtype = kind
        for needs in itertools.product((False, True), repeat=3):
            if any(needs):
                given = draw("... (g k)", sizes, tokens, needs, dtype=dtype)
                Way(formula_of(forward, backward, "silu", "... (g k)"), given).compare(given)

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_calls_run_without_python(
        self, layout: str, grad: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once a call is known, neither direction comes back to Python, on any stream."""
        given: Any = draw(layout, (8, 100, 100), (4, 16), (grad,) * 3, torch.bfloat16)

        def run() -> list[Tensor]:
            y = fl.grouped_linear(*given, activation="relu", layout=layout, backend="triton")
            dy = torch.ones_like(y)
            return [y.detach(), *(torch.autograd.grad(y, given, dy) if grad else ())]

        FRONT.forget()
        expected = run()
        for _ in range(3):  # the kind is seen, wanted, known
            run()
        with monkeypatch.context() as watched:
            watched.setattr(layouts, "blocks", checks.fails)
            watched.setattr(FRONT, "looked_up", checks.fails)
            same(run(), expected)
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                found = run()
            torch.cuda.current_stream().wait_stream(side)
            same(found, expected)

    def test_other_addresses_go_back_to_python(self) -> None:
        given = draw("... g k", (8, 100, 100), (4, 16), dtype=torch.bfloat16)
        way = Way(formula_of("triton", "triton", "relu", "... g k"), given)
        way.compare(given)
        x = given[0]
        assert x is not None
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
        with torch.no_grad():
            moved.copy_(x)
        way.python = True
        same([way([moved.requires_grad_(), *given[1:]])], [way(given)])
