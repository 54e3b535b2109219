"""Calibrating this machine: a second of measuring gives prices that choices then follow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from benchmarks import prices as shipping
from fastlinear.calibration import drawn, measure, ways
from fastlinear.calibration.calibrate import calibrate
from fastlinear.cli.app import app
from fastlinear.core import files
from fastlinear.core.device import device_facts
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.dispatch import prices
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import select
from fastlinear.families.linear.problem import problem

CPU = torch.device("cpu")
_SMALL = drawn.Limit(1e6, 1 << 18)


def test_the_command_writes_prices_and_rows(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    done = CliRunner().invoke(app, ["calibrate", "--seconds", "2", "--rows", str(rows)])
    assert done.exit_code == 0, done.output
    assert "calls measured; the median prediction is off by" in done.output
    header, *measured = map(json.loads, rows.read_text().splitlines())
    assert header["traits"]["kind"] == "cpu"
    assert measured
    found = prices.prices("cpu")
    assert found is not None
    assert found.source == "measured on this machine"
    told = CliRunner().invoke(app, ["calibrate", "--seconds", "1", "--json"])
    assert json.loads(told.stdout)["calls"] > 10
    header_of, pieces, whole = shipping.read([rows])
    assert header_of == header
    assert len(pieces) + len(whole) == len(measured)
    with pytest.raises(InputError, match="what the device is"):
        shipping.read([])


def test_clearing_the_cache_removes_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    assert CliRunner().invoke(app, ["calibrate", "--seconds", "1", "--quiet"]).exit_code == 0
    path = prices.own_path(device_facts("cpu"))
    assert path.exists()
    assert CliRunner().invoke(app, ["cache", "clear"]).exit_code == 0
    assert not path.exists()
    assert prices.prices("cpu") is prices.shipped(device_facts("cpu"))

    def full(*_: object) -> None:
        raise OSError("no room")

    monkeypatch.setattr(files, "replace", full)
    with pytest.raises(UnsupportedError, match="FASTLINEAR_CACHE_DIR"):
        calibrate("cpu", seconds=0.1)


@pytest.mark.gpu
def test_a_gpu_is_calibrated() -> None:
    found = calibrate("cuda", seconds=5.0)
    assert found.calls > 5
    assert found.off_after <= found.off_before
    known = prices.prices("cuda")
    assert known is not None
    assert known.source == "measured on this machine"
    p = problem("forward", 64, 512, 512, dtype="bfloat16", device="cuda")
    assert select(p).source == "predicted"


@pytest.mark.parametrize("name", drawn.FAMILIES)
def test_rows_are_calls_of_known_work(name: str) -> None:
    ways.wait()
    case = drawn.case(name, 2, 0, "cpu", drawn.TRAINING, ("float32",), _SMALL)
    pieces = list(measure.measure_pieces(case, CPU))
    assert {r["problem"]["piece"] for r in pieces} == {
        p.piece for p in measure.pieces_of(case.problem)
    }
    for row in pieces:
        assert "eager" in row["us"]
        assert all(us > 0 for us in row["us"].values())
    calls = list(measure.calls_of_pieces(pieces))
    assert len(calls) == sum(len(row["us"]) for row in pieces)
    row = measure.measure_ways(case, CPU)
    took = [way["took"] for way in row["ways"]]
    assert {"step": "eager"} in took
    assert len(list(measure.calls_of_ways([row]))) >= 2
    assert json.loads(json.dumps(row)) == row


def test_composed_choices_are_no_calls_of_known_work() -> None:
    p = drawn.case("mlp", 1, 0, "cpu", drawn.INFERENCE, ("float32",)).problem
    assert measure.taken(p, {"forward": "layerwise"}) is None
    assert measure.taken(p, {"step": "eager"}) is None
    assert measure.taken(p, {"forward": "eager"}) == family("mlp").work_of(p, "eager")
