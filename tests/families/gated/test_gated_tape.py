"""Calls of gated_mlp as tapes: the very results of the Python path, and no Python.

Without a GPU its kernels are stood in for by PyTorch's ops on the memory that a launch is given:
what is tested is all around them. With one, the kernels themselves.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.gated import spec
from fastlinear.families.gated.cuda import backend as cuda
from fastlinear.families.gated.cuda import bias_sums
from fastlinear.families.gated.stacking import Biases, Weights
from fastlinear.fastpath import autograd_node, lookup, recorded, recorder
from fastlinear.kernels.cuda.prepared import Prepared
from fastlinear.native import cuda_driver as driver
from tests.families.compiled_nodes import needs_nodes
from tests.families.gated.gated_ways import (
    BIASES,
    ORDERS,
    Way,
    derive,
    draw,
    formula_of,
    reference_linear,
)

pytestmark = needs_nodes


@dataclass
class Stand:
    """A kernel's launch that PyTorch's ops stand in for."""

    function: Callable[[Sequence[int]], None]
    count: int

    def __post_init__(self) -> None:
        self.arguments = [ctypes.c_void_p(0) for _ in range(self.count)]
        self._slots = (ctypes.c_void_p * self.count)(*map(ctypes.addressof, self.arguments))
        self._config = driver._LaunchConfig()
        self._config_ref = ctypes.addressof(self._config)
        self._slots_ref = ctypes.addressof(self._slots)
        self._handle = 1 + len(STANDS)
        STANDS[self._handle] = self

    def run(self, _stream: int) -> None:
        self.function([a.value or 0 for a in self.arguments])


STANDS: dict[int, Stand] = {}
MADE: list[str] = []  # launches of sums, in the order in which they were made


def stand(like: Sequence[Any], function: Callable[..., None]) -> Prepared:
    """``function`` of tensors laid out as ``like``, wherever the launch says that they lie."""
    laid = [None if t is None else (t.shape, t.stride(), t.dtype) for t in like]

    def at(address: int, facts: Any) -> Tensor | None:
        if facts is None or not address:
            return None
        shape, strides, dtype = facts
        count = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype).as_strided(shape, strides)

    def run(addresses: Sequence[int]) -> None:
        with torch.no_grad():
            function(*map(at, addresses, laid))

    launch: Any = Stand(run, len(laid))
    return Prepared(launch, 0, [(a, i) for i, a in enumerate(launch.arguments)])


def gate_plan(tensors: Sequence[Any], activation: str, save: bool, _: Any) -> Prepared:
    def run(x: Any, wg: Any, wu: Any, h: Any, pre_g: Any, pre_u: Any, bg: Any, bu: Any) -> None:
        gate, up = F.linear(x, wg, bg), F.linear(x, wu, bu)
        if save:
            pre_g.copy_(gate)
            pre_u.copy_(up)
        h.copy_(activation_of(activation).value(gate) * up)

    return stand(tensors, run)


def through_plan(tensors: Sequence[Any], activation: str, needs_h: bool, _: Any) -> Prepared:
    def run(*given: Any) -> None:
        dy, down, gate, up, dg, du, h, sums, again, shares = given
        *found, through = derive(dy @ down, gate, up, activation)
        dg.copy_(found[0])
        du.copy_(found[1])
        if needs_h:
            h.copy_(through)
        if sums is not None:
            sums.zero_()
            sums[:, 0] = torch.stack([t.sum(0) for t in found])
        assert (again is None) == (shares is None)
        if shares is not None:
            assert again.data_ptr() == dy.data_ptr()
            share(dy, shares)

    return stand(tensors, run)


def share(dy: Tensor, shares: Tensor) -> None:
    shares.zero_()
    shares[-1] = dy.sum(0)


def shares_plan(tensors: Sequence[Any]) -> Prepared:
    MADE.append("shares")
    return stand(tensors, share)


def sums_plan(tensors: Sequence[Any], like: Tensor) -> Prepared:
    def run(sums: Any, gate: Any, up: Any, shares: Any, down: Any) -> None:
        for part, values in zip((gate, up), () if sums is None else sums.sum(1), strict=False):
            if part is not None:
                part.copy_(values)
        if down is not None:
            down.copy_(shares.sum(0))

    MADE.append("sums")
    return stand(tensors, run)


@pytest.fixture
def _stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of the node library are Python functions on a CPU's memory."""
    if torch.cuda.is_available():
        pytest.skip("the library has the driver itself")
    for name in ("gate_plan", "through_plan"):
        monkeypatch.setattr(cuda, name, globals()[name])
    for name in ("shares_plan", "sums_plan"):
        monkeypatch.setattr(bias_sums, name, globals()[name])
    monkeypatch.setattr(cuda, "down_choice", lambda *_: ("eager", reference_linear))
    for module in (cuda, bias_sums):
        monkeypatch.setattr(module, "run", lambda _, make, __, tensors: make()(*tensors))
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)
    monkeypatch.setattr(driver, "make_current", lambda _: None)
    monkeypatch.setattr(driver, "loading_allowed", nullcontext)
    pointer = ctypes.c_void_p

    @ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)
    def launch(_config: int, handle: int, slots: int, _: int) -> int:
        assert slots == STANDS[handle]._slots_ref
        STANDS[handle].run(0)
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 2)
    def replace(*_: int) -> int:
        return 1

    library = autograd_node._build.loaded
    assert library is not None
    library.fastlinear_node_cuda(None, ctypes.cast(launch, pointer), ctypes.cast(replace, pointer))
    yield
    for name in ("gated_mlp.test", "gated_mlp"):
        table = lookup.table(name)
        assert table is not None
        table.clear()
    library.fastlinear_node_cuda(None, None, None)
    STANDS.clear()
    MADE.clear()


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("order", ORDERS)
def test_the_bits_of_the_python_path(order: str, bias: str, save: bool) -> None:
    for shape in ((9, 16), (2, 5, 16), (16,)):
        given = draw(shape, order, bias)
        Way(formula_of("cuda", order, save), given).compare(given)
    rows = draw((9, 32), order, bias)
    assert rows[0] is not None
    rows[0] = rows[0].detach()[:, :16].requires_grad_()
    rows[1:3] = draw((9, 16), order, bias)[1:3]
    Way(formula_of("cuda", order, save, "tanh"), rows).compare(rows)


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize(
    ("order", "bias"), [("apart", "yes"), ("apart", "some"), ("gate_up", "yes")]
)
def test_any_gradients(order: str, bias: str) -> None:
    for needs in itertools.product((False, True), repeat=7):
        given = draw((5, 8), order, bias, needs)
        held = [n and t is not None for n, t in zip(needs, given, strict=True)]
        if not any(held[i] for i in (0, 1, 2, 4, 5, 6)):
            continue  # none at all; or the down weight's alone, which PyTorch's ops serve
        if held[3] and not any(held[i] for i in (0, 1, 2, 4, 5)):
            continue
        Way(formula_of("cuda", order), given).compare(given)


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("save", [True, False])
@pytest.mark.parametrize("order", [*ORDERS, "interleaved"])
def test_the_elementwise_pass(order: str, save: bool) -> None:
    for down, shape in itertools.product((True, False), ((9, 16), (2, 5, 16))):
        given = draw(shape, order, "no", down=down)
        Way(formula_of("elementwise", order, save), given).compare(given)
        given = draw(shape, order, "yes", (*(True,) * 4, False, False, True), down=down)
        Way(formula_of("elementwise", order, save), given).compare(given)
    for bias, (weight, also) in (
        ("no", (True, False)),
        ("yes", (True, True)),
        ("yes", (False, True)),
    ):
        given = draw((9, 16), order, bias, (False, False, False, weight, False, False, also))
        Way(formula_of("elementwise", order, save), given).compare(given)


@pytest.mark.usefixtures("_stood_in")
def test_copies_that_come_first_and_gradients_by_pytorchs_ops() -> None:
    given = draw((9, 16), "apart", "no", (False, False, False, True, False, False, False))
    Way(formula_of("cuda", "apart"), given).compare(given)
    given = draw((9, 16), "apart", "yes")
    Way(formula_of("elementwise", "apart"), given).compare(given)
    given, wide = draw((9, 17), "apart", "no"), draw((9, 16), "apart", "no")
    assert given[0] is not None
    wide[0] = given[0].detach()[:, 1:].requires_grad_()  # rows of 17 numbers
    Way(formula_of("cuda", "apart"), wide).compare(wide)


@pytest.mark.usefixtures("_stood_in")
def test_dy_has_a_launch_of_its_own_only_where_nothing_else_is_asked_for() -> None:
    for wanted, launches_of in (
        ((3, 4, 5, 6), {"sums"}),
        ((6,), {"shares", "sums"}),
        ((0, 3), set()),
    ):
        given = draw((9, 16), "apart", "yes", [i in wanted for i in range(7)])
        MADE.clear()
        Way(formula_of("cuda", "apart"), given).compare(given)
        assert set(MADE) == launches_of


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("order", [*ORDERS, "interleaved"])
def test_calls_without_gradients(order: str) -> None:
    table = lookup.table("gated_mlp.test")
    assert table is not None

    with torch.no_grad():
        for backend, down, shape in itertools.product(
            ("cuda", "elementwise"), (True, False), ((9, 16), (2, 5, 16))
        ):
            bias = "no" if order == "interleaved" else "yes"
            given: Any = draw(shape, order, bias, (False,) * 7, down=down)
            x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:])
            table.clear()
            run = formula_of(backend, order).run
            plain = spec._inference(run, "silu", order)

            def python(*given: Any, plain: Any = plain) -> Tensor:
                assert recorder.active() is not None, "in Python"
                return plain(*given)  # type: ignore[no-any-return]

            plan = recorded.inference(python, x, weights[:], biases[:])
            assert table.admit(x, weights[:], biases[:], "a", plan)
            expected = run(x.reshape(-1, 16), weights, biases, "silu", order, False)[0]
            y = table.call(x, weights[:], biases[:], "a")
            assert y.shape[:-1] == x.shape[:-1]
            assert torch.equal(y.view(expected.shape), expected)
