"""Signs of outputs that strips keep for the backward: how they lie, and what is done with them."""

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
from fastlinear.families.grouped.cuda import (
    packed_groups,
    packed_groups_backward,
    packed_groups_backward_config,
    packed_groups_config,
    packed_groups_tiles,
)
from fastlinear.families.grouped.sign_mask import Place
from tests.families import nvrtc_offline as offline
from tests.families.grouped.sign_mask_checks import ALL, check_gradients, drawn, same
from tests.families.hopper_only import hopper_tests

# (groups, K, N)
SIZES = (
    *((8, 100, 100), (8, 64, 64), (16, 32, 32), (4, 128, 128), (8, 20, 36), (8, 50, 26)),
    (3, 48, 8),
)
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-40, -1e-40, 2.0, -2.0)


def modelled(y: np.ndarray[Any, Any], place: Place, activation: str) -> np.ndarray[Any, Any]:
    """The signs of y (M, G, N), number by number, as ``packed_groups_sign_mask.h`` says."""
    made = np.zeros(place.shape, np.uint8)
    for (token, group, feature), value in np.ndenumerate(y):
        plane, row, column = 0, token, group * place.n + feature
        if place.order == "groups":
            plane, row, column = group, token // place.p, token % place.p * place.n + feature
        positive = not value <= 0 if activation == "relu" else value > 0
        byte = row % 8 * 4 + column % 8 // 2
        made[plane, row // 32, column // 8, byte] |= positive << (column % 2 * 4 + row % 32 // 8)
    return made


def specials(m: int, groups: int, n: int, dtype: torch.dtype, order: str) -> Tensor:
    y = torch.randn(1, m, groups, n)
    pick = torch.rand_like(y) < 0.4
    y[pick] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (int(pick.sum()),))]
    return layouts.dense(y.to(dtype), order)


@pytest.mark.parametrize("activation", sign_mask.ACTIVATIONS)
def test_how_they_lie(activation: str) -> None:
    for place in (
        *(Place("tokens", m, 6, 12, 1) for m in (1, 31, 32, 70)),
        *(Place("groups", m, 3, 12, p) for m, p in ((2, 2), (70, 2), (64, 4), (24, 8))),
    ):
        y = specials(place.m, place.groups, place.n, torch.bfloat16, place.order)
        found = place.packed(y, activation)
        assert found.dtype is torch.uint8
        assert found.shape == place.shape
        expected = modelled(y[0].float().numpy(), place, activation)
        assert np.array_equal(found.numpy(), expected)
        assert Place.of(found, *place[:-1]) == place
        back = place.unpacked(found, y.dtype)
        assert layouts.is_dense(back, place.order)
        assert torch.equal(back, ((~(y <= 0)) if activation == "relu" else y > 0).to(y.dtype))


def test_the_derivative_is_the_same_there() -> None:
    for activation, order in itertools.product(sign_mask.ACTIVATIONS, packed_groups_tiles.ORDERS):
        place = Place(order, 40, 4, 12, 2 if order == "groups" else 1)
        y = specials(40, 4, 12, torch.float16, order)
        y = y.where(~y.isnan(), 1.0)  # PyTorch's own derivative takes NaN in another way
        x, weight = torch.randn(1, 40, 4, 8).half(), torch.randn(4, 12, 8).half()
        dy = torch.randn_like(y)
        kept = place.unpacked(place.packed(y, activation), y.dtype)
        expected = reference.backward(dy, y, x, weight, activation, ALL, order)
        found = reference.backward(dy, kept, x, weight, activation, ALL, order)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_where_they_are_kept() -> None:
    def place(groups: int, k: int, n: int, m: int = 64, **given: Any) -> Place | None:
        x = torch.empty(given.get("batch", 1), m, groups, k, dtype=given.get("dtype", torch.half))
        how = {
            "activation": "relu",
            "order": "tokens",
            "forward": "packed_groups",
            "backward": "packed_groups",
        }
        how |= {name: given[name] for name in how if name in given}
        return sign_mask.place_for(x, torch.empty(groups, n, k, dtype=x.dtype), **how)

    for groups, k, n in SIZES:
        assert place(groups, k, n) == Place("tokens", 64, groups, n, 1)
    for k, p in ((128, 1), (100, 2), (64, 4), (60, 2), (36, 4), (20, 8)):
        assert place(8, k, k, order="groups") == Place("groups", 64, 8, k, p)
    for given in (
        {"activation": "none"},
        {"activation": "gelu"},
        {"forward": "triton"},
        {"backward": "triton"},
        {"dtype": torch.float32},
        {"batch": 2},
        {"order": "groups", "m": 63},  # of 100 features no strips of odd tokens
    ):
        assert place(8, 100, 100, **given) is None
    assert place(8, 100, 200) is None  # the backward has no strips so wide


def test_configurations_fit_the_chip() -> None:
    for groups, k, n in SIZES:
        first = packed_groups_config.packed_config(groups, k, n, False, sign_mask=True)
        second = packed_groups_backward_config.packed_backward_config(groups, k, n, sign_mask=True)
        assert first is not None
        assert second is not None
        assert packed_groups_config.fits(first, k, n, False, sign_mask=True)
        assert packed_groups_backward_config.fits(second, k, n, True, ALL, sign_mask=True)
    # the same warps as without signs, in the room of what was saved more tiles
    config = packed_groups_backward_config.PackedBackwardConfig(2, 4, 2, 4, 2)
    assert (
        packed_groups_backward_config.packed_backward_config(100, 100, 100, sign_mask=True)
        == config
    )


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    groups, k, n = sizes
    for shared, activation in itertools.product((False, True), sign_mask.ACTIVATIONS):
        side = 16 if shared else groups
        first = packed_groups_config.packed_config(side, k, n, False, sign_mask=True)
        second = packed_groups_backward_config.packed_backward_config(side, k, n, sign_mask=True)
        assert first is not None
        assert second is not None
        dtype = torch.float16 if activation == "relu" and shared else torch.bfloat16
        text = packed_groups.source(dtype, k, n, activation, True, False, first, shared, True)
        kernel = offline.usage(text, "packed_groups.cu")[packed_groups.KERNEL]
        assert kernel.frame == 0, (sizes, activation, kernel)
        assert kernel.registers <= packed_groups_config.limit(first)[1]
        text = packed_groups_backward.source(dtype, k, n, activation, ALL, second, shared, True)
        kernel = offline.usage(text, "packed_groups_backward.cu")[packed_groups_backward.KERNEL]
        assert kernel.frame == 0, (sizes, activation, kernel)
        if packed_groups_backward_config.service_warps(second) > 1:
            assert kernel.registers == packed_groups_backward_config.limit(second)[1]


# ---------------------------------------------------------------- on a GPU


def compare(
    m: int, sizes: tuple[int, int, int], dtype: torch.dtype, order: str, activation: str
) -> None:
    x, weight, bias, dy = drawn((1, m), sizes, dtype, order)
    place = sign_mask.place_for(x, weight, activation, order, "packed_groups", "packed_groups")
    assert place is not None
    y, _ = packed_groups.forward(x, weight, bias, activation, False, order)
    again, kept = packed_groups.forward(x, weight, bias, activation, False, order, sign_mask=place)
    assert same(y, again)
    assert kept is not None
    expected = place.unpacked(place.packed(y, activation), dtype)
    assert torch.equal(place.unpacked(kept, dtype), expected)
    check_gradients(packed_groups_backward.backward, dy, y, kept, x, weight, activation, order)


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("order", packed_groups_tiles.ORDERS)
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_gradients_are_those_of_saved_outputs(
        self, sizes: tuple[int, int, int], order: str
    ) -> None:
        if order == "groups" and sizes[1] == 128:
            return  # see test_where_they_are_kept
        for m in (8, 40, 104, 1000, 4096):
            for dtype in (torch.bfloat16, torch.float16):
                compare(m, sizes, dtype, order, "relu")
            compare(m, sizes, torch.bfloat16, order, "leaky_relu")

    def test_odd_tokens(self) -> None:
        for m in (1, 31, 33, 999):
            compare(m, (8, 100, 100), torch.bfloat16, "tokens", "relu")

    def test_blocks_of_several_strips(self) -> None:
        compare(160, (400, 100, 100), torch.bfloat16, "tokens", "relu")
        compare(160, (400, 100, 100), torch.bfloat16, "groups", "relu")

    @pytest.mark.parametrize("layout", ["... (g k)", "g ... k"])
    def test_a_layer_keeps_them(self, layout: str) -> None:
        order = layouts.order_of(layout, (1, 1, 1))
        x, weight, bias, dy = drawn((1, 4096), (16, 100, 100), torch.bfloat16, order)
        given = [t.requires_grad_() for t in (users(x, layout), weight, bias)]
        place = sign_mask.place_for(x, weight, "relu", order, "packed_groups", "packed_groups")
        for _ in range(3):  # in Python, then by tapes
            y = fl.grouped_linear(*given, "relu", layout)
            dy_users = users(dy, layout)
            found = torch.autograd.grad(y, given, dy_users, retain_graph=True)
            backends = packed_groups.forward, packed_groups_backward.backward
            plain = Formula("relu", layout, "packed_groups", "packed_groups", *backends)
            assert place is not None
            expected = torch.autograd.grad(GroupedLinear.apply(*given, plain), given, dy_users)
            kept = GroupedLinear.apply(*given, replace(plain, sign_mask=place))
            assert all(map(same, found, expected))
            assert all(map(same, torch.autograd.grad(kept, given, dy_users), expected))
            assert all(map(same, torch.autograd.grad(y, given, dy_users), found))

    def test_in_a_cuda_graph(self) -> None:
        x, weight, bias, dy = drawn((1, 4096), (16, 100, 100), torch.bfloat16, "tokens")
        given = [t.requires_grad_() for t in (users(x, "... (g k)"), weight, bias)]
        dy = users(dy, "... (g k)")

        def step() -> tuple[Tensor, ...]:
            y = fl.grouped_linear(*given, "relu")
            return (y.detach(), *torch.autograd.grad(y, given, dy))

        expected = step()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = step()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
        assert all(map(same, recorded, expected))

    def test_what_strips_do_not_take_is_given_what_it_takes(self) -> None:
        x, weight, bias, dy = drawn((1, 64), (8, 100, 100), torch.bfloat16, "tokens")
        place = sign_mask.place_for(x, weight, "relu", "tokens", "packed_groups", "packed_groups")
        y, kept = packed_groups.forward(x, weight, bias, "relu", False, "tokens", sign_mask=place)
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        again, packed = packed_groups.forward(
            x, turned, bias, "relu", False, "tokens", sign_mask=place
        )
        assert place is not None
        assert packed is not None
        assert kept is not None
        assert torch.equal(packed, place.packed(again, "relu"))
        found = packed_groups_backward.backward(dy, kept, x, turned, "relu", ALL, "tokens")
        expected = packed_groups_backward.backward(dy, y, x, turned, "relu", ALL, "tokens")
        for a, b in zip(found, expected, strict=True):
            assert a is not None
            assert b is not None
            assert same(a, b)


def users(t: Tensor, layout: str) -> Tensor:
    """t (1, M, G, features) as a user of a layout has it."""
    return t[0].permute(1, 0, 2) if layout == "g ... k" else t[0].flatten(1)
