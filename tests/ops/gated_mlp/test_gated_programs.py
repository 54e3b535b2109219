"""Calls of gated_mlp as programs: the very results of the Python path, and no Python.

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
from hopper_only import on_hopper
from torch import Tensor

import fastlinear as fl
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common import door, door_node
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.door_launch import DoorLaunch
from fastlinear.ops.gated_mlp import cuda, launches, op, programs, reference
from fastlinear.ops.gated_mlp.autograd import Formula, GatedMLP
from fastlinear.ops.gated_mlp.products import PYTORCH, Gate, backward_by
from fastlinear.ops.gated_mlp.stacking import Biases, Weights, empty_like, split_pre

pytestmark = pytest.mark.skipif(door_node.reason_not() is not None, reason="no C++ programs here")
BIASES = ("no", "yes", "some")
ORDERS = ("apart", "gate_up", "up_gate")
ALL = (True,) * 7


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert door.wait(), door.reason_not()
    assert door_node.wait(), door_node.reason_not()


def draw(
    shape: tuple[int, ...],
    order: str,
    bias: str,
    needs: Sequence[bool] = ALL,
    sizes: tuple[int, int] = (24, 40),
    down: bool = True,
    **kind: Any,
) -> list[Tensor | None]:
    """x of that shape, three weights, three biases; ``sizes``: H and N."""
    k, (h, n) = shape[-1], sizes
    apart = order == "apart"
    rows = h if apart else 2 * h

    def one(*of: int, scale: float = 1.0) -> Tensor:
        return torch.randn(of, **kind) * scale

    found = [
        one(*shape),
        one(rows, k, scale=k**-0.5),
        one(h, k, scale=k**-0.5) if apart else None,
        one(n, h, scale=h**-0.5) if down else None,
        one(rows) if bias != "no" and not (apart and bias == "some") else None,
        one(h) if bias != "no" and apart else None,
        one(n) if bias == "yes" and down else None,
    ]
    return [
        None if t is None else t.detach().requires_grad_(need)
        for t, need in zip(found, needs, strict=True)
    ]


def same(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert (s is None) == (t is None)
        if s is not None:
            assert s.shape == t.shape
            assert torch.equal(s, t), (s - t).abs().max()


class Way:
    """Calls of one formula through the door; ``python`` says whether it may run in Python."""

    def __init__(self, formula: Formula, given: Sequence[Tensor | None]) -> None:
        self.python = True
        self.plain = formula

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                assert self.python, "in Python"
                return function(*arguments)

            return run

        names = formula.forward_name, formula.backward_name
        rest = formula.activation, formula.order, formula.save_pre
        self.formula = Formula(*rest, watched(formula.run), watched(formula.backward), *names)
        table = door.table("gated_mlp.test")
        assert table is not None
        self.table = table
        table.clear()
        x, weights, biases = self._split(given)
        GatedMLP.apply(*given, self.formula)
        plan = programs.node(self.formula, x, weights, biases)
        assert plan is not None
        assert table.admit(x, weights[:], biases[:], "a", plan)

    @staticmethod
    def _split(given: Any) -> tuple[Tensor, Weights, Biases]:
        return given[0], Weights(*given[1:4]), Biases(*given[4:])

    def __call__(self, given: Sequence[Tensor | None]) -> Tensor:
        x, weights, biases = self._split(given)
        y = self.table.call(x, weights[:], biases[:], "a")
        assert y is not None
        assert y.grad_fn.name() == programs.NAME
        return y  # type: ignore[no-any-return]

    def compare(self, given: Sequence[Tensor | None]) -> None:
        """Once in Python, then by programs alone."""
        wanted = [t for t in given if t is not None and t.requires_grad]
        expected = GatedMLP.apply(*given, self.plain)
        for self.python in (True, False):
            dy = torch.randn_like(expected)
            before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
            y = self(given)
            same([y, *torch.autograd.grad(y, wanted, dy)], [expected, *before])


# ---------------------------------------------------------------- anywhere


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
EARLY: list[bool] = []  # of the launches of sums that were made, whether they begin early


def stand(like: Sequence[Any], function: Callable[..., None]) -> cuda.Plan:
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
    return cuda.Plan(launch, launch.arguments)


def gate_plan(tensors: Sequence[Any], activation: str, save: bool, _: Any) -> cuda.Plan:
    def run(x: Any, wg: Any, wu: Any, h: Any, pre_g: Any, pre_u: Any, bg: Any, bu: Any) -> None:
        gate, up = F.linear(x, wg, bg), F.linear(x, wu, bu)
        if save:
            pre_g.copy_(gate)
            pre_u.copy_(up)
        h.copy_(activation_of(activation).value(gate) * up)

    return stand(tensors, run)


def derive(dh: Any, gate: Any, up: Any, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(dgate, dup, h)"""
    act = activation_of(activation)
    value = act.value(gate)
    saved = value if act.saved == "output" else gate
    return act.backward(dh * up, saved), dh * value, value * up


def through_plan(tensors: Sequence[Any], activation: str, needs_h: bool, _: Any) -> cuda.Plan:
    def run(dy: Any, down: Any, gate: Any, up: Any, dg: Any, du: Any, h: Any, sums: Any) -> None:
        *found, through = derive(dy @ down, gate, up, activation)
        dg.copy_(found[0])
        du.copy_(found[1])
        if needs_h:
            h.copy_(through)
        if sums is not None:
            sums.zero_()
            sums[:, 0] = torch.stack([t.sum(0) for t in found])

    return stand(tensors, run)


def sums_plan(tensors: Sequence[Any], like: Tensor, early: bool) -> cuda.Plan:
    def run(sums: Any, gate: Any, up: Any, dy: Any, down: Any) -> None:
        for part, values in zip((gate, up), () if sums is None else sums.sum(1), strict=False):
            if part is not None:
                part.copy_(values)
        if down is not None:
            down.copy_(dy.sum(0))

    EARLY.append(early)
    return stand(tensors, run)


def passes(arguments: Sequence[Any], activation: str, order: str, *, backward: bool) -> Any:
    """``launches.elementwise``"""

    def forward_run(gate: Any, up: Any, h: Any) -> None:
        h.copy_(activation_of(activation).value(gate) * up)

    def backward_run(dh: Any, gate: Any, up: Any, dg: Any, du: Any, h: Any, _: Any) -> None:
        for into, values in zip((dg, du, h), derive(dh, gate, up, activation), strict=True):
            into.copy_(values)

    plan: Any = stand(launches._tensors(arguments), backward_run if backward else forward_run)
    where = plan.launch._handle, plan.launch._config_ref, plan.launch._slots_ref
    slots = list(zip(plan.slots, arguments, strict=True))
    return launches._placed(DoorLaunch(*where, (), (), plan), slots)


@pytest.fixture
def _stood_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels of the node library are Python functions on a CPU's memory."""
    if torch.cuda.is_available():
        pytest.skip("the library has the driver itself")
    for name in ("gate_plan", "through_plan", "sums_plan"):
        monkeypatch.setattr(cuda, name, globals()[name])
    monkeypatch.setattr(launches, "elementwise", passes)
    monkeypatch.setattr(cuda, "down_choice", lambda *_: ("eager", reference_linear))
    monkeypatch.setattr(cuda, "_run", lambda _, make, __, tensors: make().run(tensors, 0))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)
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

    library = door_node._build.loaded
    assert library is not None
    library.fastlinear_node_cuda(ctypes.cast(launch, pointer), ctypes.cast(replace, pointer))
    yield
    for name in ("gated_mlp.test", "gated_mlp"):
        table = door.table(name)
        assert table is not None
        table.clear()
    library.fastlinear_node_cuda(None, None)
    STANDS.clear()
    EARLY.clear()


def reference_linear(h: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> tuple[Tensor]:
    return (F.linear(h, weight, bias),)


def elementwise_forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    pre = reference.pre_activations(x, weights, biases)
    gate, up = split_pre(pre, order)
    h = activation_of(activation).value(gate) * up
    y = h if weights.down is None else F.linear(h, weights.down, biases.down)
    return (y, *pre) if save else (y, None, None)


def elementwise_backward(*arguments: Any) -> Any:
    def forward(pre: Any, activation: str, order: str) -> Tensor:
        gate, up = split_pre(pre, order)
        return activation_of(activation).value(gate) * up

    def backward(
        dh: Tensor, pre: Any, activation: str, order: str, needs: Any, in_place: bool
    ) -> Any:
        dpre = empty_like(pre)
        *found, h = derive(dh, *split_pre(pre, order), activation)
        for into, values in zip(split_pre(dpre, order), found, strict=True):
            into.copy_(values)
        sums = [None if t is None or not n else t.sum(0) for t, n in zip(dpre, needs, strict=True)]
        return dpre, h, tuple(sums)

    return backward_by(PYTORCH, Gate(forward, backward), *arguments)


def formula_of(backend: str, order: str, save: bool = True, activation: str = "silu") -> Formula:
    functions: Any = cuda.forward, cuda.backward
    if backend == "elementwise" and torch.cuda.is_available():
        from fastlinear.ops.gated_mlp import triton

        functions = triton.elementwise_forward, triton.elementwise_backward
    elif backend == "elementwise":
        functions = elementwise_forward, elementwise_backward
    return Formula(activation, order, save, *functions, backend, backend)


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
    given = draw((9, 16), order, "no", (False, False, False, True, False, False, False))
    Way(formula_of("elementwise", order, save), given).compare(given)


@pytest.mark.usefixtures("_stood_in")
def test_what_no_program_describes_stays_in_python() -> None:
    """A copy that comes first, PyTorch's ops instead of a kernel, biases that Triton sums."""

    def ran(formula: Formula, given: Sequence[Tensor | None]) -> None:
        way = Way(formula, given)
        with pytest.raises(AssertionError, match="in Python"):
            way.compare(given)
        way.python = True
        wanted = [t for t in given if t is not None and t.requires_grad]
        y, expected = way(given), GatedMLP.apply(*given, way.plain)
        grads = [torch.autograd.grad(t.sum(), wanted) for t in (y, expected)]
        same([y, *grads[0]], [expected, *grads[1]])

    given = draw((9, 16), "apart", "no", (False, False, False, True, False, False, False))
    ran(formula_of("cuda", "apart"), given)
    ran(formula_of("elementwise", "apart"), draw((9, 16), "apart", "yes"))
    given = draw((9, 17), "apart", "no")
    wide = draw((9, 16), "apart", "no")
    assert given[0] is not None
    wide[0] = given[0].detach()[:, 1:].requires_grad_()  # rows of 17 numbers
    ran(formula_of("cuda", "apart"), wide)


@pytest.mark.usefixtures("_stood_in")
def test_sums_begin_early_only_behind_the_kernel_that_lets_them() -> None:
    for frozen, early in ((3, True), (6, False)):
        needs = [i == frozen or (early and i > 3) for i in range(7)]
        given = draw((9, 16), "apart", "yes", needs)
        EARLY.clear()
        Way(formula_of("cuda", "apart"), given).compare(given)
        assert set(EARLY) == {early}


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("order", [*ORDERS, "interleaved"])
def test_calls_without_gradients(order: str) -> None:
    table = door.table("gated_mlp.test")
    assert table is not None

    def fails(*_: Any) -> Any:
        raise AssertionError("in Python")

    with torch.no_grad():
        for backend, down, shape in itertools.product(
            ("cuda", "elementwise"), (True, False), ((9, 16), (2, 5, 16))
        ):
            bias = "no" if order == "interleaved" else "yes"
            given: Any = draw(shape, order, bias, (False,) * 7, down=down)
            x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:])
            kind = programs.Inference(backend, "silu", order)
            table.clear()
            plan = programs.made(kind, x, weights, biases, fails)
            assert table.admit(x, weights[:], biases[:], "a", plan)
            run = formula_of(backend, order).run
            expected = run(x.reshape(-1, 16), weights, biases, "silu", order, False)[0]
            y = table.call(x, weights[:], biases[:], "a")
            assert y.shape[:-1] == x.shape[:-1]
            assert torch.equal(y.view(expected.shape), expected)


# ---------------------------------------------------------------- on the device

ON_DEVICE: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16, "sizes": (264, 72)}


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's own thread, at first
@on_hopper
@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _ready(self) -> None:
        assert door.serves_cuda()
        assert door_node.serves_cuda()

    @pytest.mark.parametrize("save", [True, False])
    @pytest.mark.parametrize("bias", BIASES)
    @pytest.mark.parametrize("order", ORDERS)
    def test_the_bits_of_the_python_path(self, order: str, bias: str, save: bool) -> None:
        for shape in ((300, 128), (2, 65, 128), (5, 128)):
            given = draw(shape, order, bias, **ON_DEVICE)
            Way(formula_of("cuda", order, save), given).compare(given)

    @pytest.mark.parametrize("order", ["apart", "up_gate"])
    def test_any_gradients(self, order: str) -> None:
        for frozen in range(7):
            needs = [i != frozen for i in range(7)]
            given = draw((70, 128), order, "yes", needs, **ON_DEVICE)
            Way(formula_of("cuda", order), given).compare(given)
            if frozen == 3:
                continue  # the down weight's alone: PyTorch's ops in Python
            given = draw((70, 128), order, "yes", [i == frozen for i in range(7)], **ON_DEVICE)
            if any(t is not None and t.requires_grad for t in given):
                Way(formula_of("cuda", order), given).compare(given)

    @pytest.mark.parametrize("order", [*ORDERS, "interleaved"])
    def test_the_elementwise_pass(self, order: str) -> None:
        for down, shape in itertools.product((True, False), ((300, 128), (2, 5, 128))):
            given = draw(shape, order, "no", down=down, **ON_DEVICE)
            Way(formula_of("elementwise", order), given).compare(given)

    @pytest.mark.parametrize("grad", [True, False])
    @pytest.mark.parametrize("order", ORDERS)
    def test_calls_run_without_python(
        self, order: str, grad: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Once a call is known, neither direction comes back to Python, on any stream."""
        stacked = None if order == "apart" else order
        for bias, m in itertools.product(("no", "yes"), (70, 2000)):
            given: Any = draw((m, 128), order, bias, (grad,) * 7, **ON_DEVICE)
            wanted = [t for t in given if t is not None]
            dy = torch.randn((m, 72), device="cuda", dtype=torch.bfloat16)

            def run(given: Any = given, wanted: Any = wanted, dy: Any = dy) -> list[Tensor]:
                y = fl.gated_mlp(*given, stacked=stacked, backend="cuda")
                return [y.detach(), *(torch.autograd.grad(y, wanted, dy) if grad else ())]

            op._forget()
            expected = run()
            for _ in range(3):  # the kind is seen, wanted, known
                run()

            def fail(*_: Any) -> None:
                raise AssertionError("in Python")

            with monkeypatch.context() as watched:
                watched.setattr(cuda, "gate", fail)
                watched.setattr(cuda, "through_down", fail)
                same(run(), expected)
                side = torch.cuda.Stream()
                side.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(side):
                    found = run()
                torch.cuda.current_stream().wait_stream(side)
                same(found, expected)

    def test_other_addresses_go_back_to_python(self) -> None:
        given = draw((70, 128), "apart", "yes", **ON_DEVICE)
        way = Way(formula_of("cuda", "apart"), given)
        way.compare(given)
        x = given[0]
        assert x is not None
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
        with torch.no_grad():
            moved.copy_(x)
        way.python = True
        other = [moved.requires_grad_(), *given[1:]]
        same([way(other)], [way(given)])
