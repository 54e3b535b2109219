"""The kernel for strips of narrow groups: against float64 on a GPU, its compilation anywhere."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.cuda import packed_groups
from fastlinear.families.grouped.cuda import packed_groups_config as configs
from fastlinear.families.grouped.cuda.packed_groups_config import PackedConfig
from fastlinear.families.grouped.cuda.packed_groups_tiles import (
    Cut,
    box_columns,
    side_by_side,
    swizzle,
    weight_bytes,
)
from fastlinear.families.grouped.problem import problem
from tests.families import nvrtc_offline as offline
from tests.families.hopper_only import hopper_tests

SIZES = (
    *((8, 100, 100), (4, 100, 200), (8, 64, 64), (16, 32, 32), (8, 100, 64), (8, 20, 36)),
    *((8, 106, 50), (8, 50, 26), (4, 148, 148), (3, 48, 8), (6, 80, 112)),
    *((5, 136, 136), (5, 192, 192), (5, 200, 200), (5, 232, 232), (5, 96, 160)),
)
CONFIGS = (
    ((8, 100, 100), PackedConfig(4, 2, 4, 4)),
    ((8, 100, 100), PackedConfig(4, 4, 3, 2)),
    ((8, 100, 100), PackedConfig(2, 4, 4, 4, 2)),
    ((8, 100, 100), PackedConfig(2, 2, 2, 1, 2)),
    ((8, 64, 64), PackedConfig(4, 2, 6, 6)),
    ((16, 32, 32), PackedConfig(4, 1, 4, 4, 3)),
    ((8, 80, 80), PackedConfig(2, 4, 3, 4, 2)),
    ((6, 112, 112), PackedConfig(1, 2, 4, 4, 2)),
)


def ways_of(size: int) -> list[tuple[int, bool]]:
    """Bytes of shared memory for weights, and whether both blocks of a tile are mixed."""
    return [(0, False), (0, True), (size, False), (size, True)]


def drawn(
    m: int, groups: int, k: int, n: int, dtype: torch.dtype, order: str = "tokens"
) -> tuple[Tensor, Tensor, Tensor]:
    x = layouts.dense(torch.randn(1, m, groups, k, device="cuda").to(dtype), order)
    weight = (torch.randn(groups, n, k, device="cuda") / k**0.5).to(dtype)
    return x, weight, torch.randn(groups, n, device="cuda").to(dtype)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: PackedConfig | None = None,
    save: bool | None = None,
    order: str = "tokens",
) -> None:
    if save is None:
        save = activation_of(activation).saved == "pre"
    torch.full((1 << 20,), float("nan"), device="cuda", dtype=x.dtype)  # what new memory holds
    assert packed_groups.serves(x, weight, bias, order)
    rest = (activation, save, order)
    found = packed_groups.forward(x, weight, bias, *rest, config=config)
    theirs = reference.forward(x, weight, bias, *rest)
    wide = None if bias is None else bias.double()
    oracle = reference.forward(x.double(), weight.double(), wide, *rest)
    for name, a, t, o in zip(("y", "pre"), found, theirs, oracle, strict=True):
        assert (a is None) == (t is None)
        if a is not None and t is not None and o is not None:
            verdict = judge(name, a, t, o)
            assert verdict.passed, str(verdict)
    again = packed_groups.forward(x, weight, bias, *rest, config=config)[0]
    assert torch.equal(found[0], again)


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            x, weight, bias = drawn(65, 8, 100, 100, dtype)
            check(x, weight, None if activation == "tanh" else bias, activation)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int]) -> None:
        for m in (1, 31, 33, 1000, 4096):
            check(*drawn(m, *sizes, torch.bfloat16), "silu" if m == 33 else "relu")

    @pytest.mark.parametrize(("sizes", "config"), CONFIGS, ids=str)
    def test_configurations(self, sizes: tuple[int, int, int], config: PackedConfig) -> None:
        for save in (False, True):
            if configs.fits(config, *sizes[1:], save):
                check(*drawn(700, *sizes, torch.bfloat16), "relu", config, save)

    def test_many_groups_share_blocks(self) -> None:
        for m in (160, 32):  # five tiles of a strip, and one: fewer than are under way
            check(*drawn(m, 800, 100, 100, torch.bfloat16), "relu")
            given = drawn(m, 400, 100, 100, torch.bfloat16, "groups")
            check(*given, "relu", order="groups")

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    def test_staged_and_mixed_change_no_bit(self, order: str) -> None:
        for sizes in ((800, 100, 100), (200, 100, 200), (96, 128, 128)):
            x, weight, bias = drawn(96, *sizes, torch.bfloat16, order)
            base = configs.packed_config(16, *sizes[1:], False, order=order)
            assert base is not None
            size = weight_bytes(order, base.groups, *sizes[1:])
            ways = [replace(base, stages=2, outs=2, staged=s, mixed=m) for s, m in ways_of(size)]
            found = [
                packed_groups.forward(x, weight, bias, "relu", False, order, config=c)[0]
                for c in ways
            ]
            assert all(torch.equal(found[0], y) for y in found[1:]), sizes

    def test_weights_that_begin_anywhere(self) -> None:
        x, weight, bias = drawn(96, 100, 100, 100, torch.bfloat16)
        expected = packed_groups.forward(x, weight, bias, "relu", False, "tokens")[0]
        memory = weight.new_empty(weight.numel() + 2)
        moved = memory[2:].view_as(weight).copy_(weight)
        assert moved.data_ptr() % 16 == 4
        for given in (moved, weight, moved):  # one launch is not taken for the other's
            found = packed_groups.forward(x, given, bias, "relu", False, "tokens")[0]
            assert torch.equal(found, expected)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_groups_first(self, sizes: tuple[int, int, int]) -> None:
        for m in (8, 32, 40, 104, 1000, 4096):
            given = drawn(m, *sizes, torch.bfloat16, "groups")
            check(*given, "silu" if m == 40 else "relu", order="groups")

    def test_tokens_of_a_group_stay_in_it(self) -> None:
        x, weight, _ = drawn(72, 8, 100, 100, torch.bfloat16, "groups")
        x[:, :, 1] = float("nan")
        y, _ = packed_groups.forward(x, weight, None, "none", False, "groups")
        assert y[:, :, 1].isnan().all()
        assert y[:, :, [0, *range(2, 8)]].isfinite().all()

    def test_rows_further_apart_than_they_are_long(self) -> None:
        memory = torch.full((300, 832), float("nan"), device="cuda", dtype=torch.bfloat16)
        x, weight, bias = drawn(300, 8, 100, 100, torch.bfloat16)
        memory[:, :800] = x.view(300, 800)
        check(memory[:, :800].view(1, 300, 8, 100), weight, bias, "relu")

    @pytest.mark.parametrize("sizes", SIZES[:8], ids=str)
    def test_bad_numbers_stay_in_their_group(self, sizes: tuple[int, int, int]) -> None:
        x, weight, _ = drawn(70, *sizes, torch.bfloat16)
        x[:, :, 1] = float("nan")
        weight[2] = float("inf")
        y, _ = packed_groups.forward(x, weight, None, "none", False, "tokens")
        assert y[:, :, 1].isnan().all()
        others = [0, *range(3, sizes[0])]
        assert y[:, :, others].isfinite().all()

    def test_tokens_beyond_the_last_stay(self) -> None:
        x, weight, bias = drawn(64, 8, 100, 100, torch.bfloat16)
        x[:, 33:] = float("nan")
        check(x[:, :33], weight, bias, "relu")

    def test_repeated_runs_are_equal(self) -> None:
        for sizes in SIZES[:4]:
            given = (*drawn(1500, *sizes, torch.bfloat16), "relu", False, "tokens")
            first = packed_groups.forward(*given)[0]
            assert all(torch.equal(first, packed_groups.forward(*given)[0]) for _ in range(200))

    def test_what_it_does_not_take_goes_to_triton(self) -> None:
        x, weight, bias = drawn(40, 8, 100, 100, torch.bfloat16)
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert not packed_groups.serves(x, turned, bias, "tokens")
        found, _ = packed_groups.forward(x, turned, bias, "relu", False, "tokens")
        expected, _ = packed_groups.forward(x, weight, bias, "relu", False, "tokens")
        torch.testing.assert_close(found, expected)


def test_configurations_fit_the_chip() -> None:
    for groups, k, n in SIZES:
        for save_pre in (False, True):
            config = configs.packed_config(groups, k, n, save_pre)
            assert config is not None
            assert config.groups * k % 8 == config.groups * n % 8 == 0
            assert groups % config.groups == 0
            assert configs.fits(config, k, n, save_pre)
    assert configs.packed_config(3, 10, 10, False) is None
    assert configs.packed_config(4, 7, 8, False) is None
    assert configs.packed_config(100, 100, 100, False) == PackedConfig(2, 5, 4, 4, 1)
    assert configs.packed_config(64, 32, 32, False) == PackedConfig(8, 1, 4, 4, 1)
    assert configs.packed_config(64, 32, 32, False, groups=4) == PackedConfig(4, 1, 4, 4, 3)
    # a group of 104 features is no whole sectors, which matters where groups lie side by side
    for order, parts in (("tokens", (2, 2)), ("groups", (1, 4))):
        made = configs.packed_config(16, 104, 104, False, order=order)
        assert made is not None
        assert (made.groups, made.parts) == parts
    assert configs.packed_config(100, 100, 100, False, groups=8) is None


def test_weights_are_staged_where_there_is_room() -> None:
    def finished(side: int, k: int, n: int, order: str = "tokens", **how: bool) -> PackedConfig:
        config = configs.packed_config(side, k, n, False, order=order)
        assert config is not None
        return configs.finished(config, k, n, False, order=order, **how)

    assert finished(100, 100, 100) == PackedConfig(2, 5, 4, 4, 1, 2 * 20000, True)
    assert finished(16, 100, 100, "groups") == PackedConfig(2, 5, 4, 4, 1, 20000, True)
    assert finished(100, 100, 100, aligned=False) == PackedConfig(2, 5, 4, 4, 1, 0, True)
    assert finished(100, 100, 200) == PackedConfig(2, 7, 4, 3, 1, 80000, True)  # one y less
    assert finished(64, 64, 64) == PackedConfig(4, 1, 3, 3, 2)  # no room, no registers
    for sign_mask in (False, True):
        for features in range(8, 132, 4):
            made = configs.packed_config(32, features, features, False, sign_mask)
            if made is not None:
                made = configs.finished(made, features, features, False, sign_mask)
                assert configs.fits(made, features, features, False, sign_mask)
                assert made.outs >= 2


@pytest.mark.parametrize("sign_mask", [False, True])
def test_what_is_mixed_does_not_spill(sign_mask: bool) -> None:
    for features in (32, 40, 48, 56, 72, 80, 100, 112, 120, 128):
        config = configs.packed_config(32, features, features, False, sign_mask)
        assert config is not None
        config = configs.finished(config, features, features, False, sign_mask)
        assert config.mixed, features
        how = features, features, "relu", True, False, config, False, sign_mask
        kernel = offline.usage(packed_groups.source(torch.bfloat16, *how), "packed_groups.cu")[
            packed_groups.KERNEL
        ]
        assert kernel.frame == 0, (features, kernel)
        check_registers(config, kernel.registers)


def test_what_it_serves_of_groups_first() -> None:
    x = torch.zeros(8, 6, 100, dtype=torch.bfloat16).permute(1, 0, 2)[None]
    weight = torch.zeros(8, 100, 100, dtype=torch.bfloat16)
    assert packed_groups.serves(x, weight, None, "groups")
    assert not packed_groups.serves(x, weight, None, "tokens")
    assert not packed_groups.serves(x, weight, None, "channels")
    assert not packed_groups.serves(
        x[:, :4], weight, None, "groups"
    )  # groups further apart than long
    assert not packed_groups.serves(x.contiguous(), weight, None, "groups")
    assert packed_groups.serves(x.float(), weight.float(), None, "groups")
    assert not packed_groups.serves(x.double(), weight.double(), None, "groups")


def test_groups_first_is_cut_into_tokens_side_by_side() -> None:
    assert Cut.of("groups", 4096, 100, 2) == Cut(True, 100, 100, 2048, 2)
    assert Cut.of("groups", 4096, 100, 2).tiles == 64
    assert Cut.of("tokens", 4096, 100, 2) == Cut(False, 100, 50, 4096, 2)
    assert [side_by_side("groups", m, 100) for m in (1, 6, 4096)] == [1, 2, 16]
    assert side_by_side("tokens", 4096, 100) == 100


def on_a_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def test_what_groups_first_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_hopper(monkeypatch)

    def reason(m: int, k: int, order: str, dtype: str = "bfloat16") -> str | None:
        sizes = (m, 8, k, k)
        given = {"order": order, "dtype": dtype, "device": "cuda", "length": m}
        return packed_groups.reason_not(problem("forward", *sizes, **given))  # type: ignore[arg-type]

    for k in (32, 64, 100):
        assert reason(4096, k, "groups") is None
    assert reason(4095, 64, "groups") is None
    odd = "no strip of 4095 tokens of a group, 100 to 100 features, fits: 16 bytes, registers"
    assert reason(4095, 100, "groups") == odd
    assert reason(4095, 100, "tokens") is None
    assert reason(64, 100, "channels") == "serves dense tensors, tokens or groups first"


def test_boxes_cut_strips_evenly() -> None:
    assert [box_columns(1, c) for c in (200, 256, 400, 296, 424)] == [200, 64, 200, 8, 8]
    for columns in range(8, 2000, 8):
        box = box_columns(1, columns)
        assert columns % box == 0
        assert box <= 256
        assert box % 8 == 0


def test_boxes_are_swizzled_where_rows_would_share_banks() -> None:
    strips = ((2, 64), (2, 80), (2, 112), (4, 48), (2, 100), (8, 20), (1, 96), (1, 40))
    assert [swizzle(*s) for s in strips] == [128, 64, 64, 128, 0, 0, 64, 0]
    assert [box_columns(*s) for s in strips] == [64, 32, 32, 64, 200, 160, 32, 40]


def test_reasons_are_given() -> None:
    p = problem("forward", 64, 8, 100, 100, dtype="bfloat16", device="cpu")
    assert packed_groups.reason_not(p) == "its kernel runs on CUDA devices only"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    groups, k, n = sizes
    for activation, dtype in (("relu", torch.bfloat16), ("gelu", torch.float16)):
        save = activation_of(activation).saved == "pre"
        config = configs.packed_config(groups, k, n, save)
        assert config is not None
        config = configs.finished(config, k, n, save)
        text = packed_groups.source(dtype, k, n, activation, True, save, config)
        kernel = offline.usage(text, "packed_groups.cu")[packed_groups.KERNEL]
        assert kernel.frame == 0, (sizes, activation, kernel)
        check_registers(config, kernel.registers)


def check_registers(config: PackedConfig, registers: int) -> None:
    if configs.service_warps(config) > 2:  # else the warps that compute would wait for ever
        assert registers == configs.limit(config)[1]


def test_compiles_for_other_configurations() -> None:
    for (_, k, n), config in CONFIGS:
        text = packed_groups.source(torch.bfloat16, k, n, "none", False, False, config)
        kernel = offline.usage(text, "packed_groups.cu")[packed_groups.KERNEL]
        assert kernel.frame == 0, (k, n, config, kernel)
        check_registers(config, kernel.registers)
        assert configs.fits(config, k, n, False)


def test_compiles_for_groups_first() -> None:
    for sizes in SIZES:
        _, k, n = sizes
        for m in (4096, 4098):
            config = configs.packed_config(side_by_side("groups", m, 8), k, n, False)
            if config is None:
                continue
            config = configs.finished(config, k, n, False, order="groups")
            text = packed_groups.source(torch.bfloat16, k, n, "relu", True, False, config, True)
            kernel = offline.usage(text, "packed_groups.cu")[packed_groups.KERNEL]
            assert kernel.frame == 0, (sizes, m, kernel)
            check_registers(config, kernel.registers)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_for_every_activation(activation: str) -> None:
    save = activation_of(activation).saved == "pre"
    config = configs.packed_config(100, 100, 100, save)
    assert config is not None
    config = configs.finished(config, 100, 100, save)
    text = packed_groups.source(torch.bfloat16, 100, 100, activation, False, save, config)
    assert offline.usage(text, "packed_groups.cu")[packed_groups.KERNEL].frame == 0
