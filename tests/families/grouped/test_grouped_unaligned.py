"""``weight_stationary`` and ``wide`` on groups whose rows do not begin at 16 bytes: against float64
and beside bad numbers on a GPU, their compilation and what they are told anywhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import sign_mask
from fastlinear.families.grouped.autograd import Formula, GroupedLinear
from fastlinear.families.grouped.cuda import weight_stationary, weight_stationary_config
from fastlinear.families.grouped.cuda import wide_backward as wide
from fastlinear.families.grouped.cuda.group_map import by_words, has_results, is_seen, strides_of
from fastlinear.families.grouped.cuda.wide_backward_config import has_words, wide_backward_config
from tests.families import nvrtc_offline as offline
from tests.families.grouped import bad_numbers
from tests.families.grouped import test_grouped_sign_mask_boxes as of_signs
from tests.families.grouped import test_grouped_weight_stationary as forward
from tests.families.grouped import test_grouped_wide_backward as backward
from tests.families.hopper_only import hopper_tests

LAUNCH_REGISTERS = 168
"""Of a thread of 384; more, and the warps that compute would wait for theirs for ever."""
ALL = (True, True, True)
# (groups, K, N): words and pairs of them, of both or one side; one block of a tile and two
BOTH = (
    *((8, 100, 200), (3, 200, 100), (5, 150, 150), (8, 130, 130), (3, 250, 250), (4, 68, 140)),
    *((8, 66, 256), (4, 256, 130), (7, 254, 66), (40, 164, 196), (1, 128, 132), (4, 188, 130)),
)
FORWARD = (*BOTH, (8, 100, 500), (3, 500, 100), (2, 1020, 68), (300, 100, 100), (3, 126, 190))
BACKWARD = (*BOTH, (4, 2, 130), (5, 130, 2), (8, 232, 20), (3, 126, 190))
TOKENS = (2, 64, 68, 999)
CHANNELS = ((1, 8), (5, 64), (2, 72), (3, 1000))


def activation_for(m: int) -> str:
    return "silu" if m in (68, 72) else "none" if m == 64 else "relu"


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("order", layouts.ORDERS)
    @pytest.mark.parametrize("sizes", FORWARD, ids=str)
    def test_forward(self, sizes: tuple[int, int, int], order: str) -> None:
        shapes = CHANNELS if order == "channels" else ((1, m) for m in (*TOKENS, 4099))
        for batch, m in shapes:
            if sizes[0] <= 100 or m < 999:
                given = forward.drawn(m, sizes, order=order, batch=batch)
                forward.check(*given, activation_for(m), order=order)

    @pytest.mark.parametrize("order", layouts.ORDERS)
    @pytest.mark.parametrize("sizes", BACKWARD, ids=str)
    def test_backward(self, sizes: tuple[int, int, int], order: str) -> None:
        shapes = CHANNELS if order == "channels" else ((1, m) for m in (*TOKENS, 4099))
        for batch, m in shapes:
            activation = activation_for(m)
            given = backward.drawn(m, *sizes, activation, order=order, batch=batch)
            backward.check(given, activation, order=order)

    def test_tokens_that_fill_no_tile(self) -> None:
        for m in (1, 63, 65, 511):
            forward.check(*forward.drawn(m, (7, 150, 100)), "relu")
            backward.check(backward.drawn(m, 7, 150, 100, "relu"), "relu")

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str, order: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            for k, n in ((150, 250), (250, 150), (100, 200)):
                given = forward.drawn(132, (4, k, n), dtype, order)
                forward.check(*given, activation, order=order)
                of_dy = backward.drawn(132, 4, k, n, activation, dtype, order)
                backward.check(of_dy, activation, order=order)

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("needs", backward.NEEDS, ids=str)
    def test_what_is_wanted(self, needs: Any, order: str) -> None:
        for activation in ("gelu", "none"):
            for k, n in ((250, 150), (100, 200)):
                given = backward.drawn(704, 4, k, n, activation, order=order)
                backward.check(given, activation, needs, order=order)

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("activation", sign_mask.ACTIVATIONS)
    def test_signs(self, activation: str, order: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            for sizes in ((8, 100, 200), (4, 250, 150), (4, 150, 66)):
                for m in (64, 203):
                    of_signs.compare((1, m), sizes, dtype, order, activation)

    def test_rows_further_apart_than_they_are_long(self) -> None:
        x, weight, bias = forward.drawn(300, (3, 150, 130))
        dy, saved, _, _ = backward.drawn(300, 3, 150, 130, "relu")
        for order, shape in (("tokens", (300, 3, 152)), ("groups", (3, 301, 154))):
            memory = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
            wide_x = memory[None, :, :, :150]
            if order == "groups":
                wide_x = memory[None, :, :300, 2:152].transpose(1, 2)
            wide_x.copy_(x)
            forward.check(wide_x, weight, bias, "relu", order=order)
            of_dy = [layouts.dense(t, order) for t in (dy, saved) if t is not None]
            backward.check((*of_dy, wide_x, weight), "relu", order=order)

    @pytest.mark.parametrize("order", layouts.ORDERS)
    @pytest.mark.parametrize("sizes", [(150, 130), (100, 200), (196, 100)], ids=str)
    def test_bad_numbers_stay_in_their_group(self, sizes: tuple[int, int], order: str) -> None:
        for activation in ("none", "silu"):
            given = backward.drawn(72, 8, *sizes, activation, order=order)
            bad_numbers.check_backward(wide.backward, given, activation, order)
            _, _, x, weight = given
            y, _ = weight_stationary.forward(x, weight, None, "none", False, order)
            assert y[:, :, 1].isnan().all()
            assert y[:, :, [0, *range(3, 8)]].isfinite().all()

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("sizes", [(150, 130), (100, 200)], ids=str)
    def test_bad_numbers_stay_in_their_token(self, sizes: tuple[int, int], order: str) -> None:
        dy, _, x, weight = backward.drawn(136, 8, *sizes, "relu", order=order)
        x[:, 1::4] = float("nan")
        dy[:, 2::4] = float("nan")
        y, _ = weight_stationary.forward(x, weight, None, "relu", False, order)
        bad = torch.arange(136, device="cuda") % 4
        assert y[:, bad == 1].isnan().all()
        assert y[:, bad != 1].isfinite().all()
        dx, _, _ = wide.backward(dy, None, x, weight, "none", ALL, order)
        assert dx is not None
        assert dx[:, bad == 2].isnan().all()
        assert dx[:, bad != 2].isfinite().all()

    @pytest.mark.parametrize("layout", ["... (g k)", "g ... k", "b (g k) ..."])
    @pytest.mark.parametrize("activation", ["relu", "silu", "none"])
    def test_a_layer_takes_them_by_tapes(self, activation: str, layout: str) -> None:
        order = layouts.order_of(layout, (1, 1, 2))
        x, weight, bias = forward.drawn(2048, (16, 150, 130), order=order)
        dy = backward.drawn(2048, 16, 150, 130, "none", order=order)[0]
        given = [t.requires_grad_() for t in (of_signs.users(x, layout), weight, bias)]
        of_y = of_signs.users(dy, layout)
        plain = Formula(
            activation,
            layout,
            "weight_stationary",
            "wide",
            weight_stationary.forward,
            wide.backward,
        )
        expected = GroupedLinear.apply(*given, plain)
        gradients = torch.autograd.grad(expected, given, of_y)
        for _ in range(3):  # in Python, then by tapes
            y = fl.grouped_linear(*given, activation, layout)
            assert torch.equal(y, expected)
            found = torch.autograd.grad(y, given, of_y)
            assert all(map(torch.equal, found, gradients))

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    def test_repeated_runs_are_equal(self, order: str) -> None:
        for sizes in ((8, 100, 200), (4, 250, 150), (100, 130, 130)):
            given = forward.drawn(3000, sizes, order=order)
            first = weight_stationary.forward(*given, "relu", False, order)[0]
            of_dy = backward.drawn(3000, *sizes, "gelu", order=order)
            found = wide.backward(*of_dy, "gelu", ALL, order)
            for _ in range(100):
                assert torch.equal(
                    first, weight_stationary.forward(*given, "relu", False, order)[0]
                )
                again = wide.backward(*of_dy, "gelu", ALL, order)
                assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))  # type: ignore[arg-type]


def test_what_comes_by_words() -> None:
    assert [by_words(f, "tokens") for f in (100, 104, 2, 250)] == [True, False, True, True]
    assert not by_words(100, "channels")
    assert has_words(100, 200, "tokens", ALL)
    assert has_words(200, 100, "groups", (True, False, True))
    assert not has_words(100, 200, "tokens", (True, False, True))
    assert not has_words(100, 100, "channels", ALL)
    x = torch.zeros(1, 6, 3, 150)
    assert strides_of(x, 150, "tokens") == (450, 150)
    assert strides_of(x, 130, "tokens", dense=True) == (390, 130)
    assert strides_of(x, 130, "groups", dense=True) == (130, 780)
    assert strides_of(x, 128, "groups", dense=True) == (0, 0)


def test_which_tensors_are_taken() -> None:
    x = torch.zeros(1, 7, 3, 150, dtype=torch.bfloat16)
    weight = torch.zeros(3, 130, 150, dtype=torch.bfloat16)
    dy = torch.zeros(1, 7, 3, 130, dtype=torch.bfloat16)
    for order in ("tokens", "groups"):
        given = [layouts.dense(t, order) for t in (dy, x)]
        assert weight_stationary.serves(given[1], weight, None, order)
        assert wide.serves(given[0], None, given[1], weight, order)
        assert wide.serves(given[0], given[0], given[1], weight, order)
    assert not weight_stationary.serves(
        x, weight.transpose(1, 2).contiguous().transpose(1, 2), None, "tokens"
    )
    assert not weight_stationary.serves(
        x[..., :149], weight[..., :149].contiguous(), None, "tokens"
    )
    flat = torch.zeros(4 * 7 * 3 * 152, dtype=torch.bfloat16)
    assert is_seen(flat[2:].as_strided((1, 7, 3, 150), (0, 456, 152, 1)), "tokens")
    assert not is_seen(flat[1:].as_strided((1, 7, 3, 150), (0, 456, 152, 1), 1), "tokens")
    assert not is_seen(flat.as_strided((1, 7, 3, 150), (0, 455, 152, 1)), "tokens")
    assert not is_seen(flat.as_strided((1, 7, 3, 100), (0, 456, 150, 1)), "tokens")  # of 8 bytes
    assert not is_seen(flat.as_strided((1, 7, 3, 150), (0, 456, 152, 2)), "tokens")
    assert not is_seen(torch.zeros(2, 7, 3, 150, dtype=torch.bfloat16), "tokens")


def test_offsets_that_kernels_cannot_count_are_refused() -> None:
    memory = torch.zeros(1, device="meta", dtype=torch.bfloat16)
    for row, apart, seen in ((1 << 27, 150, True), (1 << 28, 150, False), (150, 1 << 31, False)):
        t = memory.as_strided((1, 7, 3, 150), (0, row, apart, 1))
        assert is_seen(t, "groups") == seen
    assert has_results(1 << 23, 150, "groups")
    assert not has_results(1 << 24, 150, "groups")
    assert has_results(1 << 24, 152, "groups")  # by boxes


@pytest.mark.parametrize("order", ["tokens", "channels"])
@pytest.mark.parametrize("sizes", [BOTH[0], BOTH[2], BOTH[4], BOTH[7], BOTH[11]], ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int], order: str) -> None:
    _, k, n = sizes
    config = weight_stationary_config.stationary_config(k, n)
    assert config is not None
    for activation, dtype in (("relu", torch.bfloat16), ("gelu", torch.float16)):
        act = activation_of(activation)
        of_signs = activation == "relu"
        how = True, act.saved == "pre", config, order == "channels", of_signs
        text = weight_stationary.source(dtype, k, n, activation, *how)
        kernel = offline.usage(text, "weight_stationary.cu")[weight_stationary.KERNEL]
        assert (kernel.frame, kernel.registers) == (0, LAUNCH_REGISTERS), (activation, kernel)
    words = has_words(k, n, order, ALL)
    for activation in ("relu", "none", "gelu"):
        of_signs = activation == "relu"
        whole = wide_backward_config(k, n, activation == "gelu", ALL, of_signs, words)
        assert whole is not None
        more = whole, order == "channels", of_signs
        text = wide.source(torch.bfloat16, k, n, activation, ALL, *more)
        kernel = offline.usage(text, "wide_backward.cu")[wide.KERNEL]
        assert (kernel.frame, kernel.registers) == (0, LAUNCH_REGISTERS), (activation, kernel)
