"""``python -m benchmarks``: prices shipped for a device, and what there is to gain on a CPU."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.collect import collect
from benchmarks.experiments.overhead.headroom import markdown
from benchmarks.harness.rows import read_rows
from benchmarks.prices import ship
from fastlinear.calibration.drawn import FAMILIES
from fastlinear.core.errors import FastlinearError, InputError


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print a short account; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gain = commands.add_parser("headroom", help="what rows of overhead leave to gain on a CPU")
    gain.add_argument("--rows", type=Path)
    prices = commands.add_parser("prices", help="write the prices shipped for a device")
    prices.add_argument("name", help="of the device's file")
    prices.add_argument("rows", type=Path, nargs="+", help="rows measured there")
    prices.add_argument("--before", default="", help="whose prices hold where rows say nothing")
    rows = commands.add_parser("collect", help="measure rows for a GPU's prices")
    rows.add_argument("--out", type=Path, required=True)
    rows.add_argument("--seed", type=int, default=0)
    rows.add_argument("--seconds", type=float, default=300.0)
    rows.add_argument("--jobs", type=int, default=8, help="processes, which compile side by side")
    rows.add_argument("--family", action="append", choices=FAMILIES)
    rows.add_argument("--backend", action="append", help="only calls that it can serve; repeatable")
    pieces = ("forward", "grad_pre", "grad_input", "grad_weight", "backward", "step")
    rows.add_argument(
        "--piece", action="append", choices=pieces, help="only this, no whole calls; repeatable"
    )
    given = parser.parse_args(arguments)
    try:
        if given.command == "prices":
            print(ship(given.name, given.rows, given.before))
            return 0
        if given.command == "collect":
            wanted = given.family or FAMILIES
            how = given.seed, given.seconds, given.jobs, given.out
            counts = collect(wanted, *how, given.backend or (), given.piece or ())
            print(f"{counts[0]} rows of pieces, {counts[1]} of whole calls: {given.out}")
            return 0
        return _headroom(given)
    except FastlinearError as error:
        print(error, file=sys.stderr)
        return error.exit_code


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


if __name__ == "__main__":
    sys.exit(main())
