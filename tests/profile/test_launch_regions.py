"""Launch-bound parts from hand-made records: which are named, and what they should save."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest

from fastlinear.core.cost import Ceilings
from fastlinear.profile.diagnose import Step, diagnose
from fastlinear.profile.launch_regions import CODE, launch_regions
from fastlinear.profile.records import Finding, Record

STEP = Step("inference", "cuda", step_us=1000, busy_us=400, precision="high", op_us=0)


def module(
    fqn: str, host: float, device: float, op: str = "aten::linear", calls: int = 1
) -> list[Record]:
    """One op in a module and the Python around it, each half of the host time."""
    return [
        Record(fqn, "Block", "(python)", "forward", calls, host / 2, 0.0),
        Record(fqn, "Block", op, "forward", 4 * calls, host / 2, device),
    ]


def found(
    records: Iterable[Record], step: Step = STEP, apart: tuple[str, ...] = ("",)
) -> dict[str, Finding]:
    regions = launch_regions(step, tuple(records), (), lambda *_: Ceilings(1e12, 1e12), apart)
    return {f.fqn: f for f in regions}


ROOT = module("", 50, 0, "aten::item")
PAIR = [*ROOT, *module("a", 100, 10), *module("a.x", 100, 10), *module("b", 150, 20)]


def test_the_outermost_with_all_they_hold() -> None:
    regions = found(PAIR)
    assert list(regions) == ["a", "b"]
    assert regions["a"].predicted_gain_us == 200 - 30  # a replay costs 30
    assert regions["a"].details["launches"] == 8
    assert regions["b"].predicted_gain_us == 150 - 30
    assert regions["a"].code == CODE
    assert "Config(graphs=True)" in regions["a"].message


def test_apart_names_its_parts_instead() -> None:
    assert list(found(PAIR, apart=("", "a"))) == ["a.x", "b"]


def test_a_part_that_waits_is_taken_apart() -> None:
    records = [*PAIR, *module("a.y", 10, 0, "aten::nonzero")]
    assert list(found(records)) == ["a.x", "b"]


def test_a_list_of_layers_has_no_forward() -> None:
    records = [*ROOT, *module("layers.0", 100, 10), *module("layers.1", 100, 10)]
    assert list(found(records)) == ["layers.0", "layers.1"]


def test_each_call_is_a_replay() -> None:
    assert found([*ROOT, *module("a", 100, 10, calls=3)])["a"].predicted_gain_us == 100 - 90
    assert found([*ROOT, *module("a", 100, 10, calls=4)]) == {}


def test_busy_kernels_remain() -> None:
    assert found([*ROOT, *module("a", 100, 60)])["a"].predicted_gain_us == 40
    assert found([*ROOT, *module("a", 100, 71)]) == {}, "29% of its time without a kernel"


def test_no_more_than_the_device_idles() -> None:
    assert found(PAIR, replace(STEP, busy_us=950))["a"].predicted_gain_us == 50
    assert found(PAIR, replace(STEP, busy_us=995)) == {}, "not worth a word"


def test_a_cpu_is_silent() -> None:
    step = replace(STEP, device="cpu")
    assert found(PAIR, step) == {}
    assert CODE not in {f.code for f in diagnose(step, tuple(PAIR), (), {}, lambda *_: None)}


def test_training_replays_cost_more() -> None:
    assert found(PAIR, replace(STEP, mode="train")) == {}
    backward = Record("a.x", "Block", "AddmmBackward0", "backward", 4, 400.0, 8.0)
    regions = found([*PAIR, backward], replace(STEP, mode="train"))
    assert regions["a"].predicted_gain_us == 600 - 300


@pytest.mark.parametrize(("op", "codes"), [("aten::item", {CODE}), ("aten::add", set())])
def test_where_the_model_as_a_whole_is_no_offer(op: str, codes: set[str]) -> None:
    records = [*module("", 50, 0, op), *module("a", 100, 10)]
    findings = diagnose(STEP, tuple(records), (), {}, lambda *_: Ceilings(1e12, 1e12))
    assert {f.code for f in findings} == {"launch_bound"} | codes
    busy = diagnose(replace(STEP, busy_us=800), tuple(records), (), {}, lambda *_: None)
    assert {f.code for f in busy} == {CODE}, "the step as a whole keeps the device busy"
