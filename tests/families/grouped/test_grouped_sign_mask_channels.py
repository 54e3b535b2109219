"""Signs of outputs channels first, which Triton kernels keep for the backward."""

from __future__ import annotations

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
from fastlinear.families.grouped.sign_mask import Channels
from tests.families.interpreted import DEVICE, compares, gpu, run_interpreted, starts_it

ALL = (True, True, True)
ORDER = "channels"
# (B, L, G, K, N)
SIZES = (
    *((1, 70, 3, 20, 40), (3, 37, 2, 36, 100), (2, 5, 3, 33, 64), (1, 64, 2, 32, 17)),
    *((1, 200, 1, 100, 128), (2, 16, 5, 64, 32), (1, 1, 2, 17, 33)),
)
SPECIAL = (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 1e-40, -1e-40, 2.0, -2.0)


def drawn(
    sizes: tuple[int, ...], dtype: torch.dtype, special: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (B, L, G, K), weight, bias, dy; among pre-activations are 0, -0, NaN and infinities."""
    batch, length, groups, k, n = sizes
    x = torch.randn(batch, length, groups, k, device=DEVICE)
    bias = torch.randn(groups, n, device=DEVICE)
    if special and length:
        x[:, ::7] = 0.0  # where the bias is 0 or -0, so is y
        x[:, 3::50, 0] = float("nan")
        x[:, 5::50, 1:2] = float("inf")
        bias[:, ::3], bias[:, 1::3] = 0.0, -0.0
    weight = torch.randn(groups, n, k, device=DEVICE) / k**0.5
    dy = layouts.dense(torch.randn(batch, length, groups, n, device=DEVICE).to(dtype), ORDER)
    return layouts.dense(x.to(dtype), ORDER), weight.to(dtype), bias.to(dtype), dy


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


@pytest.mark.parametrize("activation", sign_mask.ACTIVATIONS)
def test_how_they_lie(activation: str) -> None:
    for place in (Channels(1, 5, 2, 40), Channels(3, 4, 1, 64), Channels(2, 1, 3, 17)):
        y = torch.randn(*place[:3], place.n)
        pick = torch.rand_like(y) < 0.4
        y[pick] = torch.tensor(SPECIAL)[torch.randint(len(SPECIAL), (int(pick.sum()),))]
        y = layouts.dense(y.bfloat16(), ORDER)
        expected = np.zeros(place.shape, np.uint8)
        for (batch, token, group, output), value in np.ndenumerate(y.float().numpy()):
            positive = not value <= 0 if activation == "relu" else value > 0
            unit = output // 32 * 4 + output % 8 // 2
            bit = output % 32 // 8 * 2 + output % 2
            expected[batch, group, unit, token] |= positive << bit
        found = place.packed(y, activation)
        assert found.dtype is torch.uint8
        assert found.is_contiguous()
        assert np.array_equal(found.numpy(), expected)
        assert Channels.of(found, place.n) == place
        back = place.unpacked(found, y.dtype)
        assert layouts.is_dense(back, ORDER)
        assert torch.equal(back, ((~(y <= 0)) if activation == "relu" else y > 0).to(y.dtype))


def test_where_they_are_kept() -> None:
    def place(k: int, n: int, batch: int = 2, **given: Any) -> Any:
        x = torch.empty(batch, 64, 3, k, dtype=given.get("dtype", torch.half))
        how = {"activation": "relu", "order": ORDER, "forward": "triton", "backward": "triton"}
        how |= {name: given[name] for name in how if name in given}
        return sign_mask.place_for(x, torch.empty(3, n, k, dtype=x.dtype), **how)

    for k, n in ((100, 100), (32, 17), (128, 128), (8, 64)):
        assert place(k, n) == Channels(2, 64, 3, n)
        assert place(k, n, batch=1, activation="leaky_relu") == Channels(1, 64, 3, n)
    for given in (
        *({"activation": "none"}, {"activation": "gelu"}, {"dtype": torch.float32}),
        *({"forward": "eager"}, {"backward": "eager"}, {"order": "groups"}, {"order": "tokens"}),
    ):
        assert place(100, 100, **given) is None
    assert place(100, 16) is None  # its outputs are fewer than four units hold
    assert place(256, 100) is None  # the backward is more than one pass
    assert place(100, 200) is None


@compares
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gradients_are_those_of_saved_outputs(sizes: tuple[int, ...]) -> None:
    from fastlinear.families.grouped.triton import backward, forward

    batch, length, groups, _, n = sizes
    place = Channels(batch, length, groups, n)
    for dtype, activation in (
        *((torch.float16, "relu"), (torch.float16, "leaky_relu"), (torch.bfloat16, "relu")),
    ):
        x, weight, bias, dy = drawn(sizes, dtype)
        y, _ = forward.forward(x, weight, bias, activation, False, ORDER)
        again, kept = forward.forward(x, weight, bias, activation, False, ORDER, sign_mask=place)
        assert same(y, again)
        assert kept is not None
        ones = place.unpacked(kept, dtype)
        assert torch.equal(ones, place.unpacked(place.packed(y, activation), dtype))
        for needs in (ALL, (True, False, False), (False, True, True), (False, False, True)):
            rest = (x, weight, activation, needs, ORDER)
            found = backward.backward(dy, kept, *rest)
            expected = backward.backward(dy, ones, *rest)
            exact = reference.backward(
                dy.double(), ones.double(), *(t.double() for t in rest[:2]), *rest[2:]
            )
            for a, b, c in zip(found, expected, exact, strict=True):
                assert (a is None) == (b is None)
                if a is not None and b is not None and c is not None:
                    assert torch.equal(a.isfinite(), b.isfinite())
                    close(a, c, dtype)


def close(found: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    """Within two roundings of the derivative and the result, where the right one is finite."""
    there = exact.isfinite() & found.isfinite()
    error = (found.double() - exact)[there].norm()
    assert error <= 4 * torch.finfo(dtype).eps * exact[there].norm() + 1e-6


@compares
def test_nothing_and_too_much_are_left_to_pytorch() -> None:
    from fastlinear.families.grouped.triton import backward, forward, tensors

    x, weight, bias, dy = drawn((2, 0, 3, 20, 40), torch.float16)
    y, kept = forward.forward(
        x, weight, bias, "relu", False, ORDER, sign_mask=Channels(2, 0, 3, 40)
    )
    assert y.shape == (2, 0, 3, 40)
    assert kept is not None
    assert kept.shape == (2, 3, 8, 0)
    dx, dw, db = backward.backward(dy, kept, x, weight, "relu", ALL, ORDER)
    assert dx is not None
    assert dx.shape == x.shape
    assert dw is not None
    assert not dw.any()
    assert db is not None
    assert not db.any()
    x, weight, bias, dy = drawn((1, 9, 2, 20, 40), torch.float16, special=False)
    place = Channels(1, 9, 2, 40)
    y, kept = forward.forward(x, weight, bias, "relu", False, ORDER, sign_mask=place)
    far, tensors.far_apart = tensors.far_apart, lambda *_: True
    try:
        theirs, packed = forward.forward(x, weight, bias, "relu", False, ORDER, sign_mask=place)
        found = backward.backward(dy, packed, x, weight, "relu", ALL, ORDER)
    finally:
        tensors.far_apart = far
    assert packed is not None
    assert torch.equal(packed, place.packed(theirs, "relu"))
    expected = reference.backward(dy, theirs, x, weight, "relu", ALL, ORDER)
    assert all(map(torch.equal, found, expected))


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


class TestOnTheDevice:
    pytestmark = gpu

    @pytest.mark.parametrize("layout", ["b (g k) ...", "b g k ..."])
    def test_a_layer_keeps_them(self, layout: str) -> None:
        x, weight, bias, dy = drawn((2, 2048, 16, 100, 100), torch.bfloat16, special=False)

        def users(t: Tensor) -> Tensor:
            t = t.permute(0, 2, 3, 1)
            return (t.flatten(1, 2) if layout == "b (g k) ..." else t).detach()

        given = [t.requires_grad_() for t in (users(x), weight, bias)]
        results = []
        for _ in range(3):  # in Python, then by tapes
            y = fl.grouped_linear(*given, "relu", layout)
            results.append(torch.autograd.grad(y, given, users(dy), retain_graph=True))
            results.append(torch.autograd.grad(y, given, users(dy)))
        assert all(map(torch.equal, results[0] * 5, [g for r in results[1:] for g in r]))
        wide = [t.detach().double().requires_grad_() for t in given]
        out = fl.grouped_linear(*wide, "relu", layout)
        for a, b in zip(
            results[0], torch.autograd.grad(out, wide, users(dy).double()), strict=True
        ):
            assert (a.double() - b).norm() <= 0.02 * b.norm()

    def test_what_a_call_keeps_is_a_sixteenth_of_its_output(self) -> None:
        from fastlinear.families.grouped.triton import backward, forward

        x, weight, bias, _ = drawn((1, 4096, 16, 128, 128), torch.bfloat16, special=False)
        given = [x.permute(0, 2, 3, 1).flatten(1, 2).requires_grad_(), weight, bias]
        backends = forward.forward, backward.backward
        taken = []
        for place in (None, Channels(1, 4096, 16, 128)) * 2:
            how = Formula("none", "b (g k) ...", "triton", "triton", *backends)
            if place is not None:
                how = replace(how, activation="relu", sign_mask=place)
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            y = GroupedLinear.apply(*given, how)
            taken.append(torch.cuda.memory_allocated() - before)
            del y
        assert taken[3] - taken[2] == 4096 * 16 * 16
