"""One family in a process of its own: ``python -m benchmarks.suite.child TASK.json ROW.json``."""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
import warnings
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.suite.family import Family
from benchmarks.suite.measure import Clock, How, Row, blank, dated, finite, measure, told
from benchmarks.suite.registry import FAMILIES

FAILED = "failed"


def main(arguments: list[str]) -> int:
    """Measure the task's family and write its row; an error becomes the row."""
    task = json.loads(Path(arguments[0]).read_text())
    how = How(**task["how"] | {"skip": tuple(task["how"]["skip"])})
    if task["threads"]:
        torch.set_num_threads(task["threads"])
    if torch.device(how.device).type == "cuda":
        torch.cuda.set_device(how.device)  # where graphs and streams are made
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    row = row_of(FAMILIES[task["family"]], how)
    out = Path(arguments[1])
    partial = out.with_suffix(".partial")
    partial.write_text(json.dumps(finite(row), allow_nan=False))
    os.replace(partial, out)
    return 0


def task_of(family: Family, how: How, threads: int | None) -> str:
    """What ``main`` reads."""
    return json.dumps({"family": family.name, "how": asdict(how), "threads": threads})


def row_of(family: Family, how: How) -> Row:
    """The family's row; one with the error where anything raises."""
    clock = Clock()
    try:
        return measure(family, how, clock)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is a result
        said = {
            "stage": clock.stage,
            "message": told(error),
            "traceback": traceback.format_exception(error)[-6:],
        }
        row = blank(family, how) | {"status": FAILED, "error": said, "seconds": clock.seconds}
        return dated(row, torch.device(how.device))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
