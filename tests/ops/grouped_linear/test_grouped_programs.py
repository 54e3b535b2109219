"""Calls of grouped_linear as programs: the very results of the Python path, and no Python.

Without a GPU Triton's kernels run under its interpreter, in a process of their own, and PyTorch's
ops stand in for the CUDA C++ ones, on the memory that a launch is given: what is tested is all
around them. With one, the kernels themselves.
"""

from __future__ import annotations

import ctypes
import importlib.util
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.dispatch.backend import family
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common import door, door_node, hopper
from fastlinear.ops.common.door_launch import DoorLaunch
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import (
    op,
    programs,
    reference,
    strips,
    strips_backward,
    strips_tiles,
    wide_backward,
)
from fastlinear.ops.grouped_linear.autograd import Formula, GroupedLinear

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
ON_GPU = not INTERPRETED and torch.cuda.is_available()
HOPPER = ON_GPU and torch.cuda.get_device_capability() == (9, 0)
HAS_TRITON = importlib.util.find_spec("triton") is not None
DEVICE = "cuda" if ON_GPU else "cpu"
pytestmark = pytest.mark.skipif(door_node.reason_not() is not None, reason="no C++ programs here")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter test")
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="has run already")

if INTERPRETED:
    from triton.runtime import interpreter

    _patch_tensor = interpreter._patch_lang_tensor

    def _patch_lang_tensor(tensor: Any, scope: Any) -> None:
        # Triton 3.6 calls int() on arrays of one element, which NumPy 2.4 refuses.
        _patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_lang_tensor

LAYOUTS = ("... (g k)", "... g k", "g ... k", "b (g k) ...", "b g k ...")
ALL = (True, True, True)


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert door.wait(), door.reason_not()
    assert door_node.wait(), door_node.reason_not()


@pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="starts the interpreted tests")
def test_under_the_interpreter() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "pytest", __file__, "-q", "-W", "ignore"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist"]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": ""}
    env["CUDA_VISIBLE_DEVICES"] = ""
    root = Path(__file__).parents[3]
    done = subprocess.run(command, env=env, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    assert " passed" in done.stdout, done.stdout


# ---------------------------------------------------------------- calls, in Python and without


def shape_of(layout: str, groups: int, k: int, tokens: tuple[int, int]) -> tuple[int, ...]:
    a, b = tokens
    return {
        "... (g k)": (a, b, groups * k),
        "... g k": (a * b, groups, k),
        "g ... k": (groups, a * b, k),
        "b (g k) ...": (a, groups * k, b),
        "b g k ...": (a, groups, k, b),
    }[layout]


def draw(
    layout: str,
    sizes: tuple[int, int, int],
    tokens: tuple[int, int] = (3, 16),
    needs: Sequence[bool] = ALL,
    dtype: torch.dtype = torch.float32,
    bias: bool = True,
) -> list[Tensor | None]:
    """x, weight (G, N, K), bias."""
    groups, k, n = sizes

    def one(shape: tuple[int, ...], scale: float, need: bool) -> Tensor:
        t = torch.randn(shape, device=DEVICE) * scale
        return t.to(dtype).requires_grad_(need)

    x = one(shape_of(layout, groups, k, tokens), 1.0, needs[0])
    b = one((groups, n), 1.0, needs[2]) if bias else None
    return [x, one((groups, n, k), k**-0.5, needs[1]), b]


def same(a: Any, b: Any) -> None:
    for s, t in zip(a, b, strict=True):
        assert (s is None) == (t is None)
        if s is not None:
            assert (s.shape, s.stride()) == (t.shape, t.stride())
            assert torch.equal(s, t), (s - t).abs().max()


def formula_of(forward: str, backward: str, activation: str, layout: str) -> Formula:
    def loaded(piece: str, name: str) -> Any:
        (found,) = [b for b in family("grouped_linear").candidates(piece) if b.name == name]
        return found.load()

    run, back = loaded("forward", forward), loaded("backward", backward)
    return Formula(activation, layout, forward, backward, run, back)


class Way:
    """Calls of one formula through the door; ``python`` says whether it may run in Python."""

    def __init__(self, formula: Formula, given: Sequence[Any]) -> None:
        self.python = True
        self.plain = formula

        def watched(function: Callable[..., Any]) -> Callable[..., Any]:
            def run(*arguments: Any) -> Any:
                assert self.python, "in Python"
                return function(*arguments)

            return run

        names = formula.activation, formula.layout, formula.forward_name, formula.backward_name
        self.formula = Formula(*names, watched(formula.run), watched(formula.backward))
        table = door.table("grouped_linear.test")
        assert table is not None
        self.table = table
        table.clear()
        GroupedLinear.apply(*given, self.formula)
        plan = programs.node(self.formula, *given)
        assert plan is not None
        assert table.admit(*given, "a", plan)

    def __call__(self, given: Sequence[Tensor | None]) -> Tensor:
        y = self.table.call(*given, "a")
        assert y is not None
        assert y.grad_fn.name() == programs.NAME
        return y  # type: ignore[no-any-return]

    def compare(self, given: Sequence[Tensor | None]) -> None:
        """Once in Python, then by programs alone."""
        wanted = [t for t in given if t is not None and t.requires_grad]
        expected = GroupedLinear.apply(*given, self.plain)
        for self.python in (True, False):
            dy = torch.randn_like(expected)
            before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
            y = self(given)
            same([y, *torch.autograd.grad(y, wanted, dy)], [expected, *before])

    def stays_in_python(self, given: Sequence[Tensor | None]) -> None:
        with pytest.raises(AssertionError, match="in Python"):
            self.compare(given)


def fails(*_: Any) -> Any:
    raise AssertionError("in Python")


def compare_inference(backend: str, activation: str, layout: str, given: Sequence[Any]) -> None:
    """A call without gradients: a program's result against Python's."""
    table = door.table("grouped_linear.test")
    assert table is not None
    table.clear()
    run = formula_of(backend, "eager", activation, layout).run
    with torch.no_grad():
        (x, weight, bias), (groups, _, k) = given, given[1].shape
        order = layouts.order_of(layout, x.shape)
        blocks = layouts.blocks(x, layout, groups, k)
        y = run(blocks, weight, bias, activation, False, order)[0]
        expected = layouts.unblocked(y, layout, x.shape)
        plan = programs.inference(backend, *given, activation, layout, fails)
        assert plan is not None
        assert table.admit(*given, "a", plan)
        same([table.call(*given, "a")], [expected])


# ---------------------------------------------------------------- PyTorch's batched products


def copied_on_a_gpu(t: Tensor, order: str) -> bool:
    """``reference.copied``"""
    return t.shape[0] > 1 and order == "channels"


@pytest.fixture(params=["as here", "into the layout"])
def _products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """As products are written on this device, and as they are on a GPU."""
    if request.param == "into the layout":
        monkeypatch.setattr(reference, "copied", copied_on_a_gpu)


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
        way = Way(formula, biased)
        if layout == "g ... k":
            way.compare(biased)
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


# ---------------------------------------------------------------- stand-ins


def at(address: int, like: Tensor | None) -> Tensor | None:
    """A tensor laid out as ``like`` at an address; None for null."""
    if like is None or not address:
        return None
    pairs = zip(like.shape, like.stride(), strict=True)
    count = 1 + sum((n - 1) * s for n, s in pairs)
    memory = (ctypes.c_char * (count * like.element_size())).from_address(address)
    return torch.frombuffer(memory, dtype=like.dtype).as_strided(like.shape, like.stride())


STANDS: dict[int, Any] = {}


def stood(run: Callable[[], None], slots: Any) -> tuple[int, int, int]:
    """The driver's handle of a kernel, its configuration and its slots, all kept."""
    config = driver._LaunchConfig()
    handle = 1 + len(STANDS)
    STANDS[handle] = run, slots, config
    return handle, ctypes.addressof(config), ctypes.addressof(slots)


@pytest.fixture
def _driver() -> Iterator[None]:
    """A driver that runs Python functions on a CPU's memory."""
    if torch.cuda.is_available():
        pytest.skip("the library has the driver itself")
    pointer = ctypes.c_void_p

    @ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 4)
    def launch(_config: int, handle: int, slots: int, _: int) -> int:
        run, held, _ = STANDS[handle]
        assert slots == ctypes.addressof(held)
        with torch.no_grad():
            run()
        return 0

    @ctypes.CFUNCTYPE(ctypes.c_int, *[pointer] * 2)
    def replace(where: int, address: int) -> int:
        ctypes.c_uint64.from_address(where).value = address
        return 0

    library = door_node._build.loaded
    assert library is not None
    library.fastlinear_node_cuda(ctypes.cast(launch, pointer), ctypes.cast(replace, pointer))
    yield
    table = door.table("grouped_linear.test")
    assert table is not None
    table.clear()
    library.fastlinear_node_cuda(None, None)
    STANDS.clear()


# ---------------------------------------------------------------- Triton, interpreted


@pytest.fixture
def _interpreted(_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches of Triton run by the door under the interpreter."""
    from fastlinear.ops.common.triton_launch import Launch

    python, known = Launch.__call__, dict[int, Any]()

    def call(self: Launch, *tensors: Tensor | None) -> None:
        known[id(self)] = self, tensors
        python(self, *tensors)

    def in_door(self: Launch, numbers: Any, described: Any = None) -> DoorLaunch | None:
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
        places = tuple((a, n) for a, n in pairs if n is not None)
        return DoorLaunch(*stood(run, slots), places, (), arguments)

    monkeypatch.setattr(Launch, "__call__", call)
    monkeypatch.setattr(Launch, "in_door", in_door)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_triton(layout: str, activation: str) -> None:
    for sizes, tokens in (((3, 20, 36), (3, 30)), ((2, 24, 16), (70, 1)), ((1, 136, 20), (2, 9))):
        given = draw(layout, sizes, tokens, bias=activation != "relu")
        Way(formula_of("triton", "triton", activation, layout), given).compare(given)
        given = draw(layout, sizes, tokens)
        compare_inference("triton", activation, layout, given)


@needs_interpreter
@pytest.mark.usefixtures("_interpreted")
@pytest.mark.parametrize("sizes", [(3, 20, 36), (1, 136, 20)])
def test_any_gradients_of_triton(sizes: tuple[int, int, int]) -> None:
    for needs, activation in itertools.product(
        itertools.product((False, True), repeat=3), ("none", "silu")
    ):
        if any(needs):
            given = draw("... g k", sizes, (2, 40), needs)
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
def test_what_stays_in_python() -> None:
    """A bias that is copied first; a launch that was never made."""
    given = draw("... g k", (3, 20, 36))
    given[2] = torch.randn(36, 3).t().requires_grad_()
    Way(formula_of("triton", "triton", "relu", "... g k"), given).stays_in_python(given)
    from fastlinear.ops.grouped_linear import triton

    given = draw("... g k", (3, 20, 36))
    triton._plans.clear()
    spec = programs._forward("triton", *given, "none", "... g k", False)  # type: ignore[arg-type]
    assert spec is None


# ---------------------------------------------------------------- CUDA C++, stood in for


class Map:
    """A tensor map that is an address."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.address = ctypes.c_uint64(0)
        self.pointer = ctypes.addressof(self.address)

    def point_at(self, address: int) -> None:
        self.address.value = address


MADE: list[Any] = []  # of the plan that is being made: what each of its launches computes


class Launch:
    """``driver.Launch`` of what stands first in MADE."""

    def __init__(self, _kernel: Any, _block: int, _cluster: int, arguments: Sequence[Any]) -> None:
        self.arguments = arguments
        function = MADE.pop(0)
        slots = (ctypes.c_void_p * len(arguments))()

        def run() -> None:
            function(*((a.address if isinstance(a, Map) else a).value or 0 for a in arguments))

        self._function = run
        self._handle, self._config_ref, self._slots_ref = stood(self._function, slots)

    def set_grid(self, _: int) -> None:
        pass

    def run(self, _stream: int) -> None:
        with torch.no_grad():
            self._function()


def forward_kernel(x: Any, weight: Any, bias: Any, activation: str, save: bool, order: str) -> Any:
    y_like = layouts.empty((*x.shape[:3], weight.shape[1]), order, x, x.dtype)

    def run(*a: Any) -> None:
        of_x, of_y, of_pre, w, b, *again = a[:8]
        assert (of_x, of_y) == tuple(again[:2])
        assert not save or of_pre == again[2]
        found = reference.forward(at(of_x, x), at(w, weight), at(b, bias), activation, save, order)  # type: ignore[arg-type]
        for address, values in zip((of_y, of_pre), found, strict=True):
            if values is not None:
                into = at(address, y_like)
                assert into is not None
                into.copy_(values)

    return run


def backward_kernels(self: Any, given: Sequence[Any], wide: bool) -> list[Any]:
    """The pass and its sums; ``given`` as ``reference.backward`` takes it."""
    dy, saved, x, weight, activation, needs, order = given
    dx_like = layouts.empty(x.shape, order, x, x.dtype)

    def put(address: int, values: Tensor | None, part: Any) -> None:
        if values is None:
            return
        like = torch.empty_like(values) if part is None else torch.empty(part)
        into = at(address, like)
        assert into is not None
        if part is None:
            into.copy_(values)
        else:
            into.zero_()[-1] = values

    def whole(*a: Any) -> None:
        maps, pointers = (a[:5], a[5:8]) if wide else (a[:4], a[4:11])
        assert maps[4] == pointers[0] if wide else (maps[0], maps[2]) == (pointers[3], pointers[5])
        if not wide and saved is not None:
            assert maps[1] == pointers[4]
        read = [at(maps[i], t) for i, t in enumerate((dy, saved, x))]
        dx, dw, db = reference.backward(*read, at(pointers[0], weight), activation, needs, order)  # type: ignore[arg-type]
        if dx is not None:
            into = at(maps[3], dx_like)
            assert into is not None
            into.copy_(dx)
        put(pointers[1], dw, self._shares[0])
        put(pointers[2], db, self._shares[1])

    def sums(*a: Any) -> None:
        shapes = weight.shape, weight.shape[:2]
        for part, shape, source, into in zip(self._shares, shapes, a[:2], a[2:4], strict=True):
            if part is not None:
                share, result = at(source, torch.empty(part)), at(into, x.new_empty(shape))
                assert share is not None
                assert result is not None
                result.copy_(share.sum(0))

    return [whole, sums]


@pytest.fixture
def _stood_in(_driver: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of CUDA C++ are PyTorch's ops on a CPU; products are written as on a GPU."""
    monkeypatch.setattr(reference, "copied", copied_on_a_gpu)

    def stand(module: Any, name: str, made: Callable[..., list[Any]]) -> None:
        class Stood(getattr(module, name)):  # type: ignore[misc]
            def __init__(self, *given: Any) -> None:
                MADE[:] = made(self, given)
                super().__init__(*given)

        monkeypatch.setattr(module, name, Stood)

    def passes(self: Any, given: Any) -> list[Any]:
        return backward_kernels(self, given[:7], False)

    def wide_passes(self: Any, given: Any) -> list[Any]:
        return backward_kernels(self, (*given[:6], "tokens"), True)

    stand(strips, "Strips", lambda _, given: [forward_kernel(*given[:6])])
    stand(strips_backward, "StripsBackward", passes)
    stand(wide_backward, "WideBackward", wide_passes)
    for module in (strips, strips_backward, wide_backward):
        monkeypatch.setattr(module, "_plans", {})
        monkeypatch.setattr(module, "device_facts", lambda _: SimpleNamespace(units=5))
        loader = "_kernel" if module is strips else "_kernels"
        monkeypatch.setattr(module, loader, lambda *_: (0, 0))
    for module in (strips, strips_backward, strips_tiles):
        monkeypatch.setattr(module, "ordinal", lambda _: 0)
    monkeypatch.setattr(wide_backward, "GroupMap", Map)
    monkeypatch.setattr(driver, "TensorMap", Map)
    monkeypatch.setattr(driver, "Launch", Launch)
    monkeypatch.setattr(hopper, "EarlyLaunch", Launch)
    monkeypatch.setattr(driver, "make_current", lambda _: None)
    monkeypatch.setattr(driver, "loading_allowed", nullcontext)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)


BF16: dict[str, Any] = {"dtype": torch.bfloat16}


@not_interpreted
@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", ["... (g k)", "... g k", "g ... k"])
def test_strips(layout: str, activation: str) -> None:
    for bias, tokens in itertools.product((True, False), ((2, 16), (5, 160))):
        given = draw(layout, (4, 100, 52), tokens, bias=bias, **BF16)
        Way(formula_of("strips", "strips", activation, layout), given).compare(given)
        compare_inference("strips", activation, layout, given)
    single = draw(layout, (3, 36, 64), bias=False)
    Way(formula_of("strips", "eager", activation, layout), single).compare(single)
    compare_inference("strips", activation, layout, single)


@not_interpreted
@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
def test_the_wide_pass(activation: str) -> None:
    for bias, tokens in itertools.product((True, False), ((2, 16), (5, 160))):
        given = draw("... (g k)", (2, 144, 200), tokens, bias=bias, **BF16)
        Way(formula_of("eager", "wide", activation, "... (g k)"), given).compare(given)


@not_interpreted
@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("backend", ["strips", "wide"])
def test_any_gradients_of_cuda(backend: str) -> None:
    sizes, first = ((4, 100, 52), "strips") if backend == "strips" else ((2, 144, 200), "eager")
    for needs, m in itertools.product(itertools.product((False, True), repeat=3), (32, 800)):
        if not any(needs) or (backend == "wide" and not any(needs[:2])):
            continue
        given = draw("... (g k)", sizes, (1, m), needs, **BF16)
        Way(formula_of(first, backend, "silu", "... (g k)"), given).compare(given)


# ---------------------------------------------------------------- on the device

# forward, backward, (G, K, N), tokens, dtype
KINDS = (
    ("triton", "triton", (8, 100, 100), (4, 16), torch.bfloat16),
    ("triton", "triton", (8, 100, 200), (3, 700), torch.bfloat16),
    ("triton", "triton", (8, 64, 64), (3, 700), torch.float32),
    ("triton", "eager", (8, 100, 100), (4, 16), torch.float32),
    ("triton", "eager", (4, 300, 72), (4, 16), torch.float16),
    ("strips", "strips", (8, 100, 100), (4, 1024), torch.bfloat16),
    ("strips", "strips", (16, 32, 32), (4, 64), torch.float16),
    ("strips", "eager", (8, 100, 100), (4, 256), torch.float32),
    ("wide", "wide", (4, 256, 256), (4, 1024), torch.bfloat16),
    ("wide", "eager", (4, 256, 384), (4, 16), torch.float16),
    ("eager", "eager", (8, 100, 100), (4, 16), torch.bfloat16),
)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's own thread, at first
@pytest.mark.skipif(not HOPPER, reason="needs a Hopper GPU")
@pytest.mark.gpu
class TestOnHopper:
    @pytest.fixture(autouse=True)
    def _ready(self) -> None:
        assert door.serves_cuda()
        assert door_node.serves_cuda()

    @pytest.mark.parametrize("kind", KINDS, ids=str)
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_the_bits_of_the_python_path(self, layout: str, kind: Any) -> None:
        forward, backward, sizes, tokens, dtype = kind
        for activation, bias in itertools.product(("none", "relu", "silu"), (True, False)):
            if (forward, bias) == ("eager", True) and layout.startswith("b"):
                continue  # the bias is added in Python
            given = draw(layout, sizes, tokens, dtype=dtype, bias=bias)
            Way(formula_of(forward, backward, activation, layout), given).compare(given)
            compare_inference(forward, activation, layout, given)

    @pytest.mark.parametrize("kind", KINDS, ids=str)
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

        op._forget()
        expected = run()
        for _ in range(3):  # the kind is seen, wanted, known
            run()
        with monkeypatch.context() as watched:
            watched.setattr(layouts, "blocks", fails)
            watched.setattr(op, "_looked_up", fails)
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
