"""The backward of strips of narrow groups: against float64 on a GPU, its compilation anywhere."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.cuda import packed_groups_backward, packed_groups_tiles
from fastlinear.families.grouped.cuda import packed_groups_backward_config as configs
from fastlinear.families.grouped.cuda.packed_groups_backward_config import PackedBackwardConfig
from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    EXACTLY,
    Split,
    side_by_side,
    weight_bytes,
)
from fastlinear.families.grouped.problem import problem
from fastlinear.families.grouped.reference import Needs
from tests.families import nvrtc_offline as offline
from tests.families.grouped import bad_numbers
from tests.families.hopper_only import hopper_tests

ALL: Needs = (True, True, True)
NEEDS: list[Needs] = [n for n in itertools.product((True, False), repeat=3) if any(n)]
# (groups, K, N)
SIZES = (
    *((8, 100, 100), (8, 64, 64), (16, 32, 32), (4, 128, 128), (8, 100, 64), (8, 64, 100)),
    *((8, 20, 36), (8, 50, 26), (8, 24, 40), (3, 48, 8), (6, 80, 112)),
)
CONFIGS = (
    ((8, 100, 100), PackedBackwardConfig(2, 4, 2, 3, 3)),
    ((8, 64, 64), PackedBackwardConfig(4, 4, 2, 3, 1)),
    ((8, 64, 64), PackedBackwardConfig(2, 2, 1, 3, 2, 2)),
    ((16, 32, 32), PackedBackwardConfig(8, 2, 1, 2, 2)),
    ((16, 32, 32), PackedBackwardConfig(4, 1, 1, 3, 2, 2)),
    ((8, 80, 80), PackedBackwardConfig(2, 4, 2, 3, 2)),
    ((6, 112, 112), PackedBackwardConfig(1, 4, 2, 3, 2)),
    ((8, 36, 36), PackedBackwardConfig(4, 1, 1, 2, 4, 2)),
)


def drawn(
    m: int,
    groups: int,
    k: int,
    n: int,
    activation: str,
    dtype: torch.dtype = torch.bfloat16,
    order: str = "tokens",
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """dy, saved, x and weight."""

    def tokens(features: int) -> Tensor:
        made = torch.randn(1, m, groups, features, device="cuda").to(dtype)
        return layouts.dense(made, order)

    x, dy, pre = tokens(k), tokens(n), tokens(n)
    weight = (torch.randn(groups, n, k, device="cuda") / k**0.5).to(dtype)
    act = activation_of(activation)
    saved = {"none": None, "pre": pre, "output": layouts.dense(act.value(pre), order)}[act.saved]
    return dy, saved, x, weight


def check(
    given: tuple[Tensor, Tensor | None, Tensor, Tensor],
    activation: str,
    needs: Needs = ALL,
    config: PackedBackwardConfig | None = None,
    order: str = "tokens",
) -> None:
    torch.full((1 << 22,), float("nan"), device="cuda")  # what new memory holds
    assert packed_groups_backward.serves(*given, order)
    rest = (activation, needs, order)
    found = packed_groups_backward.backward(*given, *rest, config=config)
    theirs = reference.backward(*given, *rest)
    wide: list[Any] = [None if t is None else t.double() for t in given]
    oracle = reference.backward(*wide, *rest)
    for name, need, a, t, o in zip(("dx", "dW", "db"), needs, found, theirs, oracle, strict=True):
        assert (a is not None) == need
        if a is not None and t is not None and o is not None:
            verdict = judge(name, a, t, o)
            assert verdict.passed, f"{activation} {needs} {verdict}"


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            check(drawn(65, 8, 100, 100, activation, dtype), activation)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int]) -> None:
        for m in (1, 31, 33, 1000, 4096):
            activation = "silu" if m == 33 else "relu"
            check(drawn(m, *sizes, activation), activation)

    @pytest.mark.parametrize("needs", NEEDS, ids=str)
    def test_what_is_wanted(self, needs: Needs) -> None:
        for sizes, activation in (((8, 100, 100), "gelu"), ((8, 64, 64), "none")):
            check(drawn(300, *sizes, activation), activation, needs)

    @pytest.mark.parametrize(("sizes", "config"), CONFIGS, ids=str)
    def test_configurations(
        self, sizes: tuple[int, int, int], config: PackedBackwardConfig
    ) -> None:
        check(drawn(700, *sizes, "relu"), "relu", ALL, config)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_groups_first(self, sizes: tuple[int, int, int]) -> None:
        for m in (8, 32, 40, 104, 1000, 4096):
            activation = "silu" if m == 40 else "none" if m == 104 else "relu"
            given = drawn(m, *sizes, activation, order="groups")
            check(given, activation, order="groups")

    @pytest.mark.parametrize("needs", NEEDS, ids=str)
    def test_what_is_wanted_of_groups_first(self, needs: Needs) -> None:
        for sizes, activation in (((8, 100, 100), "gelu"), ((8, 64, 64), "none")):
            given = drawn(300, *sizes, activation, order="groups")
            check(given, activation, needs, order="groups")

    def test_many_groups_share_blocks(self) -> None:
        for m in (160, 32):  # five tiles of a strip, and one: fewer than are under way
            check(drawn(m, 400, 100, 100, "relu"), "relu")
            given = drawn(m, 400, 100, 100, "relu", order="groups")
            check(given, "relu", order="groups")

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    def test_staged_changes_no_bit(self, order: str) -> None:
        for sizes in ((800, 100, 100), (96, 128, 128)):
            given = drawn(96, *sizes, "relu", order=order)
            base = configs.packed_backward_config(16, *sizes[1:], order=order)
            assert base is not None
            size = weight_bytes(order, base.groups, *sizes[1:])
            found = [
                packed_groups_backward.backward(
                    *given, "relu", ALL, order, config=replace(base, stages=2, staged=s)
                )
                for s in (0, size)
            ]
            for a, b in zip(*found, strict=True):
                assert a is not None
                assert b is not None
                assert torch.equal(a, b), sizes

    def test_weights_that_begin_anywhere(self) -> None:
        dy, saved, x, weight = drawn(96, 100, 100, 100, "relu")
        expected = packed_groups_backward.backward(dy, saved, x, weight, "relu", ALL, "tokens")
        moved = weight.new_empty(weight.numel() + 2)[2:].view_as(weight).copy_(weight)
        assert moved.data_ptr() % 16 == 4
        for w in (moved, weight, moved):  # one launch is not taken for the other's
            found = packed_groups_backward.backward(dy, saved, x, w, "relu", ALL, "tokens")
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    def test_rows_further_apart_than_they_are_long(self) -> None:
        dy, saved, x, weight = drawn(300, 8, 100, 100, "relu")
        assert saved is not None
        apart = []
        for t in (dy, saved, x):
            memory = torch.full((300, 832), float("nan"), device="cuda", dtype=torch.bfloat16)
            memory[:, :800] = t.view(300, 800)
            apart.append(memory[:, :800].unflatten(1, (8, 100))[None])
        check((*apart, weight), "relu")

    @pytest.mark.parametrize("features", [100, 64, 32])
    def test_bad_numbers_stay_in_their_group(self, features: int) -> None:
        for activation in ("none", "silu"):
            given = drawn(70, 8, features, features, activation)
            bad_numbers.check_backward(packed_groups_backward.backward, given, activation, "tokens")

    def test_tokens_beyond_the_last_do_not_count(self) -> None:
        dy, saved, x, weight = drawn(64, 8, 100, 100, "none")
        dy[:, 33:] = float("nan")
        x[:, 33:] = float("nan")
        cut = (dy[:, :33], saved, x[:, :33], weight)
        check(cut, "none")

    def test_repeated_runs_are_equal(self) -> None:
        for sizes in SIZES[:3]:
            given = drawn(1500, *sizes, "gelu")
            first = packed_groups_backward.backward(*given, "gelu", ALL, "tokens")
            for _ in range(200):
                again = packed_groups_backward.backward(*given, "gelu", ALL, "tokens")
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(first, again, strict=True)
                    if a is not None and b is not None
                )

    def test_what_it_does_not_take_goes_to_triton(self) -> None:
        dy, saved, x, weight = drawn(40, 8, 100, 100, "relu")
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert not packed_groups_backward.serves(dy, saved, x, turned, "tokens")
        found = packed_groups_backward.backward(dy, saved, x, turned, "relu", ALL, "tokens")
        expected = packed_groups_backward.backward(dy, saved, x, weight, "relu", ALL, "tokens")
        torch.testing.assert_close(found, expected)


def test_configurations_fit_the_chip() -> None:
    for groups, k, n in SIZES:
        for saved, needs in itertools.product((False, True), NEEDS):
            config = configs.packed_backward_config(groups, k, n, saved, needs)
            assert config is not None
            assert configs.reason_against(config, groups, k, n) is None
            assert configs.fits(config, k, n, saved, needs)
            assert config.stages >= 2
    made = configs.packed_backward_config(64, 64, 64)
    assert made == PackedBackwardConfig(2, 2, 2, 2, 2, 2)
    assert configs.packed_backward_config(100, 100, 100) == PackedBackwardConfig(2, 4, 2, 3, 2)
    # 60 features: two groups are no whole sectors, which matters where groups lie side by side
    for order, config in (("tokens", (4, 2, 2, 4, 4, 1)), ("groups", (2, 2, 2, 3, 2, 2))):
        made = configs.packed_backward_config(16, 60, 60, False, order=order)
        assert made == PackedBackwardConfig(*config)
    assert configs.packed_backward_config(3, 10, 10) is None
    assert configs.packed_backward_config(4, 7, 8) is None
    assert configs.packed_backward_config(4, 136, 64) is None


def test_weights_are_staged_where_that_pays_and_fits() -> None:
    def finished(
        k: int, needs: Needs = ALL, order: str = "tokens", aligned: bool = True
    ) -> PackedBackwardConfig:
        config = configs.packed_backward_config(16, k, k, True, needs, order=order)
        assert config is not None
        return configs.finished(config, k, k, True, needs, order=order, aligned=aligned)

    assert finished(100).staged == 2 * 20000
    assert finished(100, order="groups").staged == 20000
    assert finished(100, aligned=False).staged == 0
    assert finished(100, (False, True, True)).staged == 0  # W is not read
    assert finished(40).staged == 0  # loses
    for features in range(8, 132, 4):
        made = configs.packed_backward_config(16, features, features, False)
        if made is not None:
            made = configs.finished(made, features, features, False, ALL)
            assert configs.fits(made, features, features, False, ALL)
            assert made.stages >= 2


def test_tiles_are_shared_out_evenly() -> None:
    for strips_, tiles, at_once in ((50, 128, 132), (16, 512, 132), (3, 1, 132), (400, 5, 132)):
        split = Split(strips_, tiles, at_once)
        taken = [split.block_of(t) for t in range(strips_ * tiles)]
        assert sorted(set(taken)) == list(range(split.blocks))
        counts = [taken.count(b) for b in range(split.blocks)]
        assert max(counts) - min(counts) <= 1
        most = max(len(set(taken[s * tiles : (s + 1) * tiles])) for s in range(strips_))
        assert split.slots == most


def test_blocks_keep_to_one_strip_where_most_of_them_can() -> None:
    assert Split(50, 128, 132).blocks == 132  # of 49 tiles at most, 100 blocks of 64
    assert Split(16, 512, 264).blocks == 256  # of 32, as 264 blocks
    assert Split(16, 512, 264).slots == 16
    assert Split(32, 512, 264).blocks == 256  # of 64, 264 blocks of 63
    assert Split(16, 512, 264, later=EXACTLY).blocks == 264
    assert Split(400, 64, 132).blocks == 132  # more strips than blocks
    assert Split(50, 128, 132, later=1.34).blocks == 100


def test_what_it_serves_of_groups_first() -> None:
    x = torch.zeros(8, 6, 100, dtype=torch.bfloat16).permute(1, 0, 2)[None]
    weight = torch.zeros(8, 100, 100, dtype=torch.bfloat16)
    assert packed_groups_backward.serves(x, x, x, weight, "groups")
    assert packed_groups_backward.serves(x, None, x, weight, "groups")
    assert not packed_groups_backward.serves(x, None, x, weight, "tokens")
    assert not packed_groups_backward.serves(x.contiguous(), None, x, weight, "groups")
    assert not packed_groups_backward.serves(x[:1, :1].expand_as(x), None, x, weight, "groups")


def test_what_it_serves() -> None:
    x = torch.zeros(1, 6, 8, 100, dtype=torch.bfloat16)
    weight = torch.zeros(8, 100, 100, dtype=torch.bfloat16)
    assert packed_groups_backward.serves(x, x, x, weight, "tokens")
    assert packed_groups_backward.serves(x, None, x, weight, "tokens")
    assert not packed_groups_backward.serves(x, None, x, weight, "groups")
    assert not packed_groups_backward.serves(x, None, x, weight.transpose(1, 2), "tokens")
    assert not packed_groups_backward.serves(x.float(), None, x, weight, "tokens")
    apart = torch.zeros(6, 804, dtype=torch.bfloat16)[:, :800].unflatten(1, (8, 100))[None]
    assert not packed_groups_backward.serves(x, None, apart, weight, "tokens")
    both = torch.zeros(2, 6, 8, 100, dtype=torch.bfloat16)
    assert not packed_groups_backward.serves(both, None, both, weight, "tokens")


def test_reasons_are_given() -> None:
    p = problem("backward", 64, 8, 100, 100, dtype="bfloat16", device="cpu")
    assert packed_groups_backward.reason_not(p) == "its kernel runs on CUDA devices only"


@pytest.mark.parametrize("sizes", SIZES[:5], ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    for activation in ("relu", "none", "gelu", "silu"):
        groups, k, n = sizes
        config = configs.packed_backward_config(groups, k, n, activation != "none")
        assert config is not None
        config = configs.finished(config, k, n, activation != "none", ALL)
        text = packed_groups_backward.source(torch.bfloat16, k, n, activation, ALL, config)
        used = offline.usage(text, "packed_groups_backward.cu")
        kernel = used[packed_groups_backward.KERNEL]
        assert kernel.frame == 0, (sizes, activation, kernel)
        if configs.service_warps(config) > 1:  # else the warps that compute would wait for ever
            assert kernel.registers == configs.limit(config)[1]


@pytest.mark.parametrize("sizes", SIZES[:4], ids=str)
def test_compiles_for_groups_first(sizes: tuple[int, int, int]) -> None:
    _, k, n = sizes
    for activation in ("relu", "none"):
        side = side_by_side("groups", 4096, 8)
        config = configs.packed_backward_config(side, k, n, activation != "none")
        assert config is not None
        config = configs.finished(config, k, n, activation != "none", ALL, order="groups")
        text = packed_groups_backward.source(torch.bfloat16, k, n, activation, ALL, config, True)
        kernel = offline.usage(text, "packed_groups_backward.cu")[packed_groups_backward.KERNEL]
        assert kernel.frame == 0, (sizes, activation, kernel)
        if configs.service_warps(config) > 1:
            assert kernel.registers == configs.limit(config)[1]


def test_compiles_for_other_needs_and_numbers() -> None:
    for needs in NEEDS[1:]:
        config = configs.packed_backward_config(8, 100, 100, True, needs)
        assert config is not None
        text = packed_groups_backward.source(torch.float16, 100, 100, "tanh", needs, config)
        assert (
            offline.usage(text, "packed_groups_backward.cu")[packed_groups_backward.KERNEL].frame
            == 0
        )
    for (_, k, n), config in CONFIGS:
        text = packed_groups_backward.source(torch.bfloat16, k, n, "relu", ALL, config)
        kernel = offline.usage(text, "packed_groups_backward.cu")[packed_groups_backward.KERNEL]
        if configs.service_warps(config) > 1:
            assert kernel.registers == configs.limit(config)[1]
        assert configs.fits(replace(config, stages=2), k, n, True, ALL)


def test_slow_memory_is_asked_for_less(monkeypatch: pytest.MonkeyPatch) -> None:
    for rate, slow in ((3.35e12, True), (4.9e12, False), (0.0, False)):
        packed_groups_tiles.is_slow.cache_clear()
        monkeypatch.setattr(packed_groups_tiles, "memory_rate", lambda _, rate=rate: rate)
        device = torch.device("cuda", 0)
        assert packed_groups_tiles.is_slow(device) is slow
        stages = [packed_groups_tiles.stages_for(device, 6, kib << 10) for kib in (13, 26, 33, 90)]
        assert stages == ([6, 3, 2, 2] if slow else [6] * 4)
        # 100 blocks that keep to a strip ask for less than 132
        for plain in (True, False):
            later = packed_groups_tiles.later_for(device, plain)
            assert Split(50, 128, 132, later=later).blocks == (100 if slow and plain else 132)
    packed_groups_tiles.is_slow.cache_clear()
    assert packed_groups_tiles.is_slow(torch.device("cpu")) is False
