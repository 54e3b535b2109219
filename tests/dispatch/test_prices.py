"""Prices: shipped ones cover every backend, the user's own come first, and choices follow them."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fastlinear.calibration import drawn
from fastlinear.calibration.measure import alone
from fastlinear.core import device as device_module
from fastlinear.core import files
from fastlinear.core.device import DeviceFacts, device_facts
from fastlinear.core.errors import CacheWarning
from fastlinear.core.problem import Problem
from fastlinear.dispatch import prices
from fastlinear.dispatch.backend import families, family
from fastlinear.dispatch.prices import Prediction, Price, Prices, name_of
from fastlinear.dispatch.select import _predicted, predictions, select
from fastlinear.dispatch.work import FRESH, call, host
from fastlinear.families.linear.problem import problem

ROOT = Path(__file__).parents[2]
DEVICES = json.loads((Path(prices.__file__).parent / "constants" / "devices.json").read_text())
NOT_TIMED = {"experts"}
"""Families that nothing is predicted of: the first backend that can serve is taken."""


@pytest.fixture(autouse=True)
def fresh() -> None:
    prices.forget()


@pytest.mark.parametrize("name", [n for n, there in DEVICES.items() if there["kind"] == "cpu"])
def test_every_backend_has_prices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each piece and dtype that backends serve on CPUs, on every shipped device."""
    for dtype, short in (("bfloat16", "bf16"), ("float16", "fp16")):  # as if this were it
        there = DEVICES[name][f"products of {dtype}"]
        monkeypatch.setattr(
            torch.ops.mkldnn, f"_is_mkldnn_{short}_supported", lambda there=there: there
        )
    known = prices.of_device(name)
    assert known is not None
    assert set(families()) - set(drawn.FAMILIES) == NOT_TIMED
    for fam in drawn.FAMILIES:
        for mode in (drawn.INFERENCE, drawn.TRAINING):
            for case in drawn.cases(fam, 5, 20, "cpu", mode):
                forward = case.problem
                pieces = family(fam).pieces if forward.needs_grad else ("forward",)
                for p in map(forward.with_piece, pieces):
                    for backend in family(fam).candidates(p.piece):
                        if backend.reason_not(p) is None:
                            works = family(fam).work_of(p, backend.name)
                            told = works and known.predict(works, p.dtype)
                            assert told, (backend.name, p.describe())
                            assert 0.01 < told.us < 1e8, (backend.name, p.describe(), told)


def test_a_device_takes_the_prices_of_the_one_most_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = device_facts("cpu")
    for name, there in DEVICES.items():
        if there["kind"] != "cpu":
            continue
        monkeypatch.setattr(prices, "traits", lambda _, there=there: there)
        assert prices.most_alike(facts) == name
    stranger = {**DEVICES["amd-zen5"], "family": 27}
    monkeypatch.setattr(prices, "traits", lambda _: stranger)
    assert prices.most_alike(facts) == "amd-zen5"
    monkeypatch.undo()
    gpu = DeviceFacts("cuda", "x", "x", (8, 0), 108, "sm_80", 0, 0)
    assert prices.most_alike(gpu) == "nvidia-hopper"


def _write(known: Prices) -> Path:
    path = prices.own_path(device_facts("cpu"))
    files.make_folder(path.parent)
    path.write_text(json.dumps(known.to_json()))
    prices.forget()
    return path


def test_the_users_prices_come_first_and_choices_follow_them() -> None:
    p = problem("forward", 64, 128, 128, dtype="float32", device="cpu", activation="gelu")
    shipped = prices.prices("cpu")
    assert shipped is not None
    chosen = select(p)
    assert chosen.source == "predicted"
    assert " us = " in chosen.reason
    told = predictions(p, family(p.family).candidates("forward")[:1])
    assert dict(chosen.passed_over).get("eager", "").endswith(str(told["eager"])) or (
        chosen.backend.name == "eager"
    )
    for dear, taken in (("torch product", False), ("gemm_cpp product", True)):
        by_kind = dict(shipped.by_kind)
        for kind in ("torch product", "gemm_cpp product", "onednn product"):
            price = by_kind[name_of(kind, "float32")]
            far = 5.0 if kind == dear else 0.0
            by_kind[name_of(kind, "float32")] = replace(price, level=price.level + far)
        _write(replace(shipped, by_kind=by_kind))
        assert (select(p).backend.name in ("eager", "cpp", "onednn")) is taken, dear


def test_memory_that_calls_keep_costs_nothing() -> None:
    """A large result of ours lies where one before did; PyTorch's is new memory at every call."""
    known = prices.of_device("amd-zen5")
    assert known is not None
    p = problem("forward", 1 << 16, 64, 512, dtype="float32", device="cpu")
    for backend, pays in (("eager", True), ("onednn", True), ("gemm_cpp", False)):
        works = family(p.family).work_of(p, backend)
        told = known.predict(works or (), p.dtype)
        assert told is not None
        assert (FRESH in dict(told.terms)) == pays
        assert FRESH in {w.kind for w in alone(p, backend) or ()}


def test_pytorch_wins_ties() -> None:
    p = problem("forward", 8, 8, 8, dtype="float32", device="cpu", bias=False)
    known = prices.prices("cpu")
    assert known is not None
    flat = {name: Price(0.0) for name in known.by_kind}
    _write(replace(known, by_kind=flat))
    assert select(p).backend.name == "eager"


def test_what_two_backends_both_do_tells_them_apart_no_more() -> None:
    """Of a large product that both have a pass is told apart, as it is of none."""

    def told(*terms: tuple[str, float]) -> Prediction:
        return Prediction(sum(us for _, us in terms), terms)

    theirs = told(("torch product", 100.0), ("torch pass", 20.0))
    shares, apart = told(("torch product", 100.0), ("own pass", 14.0)), told(("own", 114.0))
    assert theirs.apart_from(theirs) == 0.0
    assert theirs.apart_from(shares) == 20.0
    assert theirs.apart_from(apart) == 120.0
    assert theirs.apart_from(told(("torch product", 30.0))) == 90.0


def test_pytorch_wins_by_a_share_of_what_it_does_alone() -> None:
    p = problem("forward", 64, 64, 64, dtype="float32", device="cuda")
    able = {b.name: b for b in family("linear_act").candidates("forward")}

    def taken(**found: Prediction) -> str:
        return _predicted(p, able, found, dict.fromkeys(able)).backend.name

    shared = ("torch product", 100.0)
    own = Prediction(120.0, (shared, ("torch pass", 20.0)))
    assert taken(eager=own, triton=Prediction(114.0, (shared, ("pass", 14.0)))) == "triton"
    assert taken(eager=own, triton=Prediction(119.0, (shared, ("pass", 19.0)))) == "eager"
    assert taken(eager=own, triton=Prediction(114.0, (("product", 114.0),))) == "eager"
    assert taken(eager=own, triton=Prediction(90.0, (("product", 90.0),))) == "triton"
    assert taken(triton=Prediction(90.0, (("product", 90.0),))) == "triton"


def test_kinds_that_the_users_prices_do_not_know_are_the_shipped_ones() -> None:
    """They may come from before there were such kinds."""
    shipped = prices.prices("cpu")
    assert shipped is not None
    first, *others = shipped.by_kind
    _write(replace(shipped, by_kind={first: Price(1.5)}))
    found = prices.prices("cpu")
    assert found is not None
    assert found.by_kind[first].level == 1.5
    assert all(found.by_kind[kind] == shipped.by_kind[kind] for kind in others)


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[1]", '{"format": 1}'])
def test_corrupt_prices_are_ignored_with_one_warning(content: str) -> None:
    path = prices.own_path(device_facts("cpu"))
    files.make_folder(path.parent)
    path.write_text(content)
    prices.forget()
    with pytest.warns(CacheWarning, match="fastlinear calibrate"):
        found = prices.prices("cpu")
    assert found is prices.shipped(device_facts("cpu"))


@pytest.mark.parametrize(
    ("device", "folder", "every", "family_most", "most"),
    [
        ("amd-zen5", "amd-epyc", 8, 1.08, 1.05),
        ("intel-amx", "intel-xeon-processor", 8, 1.08, 1.05),
        ("nvidia-hopper", "nvidia-h200", 1, 1.08, 1.05),
        ("nvidia-hopper", "nvidia-h100-80gb-hbm3", 1, 1.08, 1.05),
    ],
)
def test_choices_over_committed_rows_are_near_the_best(
    device: str,
    folder: str,
    every: int,
    family_most: float,
    most: float,
    request: pytest.FixtureRequest,
) -> None:
    """Regret over the measured pieces that the shipped prices of a device explain; on a GPU the
    device's time, as in CUDA graphs."""
    if device == "nvidia-hopper":
        request.getfixturevalue("hopper")
    known = prices.of_device(device)
    assert known is not None
    regret: dict[tuple[str, bool], list[float]] = defaultdict(list)
    tie = {"nvidia-hopper": 0.1}.get(device, 0.03)
    for row in _rows(folder, every):
        p, us = Problem.from_json(row["problem"]), row["us"]
        p = replace(p, captured=p.device == "cuda")
        told = {}
        for name in us:
            works = alone(p, name)
            found = None if works is None else known.of_call(p, works)
            if found:
                told[name] = found.us * (1.0 - tie if name == "eager" else 1.0)
        if len(told) > 1:
            log = math.log(us[min(told, key=lambda name: told[name])] / min(us.values()))
            regret[p.family, p.needs_grad].append(log)
    assert len(regret) >= 11
    for key, logs in regret.items():
        assert math.exp(float(np.mean(logs))) < family_most, key
    assert math.exp(float(np.mean([log for logs in regret.values() for log in logs]))) < most


def _rows(folder: str, every: int) -> Iterator[dict[str, Any]]:
    with gzip.open(ROOT / "results" / folder / "calibration.jsonl.gz", "rt") as lines:
        for i, line in enumerate(lines):
            row = json.loads(line)
            if i % every == 0 and len(row.get("us", ())) > 1 and min(row["us"].values()) > 0:
                yield row


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("folder", ["nvidia-h200", "nvidia-h100-80gb-hbm3"])
def test_every_measured_backend_has_prices_on_a_gpu(folder: str) -> None:
    known = prices.of_device("nvidia-hopper")
    assert known is not None
    for row in _rows(folder, 16):
        p = Problem.from_json(row["problem"])
        for name in row["us"]:
            for captured in (False, True):
                works = family(p.family).work_of(p, name)
                assert works is not None, (name, p.describe())
                told = known.of_call(replace(p, captured=captured), works)
                assert told is not None, (name, p.describe())
                assert told.us < 1e8


HOPPER = DeviceFacts("cuda", "NVIDIA H100", "nvidia-h100", (9, 0), 132, "sm_90", 80 << 30, 50 << 20)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if there were one, for what is only asked about it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: HOPPER.capability)
    monkeypatch.setattr(device_module, "_cuda_facts", lambda _: HOPPER)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("name", drawn.FAMILIES)
def test_every_choice_on_a_gpu_is_predicted(name: str) -> None:
    """Of each piece, and whatever else can serve has a price as well."""
    for mode in (drawn.INFERENCE, drawn.TRAINING):
        for case in drawn.cases(name, 6, 40, "cuda", mode):
            forward = case.problem
            pieces = family(name).pieces if forward.needs_grad else ("forward",)
            for p in map(forward.with_piece, pieces):
                chosen = select(p, ready=False)
                assert chosen.source == "predicted", p.describe()
                candidates = family(name).candidates(p.piece)
                able = {b.name for b in candidates if b.reason_not(p) is None}
                avoided = {b.name for b in candidates if b.why_avoided(p) is not None}
                told = {n for n, why in chosen.passed_over if why.startswith("predicted ")}
                assert told | avoided | {chosen.backend.name} >= able, p.describe()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_float64_on_a_gpu_is_pytorchs(activation: str) -> None:
    p = problem("forward", 64, 64, 64, dtype="float64", device="cuda", activation=activation)
    assert (select(p).backend.name, select(p).source) == ("eager", "default")


def test_three_narrow_products_are_left_to_chips_that_gain_by_them(
    hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = problem(*("forward", 4096, 1024, 1024), dtype="float32", device="cuda", precision="highest")
    found = {}
    for capability in ((9, 0), (8, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_, c=capability: c)
        found[capability] = select(p, ready=False).backend.name
    assert found == {(9, 0): "planes", (8, 0): "triton_planes", (8, 9): "eager"}


def test_a_gpu_computes_while_its_host_goes_on() -> None:
    kinds = {"half fast call": 3.0, "half slow call": 9.0, "any lean host": 4.0}
    known = Prices("x", {kind: Price(math.log(us)) for kind, us in kinds.items()})
    p = problem("forward", 8, 8, 8, dtype="bfloat16", device="cuda")
    short = (host("lean"), call("fast"))
    long = (host("lean"), call("slow"))
    told = {captured: known.of_call(replace(p, captured=captured), short) for captured in (0, 1)}
    assert told[0] is not None
    assert told[1] is not None
    assert 4.0 < told[0].us < 4.5  # the host decides; what the device does counts a little
    assert told[1].us == pytest.approx(3.0)  # in a CUDA graph the host has nothing to do
    assert str(told[0]).endswith("4 lean host, beside 3")
    slow = known.of_call(p, long)
    assert slow is not None
    assert 9.0 < slow.us < 9.5
    assert str(slow).endswith("9 slow call, beside 4 of the host")
