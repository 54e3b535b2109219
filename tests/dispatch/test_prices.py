"""Prices: shipped ones cover every backend, the user's own come first, and choices follow them."""

from __future__ import annotations

import gzip
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastlinear.calibration import drawn
from fastlinear.calibration.measure import alone
from fastlinear.core import files
from fastlinear.core.device import DeviceFacts, device_facts
from fastlinear.core.errors import CacheWarning
from fastlinear.core.problem import Problem
from fastlinear.dispatch import prices
from fastlinear.dispatch.backend import families, family
from fastlinear.dispatch.prices import Price, Prices, name_of
from fastlinear.dispatch.select import predictions, select
from fastlinear.families.linear.problem import problem

ROOT = Path(__file__).parents[2]
DEVICES = json.loads((Path(prices.__file__).parent / "constants" / "devices.json").read_text())
ROWS = ROOT / "results" / "amd-epyc" / "calibration.jsonl.gz"
_EVERY = 8  # of the committed rows


@pytest.fixture(autouse=True)
def fresh() -> None:
    prices.forget()


@pytest.mark.parametrize("name", DEVICES)
def test_every_backend_has_prices(name: str) -> None:
    """Of each piece and dtype that backends serve on CPUs, on every shipped device."""
    known = prices.of_device(name)
    assert known is not None
    for fam in families():
        for mode in (drawn.INFERENCE, drawn.TRAINING):
            for case in drawn.cases(fam, 5, 6, "cpu", mode):
                forward = case.problem
                pieces = family(fam).pieces if forward.needs_grad else ("forward",)
                for p in map(forward.with_piece, pieces):
                    for backend in family(fam).candidates(p.piece):
                        if backend.reason_not(p) is None:
                            work = family(fam).work
                            assert work is not None
                            works = work(p, backend.name)
                            told = works and known.predict(works, p.dtype)
                            assert told, (backend.name, p.describe())
                            assert 0.01 < told.us < 1e8, (backend.name, p.describe(), told)


def test_a_device_takes_the_prices_of_the_one_most_like_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    facts = device_facts("cpu")
    for name, there in DEVICES.items():
        monkeypatch.setattr(prices, "traits", lambda _, there=there: there)
        assert prices.most_alike(facts) == name
    stranger = {**DEVICES["amd-zen5"], "family": 27}
    monkeypatch.setattr(prices, "traits", lambda _: stranger)
    assert prices.most_alike(facts) == "amd-zen5"
    gpu = DeviceFacts("cuda", "x", "x", (9, 0), 132, "sm_90", 0, 0)
    assert prices.most_alike(gpu) == ""


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


def test_pytorch_wins_ties() -> None:
    p = problem("forward", 8, 8, 8, dtype="float32", device="cpu", bias=False)
    known = prices.prices("cpu")
    assert known is not None
    flat = {name: Price(0.0) for name in known.by_kind}
    _write(replace(known, by_kind=flat))
    assert select(p).backend.name == "eager"


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[1]", '{"format": 1}'])
def test_corrupt_prices_are_ignored_with_one_warning(content: str) -> None:
    path = prices.own_path(device_facts("cpu"))
    files.make_folder(path.parent)
    path.write_text(content)
    prices.forget()
    with pytest.warns(CacheWarning, match="fastlinear calibrate"):
        found = prices.prices("cpu")
    assert found is prices.shipped(device_facts("cpu"))


def test_choices_over_committed_rows_are_near_the_best() -> None:
    """Regret over the measured pieces that the shipped prices of a Zen 5 explain."""
    known = prices.of_device("amd-zen5")
    assert known is not None
    regret: dict[tuple[str, bool], list[float]] = defaultdict(list)
    with gzip.open(ROWS, "rt") as lines:
        for i, line in enumerate(lines):
            row = json.loads(line)
            if i % _EVERY or len(row.get("us", ())) < 2:
                continue
            p = Problem.from_json(row["problem"])
            told = {}
            for name in row["us"]:
                works = alone(p, name)
                found = works and known.predict(works, p.dtype)
                if found:
                    told[name] = found.us * (0.97 if name == "eager" else 1.0)
            if len(told) > 1:
                taken = row["us"][min(told, key=lambda name: told[name])]
                regret[p.family, p.needs_grad].append(math.log(taken / min(row["us"].values())))
    assert len(regret) >= 12
    for key, logs in regret.items():
        assert math.exp(float(np.mean(logs))) < 1.08, key
    every = [log for logs in regret.values() for log in logs]
    assert math.exp(float(np.mean(every))) < 1.05
