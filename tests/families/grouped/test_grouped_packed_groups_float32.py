"""The float32 kernel of strips of narrow groups: against float64 on a GPU, compiled anywhere."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.cuda import packed_groups
from fastlinear.families.grouped.cuda import packed_groups_float32 as float32
from fastlinear.families.grouped.cuda.packed_groups_float32 import Float32Config
from fastlinear.families.grouped.cuda.packed_groups_tiles import box_columns, tile_bytes
from fastlinear.families.grouped.problem import problem
from tests.families import nvrtc_offline as offline
from tests.families.hopper_only import hopper_tests

# (groups, K, N)
SIZES = (
    *((8, 100, 100), (8, 64, 64), (16, 32, 32), (4, 128, 128), (3, 36, 8), (5, 44, 12)),
    *((8, 148, 100), (4, 256, 40), (8, 40, 36), (8, 100, 64)),
)
CONFIGS = (
    ((8, 100, 100), Float32Config(4, 2, 5, 4)),
    ((8, 100, 100), Float32Config(2, 4, 4, 2)),
    ((8, 100, 100), Float32Config(1, 8, 2, 2)),
    ((8, 100, 100), Float32Config(3, 4, 4, 3)),
    ((16, 32, 32), Float32Config(4, 2, 8, 4)),
)


def drawn(m: int, groups: int, k: int, n: int, order: str) -> tuple[Tensor, Tensor, Tensor]:
    x = layouts.dense(torch.randn(1, m, groups, k, device="cuda"), order)
    weight = torch.randn(groups, n, k, device="cuda") / k**0.5
    return x, weight, torch.randn(groups, n, device="cuda")


def check(
    given: tuple[Tensor, Tensor, Tensor | None],
    activation: str,
    order: str,
    config: Float32Config | None = None,
) -> None:
    save = activation_of(activation).saved == "pre"
    x, weight, bias = given
    torch.full((1 << 20,), float("nan"), device="cuda")  # what new memory holds
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
        x, weight, bias = drawn(165, 8, 100, 100, "tokens")
        check((x, weight, None if activation == "tanh" else bias), activation, "tokens")

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int], order: str) -> None:
        one = 1 if order == "tokens" else 2  # one token lies as tokens first
        for m in (one, 31, 33, 1000, 4096):
            check(drawn(m, *sizes, order), "silu" if m == 33 else "relu", order)

    @pytest.mark.parametrize(("sizes", "config"), CONFIGS, ids=str)
    def test_configurations(self, sizes: tuple[int, int, int], config: Float32Config) -> None:
        check(drawn(3000, *sizes, "groups"), "relu", "groups", config)

    def test_many_groups_share_blocks(self) -> None:
        check(drawn(160, 800, 100, 100, "tokens"), "relu", "tokens")

    def test_rows_further_apart_than_they_are_long(self) -> None:
        memory = torch.full((300, 832), float("nan"), device="cuda")
        x, weight, bias = drawn(300, 8, 100, 100, "tokens")
        memory[:, :800] = x.view(300, 800)
        check((memory[:, :800].view(1, 300, 8, 100), weight, bias), "relu", "tokens")

    def test_infinities_are_torchs(self) -> None:
        x, weight, _ = drawn(70, 8, 100, 100, "tokens")
        x[:, 0, 1, 3], x[:, 1, 1, 4], x[:, 2, 1, 5] = float("inf"), float("nan"), 1.0
        weight[1, 7, 5] = -float("inf")
        y, _ = packed_groups.forward(x, weight, None, "none", False, "tokens")
        expected, _ = reference.forward(x.double(), weight.double(), None, "none", False, "tokens")
        finite = expected.isfinite()
        torch.testing.assert_close(y[~finite], expected[~finite].float(), equal_nan=True)
        assert y[finite].isfinite().all()

    def test_repeated_runs_are_equal(self) -> None:
        for sizes in SIZES[:4]:
            given = (*drawn(1500, *sizes, "tokens"), "relu", False, "tokens")
            first = packed_groups.forward(*given)[0]
            assert all(torch.equal(first, packed_groups.forward(*given)[0]) for _ in range(200))


def test_configurations_fit_the_chip() -> None:
    for _, k, n in SIZES:
        for save_pre in (False, True):
            config = float32.float32_config(k, n, save_pre)
            assert config is not None
            assert float32.fits(config, k, n, save_pre)
            assert config.warps in (8, 12)
            assert config.stages > config.teams
            assert config.outs >= config.teams
    assert float32.float32_config(100, 100, False) == Float32Config(4, 2, 6, 4)
    assert float32.float32_config(100, 100, True) == Float32Config(3, 4, 4, 3)
    assert float32.float32_config(16, 16, False) is None
    assert float32.float32_config(102, 100, False) is None
    assert float32.float32_config(200, 200, False) is None


def test_tiles_count_bytes() -> None:
    assert [box_columns(1, c, 4) for c in (32, 48, 100, 148, 300)] == [32, 16, 100, 148, 100]
    assert tile_bytes(100, 4) == 13 * 1024


def test_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def reason(k: int, order: str = "tokens", dtype: str = "float32") -> str | None:
        given = problem("forward", 64, 8, k, k, dtype=dtype, device="cuda", order=order)
        return packed_groups.reason_not(given)

    assert reason(100) is None
    assert reason(100, "groups") is None
    assert reason(16) == "no strip of 8 groups, 16 to 16 features, fits: 16 bytes, registers"
    assert reason(100, dtype="float64") == "serves float32, bfloat16 and float16, not float64"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    _, k, n = sizes
    for activation, shared in (("relu", True), ("gelu", False)):
        save = activation_of(activation).saved == "pre"
        config = float32.float32_config(k, n, save)
        assert config is not None
        check_compiled(float32.source(k, n, activation, True, save, config, shared), config)


def test_compiles_for_other_configurations() -> None:
    for (_, k, n), config in CONFIGS:
        check_compiled(float32.source(k, n, "none", False, False, config), config)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_for_every_activation(activation: str) -> None:
    config = float32.float32_config(100, 100, True)
    assert config is not None
    check_compiled(float32.source(100, 100, activation, True, True, config), config)


def check_compiled(text: str, config: Float32Config) -> None:
    kernel = offline.usage(text, "packed_groups_float32.cu")[float32.KERNEL]
    assert kernel.frame == 0, kernel
    # else the warps that compute would wait for ever
    assert kernel.registers == float32.limit(config.warps)[1]
