"""The forward that keeps weights in shared memory: against float64 on a GPU, its compilation
anywhere."""

from __future__ import annotations

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
from fastlinear.families.grouped.cuda import group_map, weight_stationary
from fastlinear.families.grouped.cuda import weight_stationary_config as configs
from fastlinear.families.grouped.cuda.weight_stationary_config import (
    StationaryConfig,
    blocks_of,
    stationary_config,
)
from fastlinear.families.grouped.problem import problem
from fastlinear.kernels.cuda.hopper import SHARED_LIMIT
from tests.families import nvrtc_offline as offline
from tests.families.hopper_only import hopper_tests

LAUNCH_REGISTERS = 168
"""Of a thread of 384; more, and the warps that compute would wait for theirs for ever."""
# (groups, K, N): one part and several, one weight in shared memory and two, one box and several
SIZES = (
    *((2, 256, 256), (3, 200, 136), (3, 136, 256), (5, 64, 64), (4, 128, 128), (7, 104, 72)),
    *((2, 256, 512), (3, 128, 648), (2, 512, 128), (2, 328, 200), (300, 160, 208), (160, 96, 96)),
)


def drawn(
    m: int,
    sizes: tuple[int, int, int],
    dtype: torch.dtype = torch.bfloat16,
    order: str = "tokens",
    batch: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    groups, k, n = sizes
    x = layouts.dense(torch.randn(batch, m, groups, k, device="cuda").to(dtype), order)
    weight = (torch.randn(groups, n, k, device="cuda") / k**0.5).to(dtype)
    return x, weight, torch.randn(groups, n, device="cuda").to(dtype)


def check(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    config: StationaryConfig | None = None,
    save: bool | None = None,
    order: str = "tokens",
) -> None:
    if save is None:
        save = activation_of(activation).saved == "pre"
    torch.full((1 << 22,), float("nan"), device="cuda", dtype=x.dtype)  # what new memory holds
    assert weight_stationary.serves(x, weight, bias, order)
    rest = (activation, save, order)
    found = weight_stationary.forward(x, weight, bias, *rest, config=config)
    theirs = reference.forward(x, weight, bias, *rest)
    wide = None if bias is None else bias.double()
    oracle = reference.forward(x.double(), weight.double(), wide, *rest)
    for name, a, t, o in zip(("y", "pre"), found, theirs, oracle, strict=True):
        assert (a is None) == (t is None)
        if a is not None and t is not None and o is not None:
            verdict = judge(name, a, t, o)
            assert verdict.passed, str(verdict)


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            x, weight, bias = drawn(130, (3, 256, 256), dtype)
            check(x, weight, None if activation == "tanh" else bias, activation)

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int], order: str) -> None:
        few = 1 if order == "tokens" else 2  # where a group of one token lies is not dense
        for m in (few, 63, 65, 1000, 129 if sizes[0] > 100 else 4097):
            given = drawn(m, sizes, order=order)
            check(*given, "silu" if m == 65 else "relu", order=order)

    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes_of_channels(self, sizes: tuple[int, int, int]) -> None:
        for batch, length in ((1, 8), (5, 64), (2, 72), (3, 1000), (1, 4096)):
            if sizes[0] <= 100 or length < 1000:
                given = drawn(length, sizes, order="channels", batch=batch)
                check(*given, "silu" if length == 72 else "relu", order="channels")

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations_of_channels(self, activation: str) -> None:
        for dtype in (torch.bfloat16, torch.float16):
            x, weight, bias = drawn(136, (3, 256, 256), dtype, "channels", 2)
            given = x, weight, None if activation == "tanh" else bias
            check(*given, activation, order="channels")

    @pytest.mark.parametrize("order", ["tokens", "channels"])
    @pytest.mark.parametrize("sizes", [SIZES[0], SIZES[5], SIZES[11]], ids=str)
    def test_configurations(self, sizes: tuple[int, int, int], order: str) -> None:
        given = drawn(704, sizes, order=order)
        config = stationary_config(*sizes[1:])
        assert config is not None
        for stages, outs, weights in ((4, 1, 1), (5, 2, 1), (4, 3, 1), (7, 2, 2), (7, 1, 2)):
            other = replace(config, stages=stages, outs=outs, weights=weights)
            if configs.shared_bytes(other, sizes[1]) <= SHARED_LIMIT:
                if order == "channels" and outs == 1:
                    continue
                for save in (False, True):
                    check(*given, "relu", other, save, order)

    def test_channels_of_a_wider_tensor(self) -> None:
        for batch, groups in ((2, 3), (3, 1), (1, 2)):
            x, weight, bias = drawn(200, (groups, 256, 136), order="channels", batch=batch)
            shape = batch, groups, 256, 264
            memory = torch.full(shape, float("nan"), device="cuda", dtype=torch.bfloat16)
            memory[..., :200] = x.permute(0, 2, 3, 1)
            check(memory[..., :200].permute(0, 3, 1, 2), weight, bias, "relu", order="channels")

    def test_rows_further_apart_than_they_are_long(self) -> None:
        memory = torch.full((300, 424), float("nan"), device="cuda", dtype=torch.bfloat16)
        x, weight, bias = drawn(300, (2, 200, 136))
        memory[:, :400] = x.view(300, 400)
        check(memory[:, :400].unflatten(1, (2, 200))[None], weight, bias, "relu")

    @pytest.mark.parametrize("order", layouts.ORDERS)
    @pytest.mark.parametrize("features", [256, 200, 136])
    def test_bad_numbers_stay_in_their_group(self, features: int, order: str) -> None:
        x, weight, _ = drawn(72, (8, features, features), order=order)
        x[:, :, 1] = float("nan")
        weight[2] = float("inf")
        y, _ = weight_stationary.forward(x, weight, None, "none", False, order)
        assert y[:, :, 1].isnan().all()
        assert y[:, :, [0, *range(3, 8)]].isfinite().all()

    def test_tokens_beyond_the_last_stay(self) -> None:
        x, weight, bias = drawn(64, (4, 200, 200))
        x[:, 33:] = float("nan")
        check(x[:, :33], weight, bias, "relu")

    @pytest.mark.parametrize("order", ["tokens", "channels"])
    @pytest.mark.parametrize("sizes", SIZES[-5:], ids=str)
    def test_repeated_runs_are_equal(self, sizes: tuple[int, int, int], order: str) -> None:
        given = (*drawn(504, sizes, order=order), "relu", False, order)
        first = weight_stationary.forward(*given)[0]
        assert all(torch.equal(first, weight_stationary.forward(*given)[0]) for _ in range(200))

    def test_what_it_does_not_take_goes_to_triton(self) -> None:
        x, weight, bias = drawn(40, (3, 200, 200))
        turned = weight.transpose(1, 2).contiguous().transpose(1, 2)
        assert not weight_stationary.serves(x, turned, bias, "tokens")
        found, _ = weight_stationary.forward(x, turned, bias, "relu", False, "tokens")
        expected, _ = weight_stationary.forward(x, weight, bias, "relu", False, "tokens")
        torch.testing.assert_close(found, expected)


def test_configurations_fit_the_chip_and_cover_all_outputs() -> None:
    for k in range(64, 1100, 8):
        for n in range(64, 1100, 8):
            config = stationary_config(k, n)
            if config is None:
                continue
            parts = -(-n // config.outputs)
            assert configs.shared_bytes(config, k) <= SHARED_LIMIT
            assert parts <= 4
            assert (parts - 1) * config.outputs < n <= parts * config.outputs
            assert config.stages >= 4
    assert stationary_config(256, 256) == StationaryConfig(256, 6, 3, 1)
    assert stationary_config(128, 128) == StationaryConfig(128, 12, 4, 2)
    assert stationary_config(1024, 64) == StationaryConfig(64, 6, 3, 1)
    for k, n in ((32, 256), (256, 56), (99, 100), (100, 99), (256, 1032), (1088, 64)):
        assert stationary_config(k, n) is None


def test_blocks_walk_together_where_that_keeps_the_chip_busy() -> None:
    assert blocks_of(16, 256, 132) == (128, 8)
    assert blocks_of(8, 2, 132) == (16, 2)
    assert blocks_of(100, 64, 132) == (132, 0)
    assert blocks_of(300, 3, 132) == (132, 0)
    assert blocks_of(300, 1, 500) == (300, 1)


def test_what_it_serves() -> None:
    x = torch.zeros(1, 6, 2, 200, dtype=torch.bfloat16)
    weight = torch.zeros(2, 136, 200, dtype=torch.bfloat16)
    bias = torch.zeros(2, 136, dtype=torch.bfloat16)
    assert weight_stationary.serves(x, weight, bias, "tokens")
    assert not weight_stationary.serves(x, weight, None, "groups")
    groups_first = layouts.dense(x, "groups")
    assert weight_stationary.serves(groups_first, weight, None, "groups")
    assert not weight_stationary.serves(groups_first[:, :4], weight, None, "groups")
    assert not weight_stationary.serves(x, weight, bias.T.contiguous().T, "tokens")  # outputs apart
    assert not weight_stationary.serves(x.float(), weight, None, "tokens")
    assert not weight_stationary.serves(x[..., :96], weight[..., :96], None, "tokens")
    assert not weight_stationary.serves(
        torch.zeros(2, 6, 2, 200, dtype=x.dtype), weight, None, "tokens"
    )


def test_which_channels_it_serves() -> None:
    weight = torch.zeros(2, 136, 200, dtype=torch.bfloat16)

    def served(x: Tensor) -> bool:
        return weight_stationary.serves(x, weight, None, "channels")

    def channels(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.bfloat16).permute(0, 3, 1, 2)

    assert served(channels(3, 2, 200, 16))
    assert not served(channels(3, 2, 200, 12))  # rows of 24 bytes
    assert not served(channels(3, 2, 200, 16).contiguous())  # tokens first
    wide = channels(3, 2, 200, 40)
    assert served(wide[:, :16])
    assert served(wide[:, 8:24])
    assert not served(wide[:, 4:20])  # begins at 8 bytes
    assert not served(wide[:, ::2][:, :16])
    assert not served(wide[::2])  # sequences further apart than their groups
    assert served(channels(3, 2, 240, 16)[..., :200])
    assert not served(channels(1, 1, 200, 16).expand(3, 16, 2, 200))


def test_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem("forward", 64, 8, 256, 256, dtype="bfloat16", device="cpu")
    assert weight_stationary.reason_not(p) == "its kernel runs on CUDA devices only"
    monkeypatch.setattr(group_map.packed_groups_tiles, "reason_not", lambda *_: None)

    def asked(dtype: str, k: int = 256, **how: Any) -> str | None:
        given: Any = {"dtype": dtype, "device": "cuda", **how}
        return weight_stationary.reason_not(problem("forward", 4096, 4, k, k, **given))

    assert asked("bfloat16") is None
    assert asked("float32") == "serves bfloat16 and float16, not float32"
    assert asked("bfloat16", order="channels", length=64) is None
    assert asked("bfloat16", order="tokens") is None
    refused = asked("bfloat16", order="channels", length=100)
    assert refused == "serves sequences of channels of multiples of 8 tokens, not 100"
    refused = asked("float16", 99)
    assert refused is not None
    assert refused.endswith("by four parts, not 99 to 99")


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    _, k, n = sizes
    config = stationary_config(k, n)
    assert config is not None
    for activation, dtype in (("relu", torch.bfloat16), ("gelu", torch.float16)):
        save = activation_of(activation).saved == "pre"
        for channels in (False, True):
            text = weight_stationary.source(dtype, k, n, activation, True, save, config, channels)
            kernel = offline.usage(text, "weight_stationary.cu")[weight_stationary.KERNEL]
            assert (kernel.frame, kernel.registers) == (0, LAUNCH_REGISTERS), (activation, kernel)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_for_every_activation(activation: str) -> None:
    config = stationary_config(256, 256)
    assert config is not None
    save = activation_of(activation).saved == "pre"
    for channels in (False, True):
        text = weight_stationary.source(
            torch.bfloat16, 256, 256, activation, False, save, config, channels
        )
        assert offline.usage(text, "weight_stationary.cu")[weight_stationary.KERNEL].frame == 0
