"""Tapes of grouped_linear's CUDA C++ backends without a GPU: PyTorch's ops stand in for the
kernels, on the memory that a launch is given. What is tested is all around them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference, sign_mask
from fastlinear.families.grouped.autograd import GroupedLinear
from fastlinear.families.grouped.cuda import (
    group_map,
    one_launch,
    one_pass,
    packed_groups,
    packed_groups_backward,
    packed_groups_tiles,
    weight_stationary,
    wide_backward,
)
from fastlinear.kernels.cuda import hopper
from fastlinear.kernels.cuda.prepared import Plans
from fastlinear.native import cuda_driver as driver
from tests.families.compiled_nodes import needs_nodes
from tests.families.grouped import tape_checks as checks
from tests.families.grouped.tape_checks import Way, at, compare_inference, draw, formula_of, stood

pytestmark = needs_nodes


@pytest.fixture
def _driver() -> Iterator[None]:
    with checks.python_driver():
        yield


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


def signs_kernel(
    x: Any,
    weight: Any,
    bias: Any,
    activation: str,
    _: bool,
    order: str,
    names: tuple[str, str] = ("packed_groups", "packed_groups"),
) -> Any:
    """y, and its signs where the pre-activation would be."""
    place = sign_mask.place_for(x, weight, activation, order, *names)
    assert place is not None
    y_like = layouts.empty((*x.shape[:3], weight.shape[1]), order, x, x.dtype)
    strip = forward_kernel(x, weight, bias, activation, False, order)

    def run(*a: Any) -> None:
        strip(*a)
        y, into = at(a[1], y_like), at(a[2], torch.empty(place.shape, dtype=torch.uint8))
        assert a[2] == a[7]
        assert y is not None
        assert into is not None
        into.copy_(place.packed(y, activation))

    return run


def stationary_kernel(
    x: Any, weight: Any, bias: Any, activation: str, save: bool, order: str
) -> Any:
    strip = forward_kernel(x, weight, bias, activation, save, order)

    def run(*a: Any) -> None:
        of_x, of_w, of_y, of_pre, b = a[:5]
        strip(of_x, of_y, of_pre, of_w, b, of_x, of_y, of_pre)

    return run


def stationary_signs_kernel(x: Any, weight: Any, bias: Any, *how: Any) -> Any:
    strip = signs_kernel(x, weight, bias, *how, ("weight_stationary", "wide"))

    def run(*a: Any) -> None:
        of_x, of_w, of_y, again, b, of_signs = a[:6]
        assert of_y == again
        strip(of_x, of_y, of_signs, of_w, b, of_x, of_y, of_signs)

    return run


def backward_kernels(self: Any, given: Sequence[Any], wide: bool) -> list[Any]:
    """The pass and its sums; ``given`` begins as ``reference.backward`` takes it."""
    dy, saved, x, weight, activation, needs, order = given[:7]
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
        if sign_mask.is_sign_mask(read[1]):
            kept: Any = read[1]
            if wide:
                assert maps[1] == a[8]
                boxes: Any = sign_mask.Boxes(*x.shape[:3], weight.shape[1])
                read[1] = boxes.unpacked(kept, x.dtype, order)
            else:
                place = sign_mask.Place.of(kept, order, *x.shape[1:3], weight.shape[1])
                read[1] = place.unpacked(kept, x.dtype)
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
    monkeypatch.setattr(reference, "copied", checks.copied_on_a_gpu)

    def stand(module: Any, name: str, made: Callable[..., list[Any]]) -> None:
        class Stood(getattr(module, name)):  # type: ignore[misc]
            def __init__(self, *given: Any) -> None:
                MADE[:] = made(self, given)
                super().__init__(*given)

        monkeypatch.setattr(module, name, Stood)

    stand(packed_groups, "Packed", lambda _, given: [forward_kernel(*given[:6])])
    stand(packed_groups, "PackedWithSignMask", lambda _, given: [signs_kernel(*given[:6])])
    stand(weight_stationary, "Stationary", lambda _, given: [stationary_kernel(*given[:6])])
    stand(
        weight_stationary,
        "StationaryWithSignMask",
        lambda _, given: [stationary_signs_kernel(*given[:6])],
    )
    stand(packed_groups_backward, "PackedBackward", partial(backward_kernels, wide=False))
    stand(wide_backward, "WideBackward", partial(backward_kernels, wide=True))
    for module in (one_launch, one_pass):
        monkeypatch.setattr(module, "_plans", Plans())
    for module in (packed_groups, weight_stationary, packed_groups_backward, wide_backward):
        monkeypatch.setattr(module, "device_facts", lambda _: SimpleNamespace(units=5))
        loader = "_kernel" if module in (packed_groups, weight_stationary) else "_kernels"
        monkeypatch.setattr(module, loader, lambda *_: (0, 0))
    for module in (packed_groups, weight_stationary, packed_groups_backward, packed_groups_tiles):
        monkeypatch.setattr(module, "ordinal", lambda _: 0)
    monkeypatch.setattr(group_map, "GroupMap", Map)
    monkeypatch.setattr(group_map, "ordinal", lambda _: 0)
    monkeypatch.setattr(driver, "TensorMap", Map)
    monkeypatch.setattr(driver, "Launch", Launch)
    monkeypatch.setattr(hopper, "EarlyLaunch", Launch)
    monkeypatch.setattr(driver, "make_current", lambda _: None)
    monkeypatch.setattr(driver, "loading_allowed", nullcontext)
    for name in ("_cuda_getDevice", "_cuda_getCurrentRawStream"):
        monkeypatch.setattr(torch._C, name, lambda *_: 0, raising=False)


BF16: dict[str, Any] = {"dtype": torch.bfloat16}


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", ["... (g k)", "... g k", "g ... k"])
def test_packed_groups(layout: str, activation: str) -> None:
    for bias, tokens in itertools.product((True, False), ((2, 16), (5, 160))):
        given = draw(layout, (4, 100, 52), tokens, bias=bias, **BF16)
        Way(formula_of("packed_groups", "packed_groups", activation, layout), given).compare(given)
        compare_inference("packed_groups", activation, layout, given)
    single = draw(layout, (3, 36, 64), bias=False)
    Way(formula_of("packed_groups", "eager", activation, layout), single).compare(single)
    compare_inference("packed_groups", activation, layout, single)


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("layout", ["... (g k)", "... g k", "g ... k"])
def test_packed_groups_keep_signs(layout: str, activation: str) -> None:
    for bias, tokens in itertools.product((True, False), ((2, 16), (5, 160))):
        given: list[Any] = draw(layout, (4, 100, 52), tokens, bias=bias, **BF16)
        compare_sign_mask(given, ("packed_groups", "packed_groups"), activation, layout)


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("activation", ["relu", "leaky_relu"])
@pytest.mark.parametrize("layout", ["... (g k)", "g ... k", "b (g k) ..."])
def test_stationary_weights_keep_signs(layout: str, activation: str) -> None:
    for bias, tokens in itertools.product((True, False), ((2, 16), (5, 160))):
        given: list[Any] = draw(layout, (2, 144, 200), tokens, bias=bias, **BF16)
        compare_sign_mask(given, ("weight_stationary", "wide"), activation, layout)


def compare_sign_mask(
    given: list[Any], names: tuple[str, str], activation: str, layout: str
) -> None:
    plain = formula_of(*names, activation, layout)
    kept = replace(plain, sign_mask=place_of(given, activation, layout, names))
    Way(kept, given).compare(given)
    wanted = [t for t in given if t is not None]
    dy: Any = None
    found = []
    for formula in (plain, kept):
        y = GroupedLinear.apply(*given, formula)
        dy = torch.randn_like(y) if dy is None else dy
        found.append([y, *torch.autograd.grad(y, wanted, dy)])
    checks.same(*found)


def place_of(
    given: list[Any],
    activation: str,
    layout: str,
    names: tuple[str, str] = ("packed_groups", "packed_groups"),
) -> Any:
    x, weight, _ = given
    rows = layouts.blocks(x, layout, weight.shape[0], weight.shape[2])
    order = layouts.order_of(layout, x.shape)
    place = sign_mask.place_for(rows, weight, activation, order, *names)
    assert place is not None
    return place


@pytest.mark.usefixtures("_stood_in")
def test_signs_serve_second_derivatives_and_a_second_backward() -> None:
    layout = "... (g k)"
    given: list[Any] = draw(layout, (4, 100, 52), **BF16)
    plain = formula_of("packed_groups", "packed_groups", "relu", layout)
    way = Way(replace(plain, sign_mask=place_of(given, "relu", layout)), given)
    dy = torch.randn(3, 16, 208, dtype=torch.bfloat16)
    first = torch.autograd.grad(y := way(given), given, dy, retain_graph=True)
    checks.same(torch.autograd.grad(y, given, dy, create_graph=True), ways_of_torch(given, dy))
    checks.same(torch.autograd.grad(y, given, dy), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, given, dy)


def ways_of_torch(given: list[Any], dy: Tensor) -> Any:
    y = reference.grouped_linear(*given, "relu", "... (g k)")
    return torch.autograd.grad(y, given, dy, create_graph=True)


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", ["... (g k)", "... g k", "g ... k", "b (g k) ...", "b g k ..."])
def test_stationary_weights(layout: str, activation: str) -> None:
    rows = ((2, 16), (5, 40)) if layout.startswith("b") else ((2, 16), (5, 33))
    for bias, tokens in itertools.product((True, False), rows):
        given = draw(layout, (3, 136, 200), tokens, bias=bias, **BF16)
        Way(formula_of("weight_stationary", "eager", activation, layout), given).compare(given)
        compare_inference("weight_stationary", activation, layout, given)


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("activation", ["none", "relu", "silu"])
@pytest.mark.parametrize("layout", ["... (g k)", "g ... k", "b (g k) ..."])
def test_the_wide_pass(layout: str, activation: str) -> None:
    for bias, tokens in itertools.product((True, False), ((2, 16), (5, 160))):
        given = draw(layout, (2, 144, 200), tokens, bias=bias, **BF16)
        first = (
            "weight_stationary" if layout.startswith("b") else "eager"
        )  # which adds a bias in Python
        Way(formula_of(first, "wide", activation, layout), given).compare(given)


@pytest.mark.usefixtures("_stood_in")
@pytest.mark.parametrize("backend", ["packed_groups", "wide"])
def test_any_gradients_of_cuda(backend: str) -> None:
    sizes, first = (
        ((4, 100, 52), "packed_groups") if backend == "packed_groups" else ((2, 144, 200), "eager")
    )
    for needs, m in itertools.product(itertools.product((False, True), repeat=3), (32, 800)):
        if not any(needs) or (backend == "wide" and not any(needs[:2])):
            continue
        given = draw("... (g k)", sizes, (1, m), needs, **BF16)
        Way(formula_of(first, backend, "silu", "... (g k)"), given).compare(given)
