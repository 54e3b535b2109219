"""The float32 backward of strips of narrow groups: against float64 on a GPU, compiled anywhere."""

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
from fastlinear.families.grouped.cuda import packed_groups_backward, wide_backward
from fastlinear.families.grouped.cuda import packed_groups_backward_float32 as float32
from fastlinear.families.grouped.cuda.packed_groups_backward_float32 import Float32BackwardConfig
from fastlinear.families.grouped.cuda.packed_groups_float32 import limit
from fastlinear.families.grouped.problem import problem
from fastlinear.families.grouped.reference import Needs
from tests.families import nvrtc_offline as offline
from tests.families.hopper_only import hopper_tests

ALL: Needs = (True, True, True)
NEEDS: list[Needs] = [n for n in itertools.product((True, False), repeat=3) if any(n)]
# (groups, K, N)
SIZES = (
    *((8, 100, 100), (8, 64, 64), (4, 128, 128), (8, 96, 96), (16, 32, 32), (16, 16, 16)),
    *((5, 48, 48), (3, 36, 20), (5, 44, 52), (8, 100, 64), (4, 16, 128), (4, 128, 16)),
    *((4, 80, 112), (6, 24, 24)),
)
CONFIGS = (
    ((4, 128, 128), Float32BackwardConfig(1, 8, 1, 2, 1, False)),
    ((8, 100, 100), Float32BackwardConfig(1, 1, 8, 3, 2, False)),
    ((8, 96, 96), Float32BackwardConfig(1, 6, 2, 3, 2)),
    ((8, 64, 64), Float32BackwardConfig(2, 2, 3, 5, 2)),
    ((5, 48, 48), Float32BackwardConfig(2, 3, 2, 8, 4)),
    ((16, 16, 16), Float32BackwardConfig(12, 1, 1, 24, 12)),
)


def drawn(
    m: int, groups: int, k: int, n: int, activation: str, order: str = "tokens"
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """dy, saved, x and weight."""

    def tokens(features: int) -> Tensor:
        return layouts.dense(torch.randn(1, m, groups, features, device="cuda"), order)

    x, dy, pre = tokens(k), tokens(n), tokens(n)
    weight = torch.randn(groups, n, k, device="cuda") / k**0.5
    act = activation_of(activation)
    saved = {"none": None, "pre": pre, "output": layouts.dense(act.value(pre), order)}[act.saved]
    return dy, saved, x, weight


def check(
    given: tuple[Tensor, Tensor | None, Tensor, Tensor],
    activation: str,
    needs: Needs = ALL,
    config: Float32BackwardConfig | None = None,
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
    again = packed_groups_backward.backward(*given, *rest, config=config)
    assert all(a is None or torch.equal(a, b) for a, b in zip(found, again, strict=True))


class TestOnHopper:
    pytestmark = hopper_tests

    @pytest.mark.parametrize("activation", ACTIVATIONS)
    def test_activations(self, activation: str) -> None:
        for features in (100, 64):
            check(drawn(165, 8, features, features, activation), activation)

    @pytest.mark.parametrize("order", ["tokens", "groups"])
    @pytest.mark.parametrize("sizes", SIZES, ids=str)
    def test_sizes(self, sizes: tuple[int, int, int], order: str) -> None:
        for m in (16, 33, 1000, 4096):
            activation = "silu" if m == 33 else "none" if m == 16 else "relu"
            check(drawn(m, *sizes, activation, order), activation, order=order)

    @pytest.mark.parametrize("needs", NEEDS, ids=str)
    def test_what_is_wanted(self, needs: Needs) -> None:
        for sizes, activation in (((8, 100, 100), "gelu"), ((8, 32, 48), "none")):
            check(drawn(300, *sizes, activation), activation, needs)

    @pytest.mark.parametrize(("sizes", "config"), CONFIGS, ids=str)
    def test_configurations(
        self, sizes: tuple[int, int, int], config: Float32BackwardConfig
    ) -> None:
        check(drawn(1000, *sizes, "relu"), "relu", ALL, config)

    def test_many_groups_share_blocks(self) -> None:
        check(drawn(160, 800, 100, 100, "relu"), "relu")
        check(drawn(96, 500, 32, 32, "silu"), "silu")

    def test_rows_further_apart_than_they_are_long(self) -> None:
        dy, saved, x, weight = drawn(300, 8, 100, 100, "relu")
        assert saved is not None
        apart = []
        for t in (dy, saved, x):
            memory = torch.full((300, 832), float("nan"), device="cuda")
            memory[:, :800] = t.view(300, 800)
            apart.append(memory[:, :800].unflatten(1, (8, 100))[None])
        check((*apart, weight), "relu")

    def test_infinities_are_torchs(self) -> None:
        dy, saved, x, weight = drawn(70, 8, 100, 100, "none")
        dy[:, 0, 1, 3], dy[:, 1, 1, 4], x[:, 2, 2, 5] = float("inf"), float("nan"), -float("inf")
        weight[3, 7, 5] = -float("inf")
        found = packed_groups_backward.backward(dy, saved, x, weight, "none", ALL, "tokens")
        wide = dy.double(), None, x.double(), weight.double()
        oracle = reference.backward(*wide, "none", ALL, "tokens")
        for a, o in zip(found, oracle, strict=True):
            assert a is not None
            assert o is not None
            finite = o.isfinite()
            assert not finite.all()
            torch.testing.assert_close(a[~finite], o[~finite].float(), equal_nan=True)
            assert a[finite].isfinite().all()

    def test_tokens_beyond_the_last_do_not_count(self) -> None:
        dy, saved, x, weight = drawn(64, 8, 100, 100, "none")
        dy[:, 33:] = float("nan")
        x[:, 33:] = float("nan")
        check((dy[:, :33], saved, x[:, :33], weight), "none")

    def test_repeated_runs_are_equal(self) -> None:
        for sizes in SIZES[:6]:
            given = drawn(1500, *sizes, "gelu")
            first = packed_groups_backward.backward(*given, "gelu", ALL, "tokens")
            for _ in range(200):
                again = packed_groups_backward.backward(*given, "gelu", ALL, "tokens")
                assert all(
                    torch.equal(a, b)
                    for a, b in zip(first, again, strict=True)
                    if a is not None and b is not None
                )

    def test_few_tokens_go_to_triton(self) -> None:
        given = drawn(8, 8, 100, 100, "relu")
        assert not packed_groups_backward.serves(*given, "tokens")
        found = packed_groups_backward.backward(*given, "relu", ALL, "tokens")
        expected = reference.backward(*given, "relu", ALL, "tokens")
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_configurations_fit_the_chip() -> None:
    for _, k, n in SIZES:
        for saved, needs in itertools.product((False, True), NEEDS):
            config = float32.float32_backward_config(k, n, saved, needs)
            assert config is not None
            assert float32.fits(config, k, n, saved, needs)
            assert config.stages >= 2 * config.teams
            assert config.outs >= config.teams
    made = float32.float32_backward_config(100, 100)
    assert made == Float32BackwardConfig(1, 4, 2, 3, 1)
    assert float32.float32_backward_config(102, 100) is None
    assert float32.float32_backward_config(136, 64) is None
    assert float32.float32_backward_config(12, 12) is None


def test_what_it_serves() -> None:
    x = torch.zeros(1, 16, 8, 100)
    weight = torch.zeros(8, 100, 100)
    assert packed_groups_backward.serves(x, x, x, weight, "tokens")
    assert packed_groups_backward.serves(x, None, x, weight, "tokens")
    assert not packed_groups_backward.serves(x, None, x, weight, "groups")
    assert not packed_groups_backward.serves(x[:, :15], None, x[:, :15], weight, "tokens")
    assert not packed_groups_backward.serves(x, None, x, weight.double(), "tokens")
    wide = torch.zeros(1, 16, 8, 200)
    assert not wide_backward.serves(wide, None, wide, torch.zeros(8, 200, 200), "tokens")


def test_reasons_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def reason(k: int, m: int = 64, dtype: str = "float32") -> str | None:
        return packed_groups_backward.reason_not(
            problem("backward", m, 8, k, k, dtype=dtype, device="cuda")
        )

    assert reason(100) is None
    assert reason(100, 15) == "serves 16 tokens and more of float32, not 15"
    assert reason(102) == "no strip of 8 groups, 102 to 102 features, fits: 16 bytes, registers"
    assert reason(100, dtype="float64") == "serves float32, bfloat16 and float16, not float64"


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_compiles_without_spilling(sizes: tuple[int, int, int]) -> None:
    _, k, n = sizes
    for activation, shared in (("relu", True), ("none", False)):
        config = float32.float32_backward_config(k, n, activation != "none")
        assert config is not None
        check_compiled(float32.source(k, n, activation, ALL, config, shared), config)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_compiles_for_every_activation(activation: str) -> None:
    config = float32.float32_backward_config(100, 100, activation != "none")
    assert config is not None
    check_compiled(float32.source(100, 100, activation, ALL, config), config)


def test_compiles_for_other_needs() -> None:
    for needs in NEEDS[1:]:
        config = float32.float32_backward_config(100, 100, True, needs)
        assert config is not None
        check_compiled(float32.source(100, 100, "tanh", needs, config), config)


def check_compiled(text: str, config: Float32BackwardConfig) -> None:
    kernel = offline.usage(text, "packed_groups_backward_float32.cu")[float32.KERNEL]
    assert kernel.frame == 0, kernel
    # else the warps that compute would wait for ever
    assert kernel.registers == limit(config.warps)[1]
