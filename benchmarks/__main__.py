"""``python -m benchmarks``: the table shipped for a device, and what there is to gain on a CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.experiments.overhead.headroom import markdown
from benchmarks.harness.rows import read_rows
from benchmarks.prices import ship
from benchmarks.tables.build import build_table, read_table, table_path, with_rows, write_table
from benchmarks.tables.grid import table_problems
from fastlinear.core.errors import FastlinearError, InputError


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print a short account; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    table = commands.add_parser("table", help="measure and write a shipped table")
    table.add_argument("--device", default="cpu")
    table.add_argument("--out", type=Path, help="the table's JSON")
    table.add_argument("--budget", type=float, default=120.0, help="seconds to start Problems in")
    table.add_argument("--only", default="", help="only Problems whose name contains this text")
    table.add_argument("--fresh", action="store_true", help="measure known rows again")
    table.add_argument(
        "--rows", type=Path, help="measure nothing: take rows of overhead into the table --out"
    )
    gain = commands.add_parser("headroom", help="what rows of overhead leave to gain on a CPU")
    gain.add_argument("--rows", type=Path)
    prices = commands.add_parser("prices", help="write the prices shipped for a device")
    prices.add_argument("name", help="of the device's file")
    prices.add_argument("rows", type=Path, nargs="+", help="rows measured there")
    prices.add_argument("--before", default="", help="whose prices hold where rows say nothing")
    given = parser.parse_args(arguments)
    try:
        if given.command == "prices":
            print(ship(given.name, given.rows, given.before))
            return 0
        return _table(given) if given.command == "table" else _headroom(given)
    except FastlinearError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _table(given: argparse.Namespace) -> int:
    if given.rows is not None:
        return _table_from_rows(given)
    path = given.out or table_path(given.device)
    kept = None if given.fresh else read_table(path)
    kind = given.device.partition(":")[0]
    wanted = [p for p in table_problems(kind) if given.only in p.describe()]
    data = build_table(wanted, given.device, budget_s=given.budget, extend=kept, progress=_say)
    write_table(data, path)
    print(
        f"{len(data['rows'])} rows, {len(data['failures'])} failures, "
        f"{data['left']} Problems not reached: {path}"
    )
    return 0


def _headroom(given: argparse.Namespace) -> int:
    if given.rows is None:
        raise InputError(
            "bench headroom",
            "a file of rows as --rows",
            "none",
            "For example --rows results/intel-xeon-processor/overhead.jsonl.gz.",
        )
    print(markdown(read_rows(given.rows)))
    return 0


def _table_from_rows(given: argparse.Namespace) -> int:
    known = None if given.out is None else read_table(given.out)
    if known is None:
        raise InputError(
            "bench table --rows",
            "an existing table as --out",
            str(given.out),
            "Name the table that the rows are to extend.",
        )
    data = with_rows(known, read_rows(given.rows))
    write_table(data, given.out)
    print(f"{len(data['rows'])} rows: {given.out}")
    return 0


def _say(stage: str, done: int, total: int) -> None:
    print(f"[{done}/{total}] {stage}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
