"""Products by planes compile for Hopper on a machine without a GPU, and stay in registers."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import numpy as np
import pytest

from benchmarks.experiments.configurations.planes import KIND
from benchmarks.experiments.configurations.rows import mean, read, regrets
from fastlinear.families.linear.cuda import planes
from fastlinear.families.linear.cuda.planes import STAGES, Config, Derivation, Raggedness
from fastlinear.families.linear.problem import problem
from fastlinear.kernels.cuda.hopper import ARCH
from tests.families import nvrtc_offline as nvrtc

ROOT = Path(__file__).parents[3]


def _frame(config: Config, activation: str = "none", **how: Any) -> int:
    """Bytes of local memory."""
    found = nvrtc.usage(planes.source(config, activation, **how), "planes.cu", ARCH)
    assert found[planes.KERNEL].registers == 65_536 // config.threads // 8 * 8, "all there are"
    return max(one.frame for one in found.values())


@pytest.mark.parametrize("bn", STAGES)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, True)], ids=str)
def test_every_layout_stays_in_registers(bn: int, turned: tuple[bool, bool]) -> None:
    assert _frame(Config(bn, STAGES[bn]), turned=turned) == 0


@pytest.mark.parametrize("activation", ["gelu", "mish", "sine", "softplus"])
def test_long_activations_stay_in_registers(activation: str) -> None:
    most = 8 if activation == "sine" else 0  # around the call for what is large
    assert _frame(Config(), activation, has_bias=True, save_pre=True) <= most


@pytest.mark.parametrize("activation", ["none", "gelu", "mish", "sine"])
def test_splits_stay_in_registers(activation: str) -> None:
    for grouped, ragged in product((False, True), repeat=2):
        text = planes.split_source(activation, grouped, ragged)
        found = nvrtc.usage(text, "planes_split.cu", ARCH)
        most = 48 if activation == "mish" else 0  # of what its derivative is made of
        assert max(one.frame for one in found.values()) <= most
        assert found[planes.SPLIT_KERNEL].registers <= 64


@pytest.mark.parametrize("bn", STAGES)
@pytest.mark.parametrize("turned", [False, True])
def test_products_of_gradients_stay_in_registers(bn: int, turned: bool) -> None:
    for activation, *derivations in (
        ("gelu", Derivation.GRADIENT, Derivation.NONE),
        ("silu", Derivation.GATE_GRADIENT, Derivation.NONE),
        ("gelu", Derivation.GATED, Derivation.NONE),
        ("silu", Derivation.NONE, Derivation.GATED),
    ):
        # of numbers without planes what they are derived from is read again, out of the way
        most = {64: 0, 128: 8}[bn]
        how = {"added": True, "turned": (turned, True), "derivations": tuple(derivations)}
        assert _frame(Config(bn, STAGES[bn]), activation, **how) <= most


@pytest.mark.parametrize("bn", STAGES)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, True)], ids=str)
def test_products_of_groups_stay_in_registers(bn: int, turned: tuple[bool, bool]) -> None:
    most = {64: 0, 128: 8}[bn]
    derived = {"derivations": (Derivation.GRADIENT, Derivation.NONE)}
    for activation, how in (
        ("none", {}),
        ("gelu", derived),
        ("gelu", {"has_bias": True, "save_pre": True}),
    ):
        for sizes in Raggedness:
            if sizes is Raggedness.NONE or turned[0] == (sizes is Raggedness.K):
                given = {"grouped": True, "ragged": sizes, "turned": turned, **how}
                assert _frame(Config(bn, STAGES[bn]), activation, **given) <= most


def test_products_that_read_numbers_stay_in_registers() -> None:
    for config in planes.candidates(8192, 256, 64, reads=True):
        for activation in ("gelu", "sine"):
            assert _frame(config, activation, has_bias=True, save_pre=True) <= 8


def test_less_than_full_precision_is_left_to_others() -> None:
    def posed(precision: str, dtype: str = "float32") -> Any:
        return problem("forward", 512, 512, 512, dtype=dtype, device="cuda", precision=precision)

    assert planes.reason_not_exact(posed("highest")) is None
    for precision in ("high", "medium"):
        assert "full precision" in str(planes.reason_not_exact(posed(precision)))
    assert planes.reason_not_exact(posed("highest", "bfloat16")) is not None


def test_calls_are_split_late_where_that_was_faster() -> None:
    """Of layers that were timed both ways; where not, it would have been little faster."""
    chosen, lost = [], []
    rows = (ROOT / "results/nvidia-h200/planes-layers.jsonl").read_text().splitlines()
    for row in map(json.loads, rows):
        if row["case"] != "layer" or row["run"] != "one scale a block":
            continue
        m, k, n, us = row["M"], row["K"], row["N"], row["us"]
        for way, sizes in (("forward", (m, n, k)), ("forward kept", (m, n, k)), ("dx", (m, k, n))):
            chosen.append(planes.split_late(*sizes, 132))
            split, read = us[f"split {way}"], us[f"read {way}"]
            lost.append((read if chosen[-1] else split) / min(read, split))
    assert len(lost) == 27
    assert set(chosen) == {True, False}
    assert geometric_mean(lost) < 1.01
    assert max(lost) < 1.15


def test_the_chosen_configuration_can_serve() -> None:
    for m, n, k in ((8192, 4096, 4096), (1, 1, 1), (256, 256, 1 << 17), (300, 1, 70)):
        found = planes.config_for(m, n, k, 132)
        assert found.invalid(k) is None
    assert planes.config_for(256, 256, 1 << 17, 132).slices > 1
    assert planes.config_for(8192, 4096, 4096, 132).slices == 1


def test_the_model_of_time_chooses_what_was_fastest() -> None:
    """Of the configurations that were timed for each of some drawn problems."""
    kind = KIND
    for group, timed in read(kind, ROOT / "results/nvidia-h200/planes.jsonl.gz").items():
        told = [kind.microseconds(r.problem, r.config) for r in timed]
        assert len(timed) > 200, group
        assert mean(regrets(timed, np.array(told))) < 1.04, group
        assert mean(regrets(timed, -np.array(told))) > 1.5, group  # others are far slower
