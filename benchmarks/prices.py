"""Prices shipped for a device, from rows measured there: ``python -m benchmarks prices``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.contenders import grouped_linear, linear_act, mlp
from benchmarks.contenders.diagonal_work import problem_of as diagonal_problem
from benchmarks.contenders.gated_mlp import problem_of as gated_problem
from benchmarks.harness.case import Case
from benchmarks.harness.rows import opened
from fastlinear.calibration.calibrate import from_calls
from fastlinear.calibration.measure import calls_of_pieces, calls_of_ways
from fastlinear.core import device
from fastlinear.core.errors import InputError
from fastlinear.core.problem import Problem
from fastlinear.dispatch import prices
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.prices import Prices

FOLDER = Path(prices.__file__).with_name("constants")
Row = dict[str, Any]
_TOOK = re.compile(r"eager|fastlinear\[(\w+)\]")
_PROBLEMS: dict[str, Callable[[Case], Problem]] = {
    "linear_act": linear_act.problem_of,
    "mlp": mlp.problem_of,
    "gated_mlp": gated_problem,
    "diagonal_linear": diagonal_problem,
    "grouped_linear": grouped_linear.problem_of,
}


def read(paths: Iterable[Path]) -> tuple[Row, list[Row], list[Row]]:
    """(the device's header, rows of pieces, rows of whole calls) of files that
    ``fastlinear calibrate --rows`` and ``fastlinear bench --out`` wrote. Of the experiments' rows
    those without gradients count, of single layers, chains and groups."""
    header: Row = {}
    pieces: list[Row] = []
    whole: list[Row] = []
    for path in paths:
        with opened(path, "r") as file:
            for row in map(json.loads, file):
                if "contender" in row:
                    whole += _of_experiment(row)
                elif "traits" in row:
                    header = row
                elif "us" in row:
                    pieces.append(row)
                else:
                    whole.append(row if "ways" in row else {**row, "ways": list(_ways(row))})
    if not header:
        raise InputError(
            "benchmarks prices",
            "a line that says what the device is",
            ", ".join(map(str, paths)),
            "A file of `fastlinear calibrate --rows` begins with one.",
        )
    return header, pieces, whole


def _ways(row: Row) -> Iterator[Row]:
    """The arms of a drawn row as ways of a call."""
    for name, arm in row["arms"].items():
        took = {"step": "eager"} if name == "eager" else arm["took"]
        if took and name != "compile":
            yield {"took": took, "us": arm["us"]}


def _of_experiment(row: Row) -> list[Row]:
    """A row of an experiment as a row of one way, where it is a call of one backend."""
    data = row["case"]
    name, one_layer = data["family"], data["dims"].get("L", 1) == 1
    took = _TOOK.fullmatch(row["contender"])
    if (
        row["metric"] != "wall"
        or not row.get("valid")
        or row.get("median_us") is None
        or data["direction"] != "forward"
        or name not in _PROBLEMS
        or took is None
        or (name == "linear_act" and not one_layer)
    ):
        return []
    backend = took[1] or "eager"
    if backend not in {b.name for b in family(name).candidates("forward")}:
        return []
    case = Case.from_json(data)
    way = {"took": {"forward": backend}, "us": row["median_us"]}
    return [{"problem": _PROBLEMS[name](case).to_json(), "ways": [way]}]


def build(paths: Iterable[Path], before: str = "") -> Prices:
    """The prices that rows tell.

    Args:
        before: the shipped device whose prices hold where the rows say nothing.
    """
    header, pieces, whole = read(paths)
    known = prices.of_device(before) if before else None
    with _chosen_as_on(header):
        parts, calls = list(calls_of_pieces(pieces)), list(calls_of_ways(whole))
    return from_calls(parts, calls, header["device"], known, header["traits"]["kind"])


@contextmanager
def _chosen_as_on(header: Row) -> Iterator[None]:
    """Calls have parts that another family chooses: by what it knows of the GPU measured."""
    told = header["traits"]
    if told["kind"] != "cuda":
        yield
        return
    chip = tuple(told["capability"])
    name, arch = header["device"], f"sm_{chip[0]}{chip[1]}"
    facts = device.DeviceFacts("cuda", name, name, chip, told["units"], arch, 0, 0)
    with ExitStack() as stack:
        for of, attribute, value in (
            (torch.cuda, "is_available", True),
            (torch.cuda, "current_device", 0),
            (torch.cuda, "get_device_capability", chip),
            (device, "_cuda_facts", facts),
        ):
            stack.enter_context(mock.patch.object(of, attribute, return_value=value))
        yield


def ship(name: str, paths: Iterable[Path], before: str = "") -> Path:
    """Write the prices of a device, and what it is, to where the package ships them."""
    paths = list(paths)
    found, (header, *_) = build(paths, before), read(paths)
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(
        json.dumps(
            replace(found, device=name).to_json("" if before == name else before),
            separators=(",", ":"),
        )
        + "\n"
    )
    index = FOLDER / "devices.json"
    known = json.loads(index.read_text()) if index.exists() else {}
    known[name] = header["traits"]
    index.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n")
    return path
