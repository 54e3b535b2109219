"""The backward of wide groups: against float64 on a GPU, its compilation anywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.cuda import group_map
from fastlinear.families.grouped.cuda import wide_backward as wide
from fastlinear.families.grouped.cuda import wide_backward_config as configs
from fastlinear.families.grouped.cuda.wide_backward_config import WideBackwardConfig
from fastlinear.families.grouped.problem import problem
from fastlinear.families.grouped.reference import Needs
from fastlinear.kernels.cuda.hopper import SHARED_LIMIT
from tests.families import nvrtc_offline as offline
from tests.families.grouped import bad_numbers
from tests.families.hopper_only import hopper_tests

LAUNCH_REGISTERS = 168
"""Of a thread of 384; more, and the warps that compute would wait for theirs for ever."""
ALL: Needs = (True, True, True)
NEEDS: list[Needs] = [
    n for n in itertools.product((True, False), (True, False), (True, False)) if any(n[:2])
]
# (groups, K, N)
SIZES = (
    *((2, 256, 256), (3, 256, 192), (3, 136, 24), (3, 24, 136), (2, 200, 200), (4, 128, 256)),
    *((2, 64, 256), (2, 192, 136), (40, 160, 208), (2, 256, 64), (2, 256, 128)),
)
CHANNELS_256 = {"order": "channels", "length": 256}
CHANNELS_512 = {"order": "channels", "length": 512}
CONFIGS = (
    WideBackwardConfig(3, 2, 1, 2, False),
    WideBackwardConfig(2, 4, 2, 2, True),
    WideBackwardConfig(2, 4, 2, 2, True, split=True),
    WideBackwardConfig(3, 1, 2, 2, True, split=True),
    WideBackwardConfig(2, 3, 1, 2, False),
    WideBackwardConfig(2, 2, 1, 1, True),
)


def drawn(
    m: int,
    groups: int,
    k: int,
    n: int,
    activation: str,
    dtype: torch.dtype = torch.bfloat16,
    order: str = "tokens",
    batch: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """dy, saved, x and weight."""

    def tokens(features: int) -> Tensor:
        drawn = torch.randn(batch, m, groups, features, device="cuda").to(dtype)
        return layouts.dense(drawn, order)

    x, dy, pre = tokens(k), tokens(n), tokens(n)
    weight = (torch.randn(groups, n, k, device="cuda") / k**0.5).to(dtype)
    act = activation_of(activation)
    saved = {"none": None, "pre": pre, "output": act.value(pre)}[act.saved]
    return dy, saved, x, weight


def check(
    given: tuple[Tensor, Tensor | None, Tensor, Tensor],
    activation: str,
    needs: Needs = ALL,
    config: WideBackwardConfig | None = None,
    chunks: int | None = None,
    order: str = "tokens",
) -> None:
    torch.full((1 << 22,), float("nan"), device="cuda")  # what new memory holds
    assert wide.serves(*given, order)
    rest: Any = (activation, needs, order)
    found = wide.backward(*given, *rest, config=config, chunks=chunks)
    theirs = reference.backward(*given, *rest)
    wider: list[Any] = [None if t is None else t.double() for t in given]
    oracle = reference.backward(*wider, *rest)
    for name, need, a, t, o in zip(("dx", "dW", "db"), needs, found, theirs, oracle, strict=True):
        assert (a is not None) == need
        if a is not None and t is not None and o is not None:
            verdict = judge(name, a, t, o)
            assert verdict.passed, f"{activation} {needs} {verdict}"


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("order", ["tokens", "channels"])
    def test_activations(self, activation: str, order: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            check(drawn(304, 2, 256, 256, activation, dtype, order), activation, order=order)

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int], order: str) -> None:
        few = 1 if order == "tokens" else 2  # where a group of one token lies is not dense
        for m in (few, 63, 65, 1000, 4096):
            activation = "silu" if m == 65 else "none" if m == 63 else "relu"
            check(drawn(m, *sizes, activation, order=order), activation, order=order)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes_of_channels(self, sizes: tuple[int, int, int]) -> None:
        for batch, length in ((1, 8), (5, 64), (2, 72), (3, 1000), (1, 4096)):
            activation = "silu" if length == 72 else "none" if length == 64 else "relu"
            given = drawn(length, *sizes, activation, order="channels", batch=batch)
            check(given, activation, order="channels")

    @pytest.mark.parametrize("order", ["tokens", "channels"])
    @pytest.mark.parametrize("needs", NEEDS, ids=str)
    def test_what_is_wanted(self, needs: Needs, order: str) -> None:
        for activation in ("gelu", "none"):
            given = drawn(704, 3, 256, 256, activation, order=order)
            check(given, activation, needs, order=order)

    @pytest.mark.parametrize("order", ["tokens", "channels"])
    def test_activations_of_unlike_halves(self, order: str) -> None:
        for sizes in ((2, 128, 256), (2, 192, 192), (2, 256, 128), (2, 256, 64)):
            for m in (32, 40, 104, 504) if order == "channels" else (31, 33, 97, 500):
                given = drawn(m, *sizes, "gelu", order=order)
                check(given, "gelu", ALL, None, 1 if m < 97 else 2, order)

    @pytest.mark.parametrize("order", ["tokens", "channels"])
    @pytest.mark.parametrize("config", CONFIGS, ids=str)
    def test_configurations(self, config: WideBackwardConfig, order: str) -> None:
        for chunks in (1, 3):
            given = drawn(1504, 3, 256, 256, "relu", order=order)
            check(given, "relu", ALL, config, chunks, order)

    def test_channels_of_wider_tensors(self) -> None:
        for batch, groups in ((2, 3), (3, 1), (1, 2)):
            dy, saved, x, weight = drawn(
                200, groups, 256, 136, "relu", order="channels", batch=batch
            )
            assert saved is not None
            apart = []
            for t in (dy, saved, x):
                shape = batch, groups, t.shape[3], 264
                memory = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
                memory[..., :200] = t.permute(0, 2, 3, 1)
                apart.append(memory[..., :200].permute(0, 3, 1, 2))
            check((*apart, weight), "relu", order="channels")

    def test_rows_further_apart_than_they_are_long(self) -> None:
        dy, saved, x, weight = drawn(300, 2, 200, 200, "relu")
        assert saved is not None
        apart = []
        for t in (dy, saved, x):
            memory = torch.full((300, 424), float("nan"), device="cuda", dtype=torch.bfloat16)
            memory[:, :400] = t.view(300, 400)
            apart.append(memory[:, :400].unflatten(1, (2, 200))[None])
        check((*apart, weight), "relu")

    @pytest.mark.parametrize("order", layouts.ORDERS)
    @pytest.mark.parametrize("features", [256, 200, 136])
    def test_bad_numbers_stay_in_their_group(self, features: int, order: str) -> None:
        for activation in ("none", "silu"):
            given = drawn(72, 8, features, features, activation, order=order)
            bad_numbers.check_backward(wide.backward, given, activation, order)

    @pytest.mark.parametrize("order", ["tokens", "channels"])
    def test_repeated_runs_are_equal(self, order: str) -> None:
        for sizes in SIZES[:3]:
            given = drawn(3000, *sizes, "gelu", order=order)
            first = wide.backward(*given, "gelu", ALL, order)
            for _ in range(200):
                again = wide.backward(*given, "gelu", ALL, order)
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(first, again, strict=True)
                    if a is not None and b is not None
                )

    def test_what_it_does_not_take_goes_to_triton(self) -> None:
        dy, saved, x, weight = drawn(40, 2, 256, 256, "relu")
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert not wide.serves(dy, saved, x, turned, "tokens")
        found = wide.backward(dy, saved, x, turned, "relu", ALL, "tokens")
        expected = wide.backward(dy, saved, x, weight, "relu", ALL, "tokens")
        torch.testing.assert_close(found, expected)
        _, _, db = wide.backward(dy, saved, x, weight, "relu", (False, False, True), "tokens")
        torch.testing.assert_close(db, expected[2])


def test_configurations_fit_the_chip() -> None:
    for _, k, n in SIZES:
        for saved, needs in itertools.product((False, True), NEEDS):
            config = configs.wide_backward_config(k, n, saved, needs)
            assert config is not None
            assert configs.fits(config, n, saved, needs)
            assert config.tiles >= 2
            assert config.saved >= 2 or not saved  # a tile's two halves are asked for at once
    split = WideBackwardConfig(3, 2, 1, 2, True, split=True)
    assert configs.wide_backward_config(256, 256) == split
    assert configs.wide_backward_config(256, 256, False) == WideBackwardConfig(3, 1, 2, 2, True)
    assert configs.wide_backward_config(128, 256) == WideBackwardConfig(3, 2, 1, 2, False)
    assert configs.shared_bytes(WideBackwardConfig(3, 2, 1, 2), 256, True, ALL) <= SHARED_LIMIT
    assert configs.wide_backward_config(128, 128) is None
    assert configs.wide_backward_config(260, 64) is None
    assert configs.wide_backward_config(264, 64) is None


def test_tokens_are_cut_so_that_most_of_the_chip_is_busy() -> None:
    assert configs.chunks_of(16384, 16, 256, 256, 132, True) == 4  # 128 of 132 multiprocessors
    assert configs.chunks_of(64, 16, 256, 256, 132, True) == 1
    for groups in (1, 3, 16, 40, 100, 400):
        for m in (1, 500, 4096, 65536):
            tiles = -(-m // group_map.TOKENS)
            assert 1 <= configs.chunks_of(m, groups, 256, 256, 132, True) <= tiles


def test_what_it_serves() -> None:
    x = torch.zeros(1, 6, 2, 200, dtype=torch.bfloat16)
    weight = torch.zeros(2, 200, 200, dtype=torch.bfloat16)
    assert wide.serves(x, x, x, weight, "tokens")
    assert wide.serves(x, None, x, weight, "tokens")
    assert not wide.serves(x, None, x, weight, "groups")
    first = layouts.dense(x, "groups")
    assert wide.serves(first, first, first, weight, "groups")
    assert not wide.serves(first, x, first, weight, "groups")
    assert not wide.serves(x, None, x, weight.transpose(1, 2), "tokens")
    assert not wide.serves(x.float(), None, x, weight, "tokens")
    narrow = torch.zeros(1, 6, 2, 128, dtype=torch.bfloat16)
    assert not wide.serves(narrow, None, narrow, weight[:, :128, :128].contiguous(), "tokens")
    both = torch.zeros(2, 6, 2, 200, dtype=torch.bfloat16)
    assert not wide.serves(both, None, both, weight, "tokens")
    sign_mask = torch.zeros(1, 2, 1, 4, 4, 32, 4, dtype=torch.uint8)
    assert wide.serves(x, sign_mask, x, weight, "tokens")
    for length, served in ((16, True), (12, False)):  # rows of 32 bytes, of 24
        turned = torch.zeros(3, 2, 200, length, dtype=torch.bfloat16).permute(0, 3, 1, 2)
        assert wide.serves(turned, turned, turned, weight, "channels") == served
        assert not wide.serves(turned, None, turned.contiguous(), weight, "channels")
        assert not wide.serves(turned, turned.contiguous(), turned, weight, "channels")
        assert not wide.serves(turned.contiguous(), None, turned, weight, "channels")


def test_reasons_are_given() -> None:
    p = problem("backward", 64, 8, 256, 256, dtype="bfloat16", device="cpu")
    assert wide.reason_not(p) == "its kernel runs on CUDA devices only"


@pytest.mark.parametrize("sizes", SIZES[:7], ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    _, k, n = sizes
    for activation in ("relu", "none", "gelu"):
        config = configs.wide_backward_config(k, n, activation != "none")
        assert config is not None
        for channels in (False, True):
            text = wide.source(torch.bfloat16, k, n, activation, ALL, config, channels)
            used = offline.usage(text, "wide_backward.cu")
            assert used[wide.KERNEL].frame == 0, (sizes, activation, channels, used)
            assert used[wide.KERNEL].registers == LAUNCH_REGISTERS


def test_compiles_for_other_needs_and_numbers() -> None:
    for needs in NEEDS[1:]:
        config = configs.wide_backward_config(256, 256, True, needs)
        assert config is not None
        for channels in (False, True):
            text = wide.source(torch.float16, 256, 256, "tanh", needs, config, channels)
            assert offline.usage(text, "wide_backward.cu")[wide.KERNEL].frame == 0
    for config in CONFIGS:
        assert configs.fits(config, 256, True, ALL)
        for channels in (False, True):
            text = wide.source(torch.bfloat16, 256, 256, "relu", ALL, config, channels)
            kernel = offline.usage(text, "wide_backward.cu")[wide.KERNEL]
            assert (kernel.frame, kernel.registers) == (0, LAUNCH_REGISTERS), (config, channels)


def test_other_dtypes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_map.packed_groups_tiles, "reason_not", lambda *_: None)

    def asked(dtype: str, order: str = "tokens", length: int = 0) -> str | None:
        given: Any = {"dtype": dtype, "device": "cuda", "order": order, "length": length}
        return wide.reason_not(problem("backward", 4096, 4, 256, 256, **given))

    assert asked("bfloat16") is None
    for dtype in ("float32", "float64"):
        assert asked(dtype) == f"serves bfloat16 and float16, not {dtype}"
    assert asked("bfloat16", "groups") is None
    assert asked("bfloat16", "channels", 4096) is None
    assert asked("bfloat16", "channels", 12) is not None
