"""Signs of outputs of wide groups, which ``weight_stationary`` leaves for the backward ``wide``."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference, sign_mask
from fastlinear.families.grouped.autograd import Formula, GroupedLinear
from fastlinear.families.grouped.cuda import weight_stationary, wide_backward
from fastlinear.families.grouped.cuda.weight_stationary_config import stationary_config
from fastlinear.families.grouped.cuda.wide_backward_config import (
    fits,
    shared_bytes,
    wide_backward_config,
)
from fastlinear.families.grouped.sign_mask import Boxes
from tests.families import nvrtc_offline as offline
from tests.families.grouped.sign_mask_checks import ALL, check_gradients, drawn, same
from tests.families.hopper_only import hopper_tests

# (G, K, N): one block of a tile and two, of each number of boxes
SIZES = (
    *((2, 256, 256), (3, 256, 192), (3, 136, 64), (2, 200, 200), (4, 128, 256), (2, 64, 256)),
    *((2, 192, 136), (40, 160, 208), (2, 256, 128), (2, 104, 192)),
)
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-40, -1e-40, 2.0, -2.0)


def positive(y: Tensor, activation: str) -> Tensor:
    return ~(y <= 0) if activation == "relu" else y > 0


@pytest.mark.parametrize("activation", sign_mask.ACTIVATIONS)
def test_how_they_lie(activation: str) -> None:
    for place in (Boxes(1, 70, 2, 40), Boxes(3, 8, 1, 72), Boxes(2, 64, 3, 136)):
        y = torch.randn(*place)
        pick = torch.rand_like(y) < 0.4
        y[pick] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (int(pick.sum()),))]
        y = y.bfloat16()
        expected = np.zeros(place.shape, np.uint8)
        for (batch, token, group, n), is_one in np.ndenumerate(positive(y, activation).numpy()):
            warp, row, column = token % 64 // 16, token % 16, n % 64
            lane = row % 8 * 4 + column % 8 // 2
            byte = column // 32 * 2 + column % 2
            bit = column % 32 // 8 * 2 + row // 8
            expected[batch, group, token // 64, n // 64, warp, lane, byte] |= is_one << bit
        found = place.packed(y, activation)
        assert found.dtype is torch.uint8
        assert found.is_contiguous()
        assert np.array_equal(found.numpy(), expected)
        for order in layouts.ORDERS:
            back = place.unpacked(found, y.dtype, order)
            assert layouts.is_dense(back, order)
            assert torch.equal(back, positive(y, activation).to(y.dtype))


def test_where_they_are_kept() -> None:
    x, weight = torch.empty(3, 16, 2, 256, dtype=torch.bfloat16), torch.empty(2, 200, 256)

    def kept(forward: str, backward: str, activation: str = "relu", x: Tensor = x) -> Any:
        return sign_mask.place_for(x, weight, activation, "channels", forward, backward)

    assert kept("weight_stationary", "wide") == Boxes(3, 16, 2, 200)
    assert kept("weight_stationary", "wide", "leaky_relu") == Boxes(3, 16, 2, 200)
    assert kept("weight_stationary", "wide", "silu") is None
    assert kept("weight_stationary", "wide", x=x.float()) is None
    for forward, backward in (
        ("weight_stationary", "triton"),
        ("weight_stationary", "eager"),
        ("wide", "wide"),
    ):
        assert kept(forward, backward) is None
    y = 3 * 2 * 16 * 200 * 2
    assert Boxes(3, 64, 2, 256).shape == (3, 2, 1, 4, 4, 32, 4)
    assert np.prod(Boxes(3, 16, 2, 200).shape) <= y


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    _, k, n = sizes
    first = stationary_config(k, n)
    second = wide_backward_config(k, n, False, ALL, True)
    assert first is not None
    assert second is not None
    assert second.split == (k > 128)
    assert fits(second, n, False, ALL)
    assert shared_bytes(second, n, False, ALL) < shared_bytes(second, n, True, ALL)
    for activation, channels in itertools.product(sign_mask.ACTIVATIONS, (False, True)):
        dtype = torch.float16 if channels else torch.bfloat16
        how = channels, True
        text = weight_stationary.source(dtype, k, n, activation, True, False, first, *how)
        kernel = offline.usage(text, "weight_stationary.cu")[weight_stationary.KERNEL]
        assert (kernel.frame, kernel.registers) == (0, 168), (sizes, activation, kernel)
        text = wide_backward.source(dtype, k, n, activation, ALL, second, *how)
        kernel = offline.usage(text, "wide_backward.cu")[wide_backward.KERNEL]
        assert (kernel.frame, kernel.registers) == (0, 168), (sizes, activation, kernel)


# ---------------------------------------------------------------- on a GPU


def compare(
    shape: tuple[int, int],
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    order: str,
    activation: str,
) -> None:
    x, weight, bias, dy = drawn(shape, sizes, dtype, order)
    place = Boxes(*shape, sizes[0], sizes[2])
    y, _ = weight_stationary.forward(x, weight, bias, activation, False, order)
    again, kept = weight_stationary.forward(
        x, weight, bias, activation, False, order, sign_mask=place
    )
    assert same(y, again)
    assert kept is not None
    assert torch.equal(place.unpacked(kept, dtype, order), positive(y, activation).to(dtype))
    check_gradients(wide_backward.backward, dy, y, kept, x, weight, activation, order)


def users(t: Tensor, layout: str) -> Tensor:
    """t (B, L, G, features) as a user of a layout has it."""
    if layout == "b (g k) ...":
        return t.permute(0, 2, 3, 1).flatten(1, 2)
    return t[0].permute(1, 0, 2) if layout == "g ... k" else t[0].flatten(1)


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("order", layouts.ORDERS)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_gradients_are_those_of_saved_outputs(
        self, sizes: tuple[int, int, int], order: str
    ) -> None:
        shapes = [(1, m) for m in (8, 40, 104, 1000, 4096)]
        if order == "channels":
            shapes += [(3, 72), (5, 64)]
        for shape in shapes:
            for dtype in (torch.bfloat16, torch.float16):
                compare(shape, sizes, dtype, order, "relu")
            compare(shape, sizes, torch.bfloat16, order, "leaky_relu")

    def test_odd_tokens(self) -> None:
        for m in (1, 31, 33, 999):
            compare((1, m), (8, 256, 200), torch.bfloat16, "tokens", "relu")

    @pytest.mark.parametrize("order", layouts.ORDERS)
    def test_bad_numbers_of_dy_stay_in_their_column(self, order: str) -> None:
        for activation in ("relu", "none", "silu"):
            x, weight, _, dy = drawn((1, 200), (2, 256, 200), torch.bfloat16, order)
            x[x.isnan() | x.isinf()] = 1.0
            y, pre = reference.forward(x, weight, None, activation, activation == "silu", order)
            dy[0, 77, 1, 21] = float("nan")
            dy[0, 78, 0, 5] = float("inf")
            saved = {"relu": torch.ones_like(y), "none": None, "silu": pre}[activation]
            db = wide_backward.backward(dy, saved, x, weight, activation, ALL, order)[2]
            assert db is not None
            assert (~db.isfinite()).nonzero().tolist() == [[0, 5], [1, 21]]

    @pytest.mark.parametrize("layout", ["... (g k)", "g ... k", "b (g k) ..."])
    def test_a_layer_keeps_them(self, layout: str) -> None:
        order = layouts.order_of(layout, (1, 1, 2))
        x, weight, bias, dy = drawn((1, 4096), (16, 256, 256), torch.bfloat16, order)
        given = [t.requires_grad_() for t in (users(x, layout), weight, bias)]
        place = Boxes(1, 4096, 16, 256)
        for _ in range(3):  # in Python, then by tapes
            y = fl.grouped_linear(*given, "relu", layout)
            dy_users = users(dy, layout)
            found = torch.autograd.grad(y, given, dy_users, retain_graph=True)
            backends = weight_stationary.forward, wide_backward.backward
            plain = Formula("relu", layout, "weight_stationary", "wide", *backends)
            expected = torch.autograd.grad(GroupedLinear.apply(*given, plain), given, dy_users)
            kept = GroupedLinear.apply(*given, replace(plain, sign_mask=place))
            assert all(map(same, found, expected))
            assert all(map(same, torch.autograd.grad(kept, given, dy_users), expected))
            assert all(map(same, torch.autograd.grad(y, given, dy_users), found))

    def test_what_a_call_keeps_is_a_sixteenth_of_its_output(self) -> None:
        x, weight, bias, _ = drawn((1, 4096), (16, 256, 256), torch.bfloat16, "tokens")
        given = [t.requires_grad_() for t in (users(x, "... (g k)"), weight, bias)]
        runs = weight_stationary.forward, wide_backward.backward, Boxes(1, 4096, 16, 256)
        how = Formula("relu", "... (g k)", "weight_stationary", "wide", *runs)
        for _ in range(3):
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = GroupedLinear.apply(*given, how)
            kept = torch.cuda.memory_allocated() - before - y.nbytes
            assert y.nbytes // 16 <= kept <= y.nbytes // 15
            del y

    def test_what_the_kernels_do_not_take_is_given_what_they_take(self) -> None:
        for order, length in (("tokens", 64), ("channels", 72)):
            x, weight, bias, dy = drawn((1, length), (8, 200, 200), torch.bfloat16, order)
            place = Boxes(1, length, 8, 200)
            y, kept = weight_stationary.forward(
                x, weight, bias, "relu", False, order, sign_mask=place
            )
            turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
            again, packed = weight_stationary.forward(
                x, turned, bias, "relu", False, order, sign_mask=place
            )
            assert packed is not None
            assert kept is not None
            assert torch.equal(packed, place.packed(again, "relu"))
            found = wide_backward.backward(dy, kept, x, turned, "relu", ALL, order)
            expected = wide_backward.backward(dy, y, x, turned, "relu", ALL, order)
            for a, b in zip(found, expected, strict=True):
                assert a is not None
                assert b is not None
                assert same(a, b)
