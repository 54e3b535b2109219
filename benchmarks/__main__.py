"""``python -m benchmarks``: run an experiment, or build the table shipped for a device."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.experiments import EXPERIMENTS
from benchmarks.experiments.overhead.headroom import markdown
from benchmarks.harness.notes import notes_behind
from benchmarks.harness.plot import plot
from benchmarks.harness.rows import Row, read_rows
from benchmarks.harness.run import run
from benchmarks.tables.build import build_table, read_table, table_path, with_rows, write_table
from benchmarks.tables.grid import table_problems
from fastlinear.core.errors import FastlinearError, InputError


def main(arguments: list[str] | None = None) -> int:
    """Parse, run, print a short account; returns the exit code."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        other = {"table": _table, "headroom": _headroom}.get(given.experiment, _experiment)
        return other(given)
    except FastlinearError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("experiment", choices=[*EXPERIMENTS, "table", "headroom"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="rows as JSONL, or the table's JSON")
    parser.add_argument("--budget", type=float, help="start nothing new after these seconds")
    experiment = parser.add_argument_group("experiments")
    experiment.add_argument("--quick", action="store_true", help="fewer shapes and rounds")
    experiment.add_argument("--dtype", action="append", help="only this dtype; repeatable")
    experiment.add_argument(
        "--only", help="only cases whose name (for table: whose Problem) contains this text"
    )
    experiment.add_argument(
        "--where", action="append", default=[], help="only these sizes: M=8192 or L=8,4; repeatable"
    )
    experiment.add_argument("--peer", action="append", help="only this contender; repeatable")
    experiment.add_argument("--skip", action="append", default=[], help="a contender to leave out")
    experiment.add_argument("--tune", action="store_true", help="tune fastlinear for every case")
    experiment.add_argument("--threads", type=int)
    experiment.add_argument("--rounds", type=int)
    experiment.add_argument("--seed", type=int, default=0)
    experiment.add_argument("--jobs", type=int, default=1, help="processes that compile ahead")
    experiment.add_argument("--resume", type=Path, help="rows of a run that was cut, to go on with")
    experiment.add_argument("--plot", type=Path, help="PNG or SVG")
    table = parser.add_argument_group("table, headroom")
    table.add_argument("--fresh", action="store_true", help="measure known rows again")
    table.add_argument(
        "--rows",
        type=Path,
        help="measure nothing: take what rows of overhead say into the table named by --out; or "
        "print what there is to gain on a CPU by them",
    )
    return parser


def _experiment(given: argparse.Namespace) -> int:
    rows = run(
        given.experiment,
        device=given.device,
        quick=given.quick,
        out=given.out,
        dtypes=given.dtype,
        threads=given.threads,
        only=given.only,
        where=given.where,
        peers=given.peer,
        skip=given.skip,
        tune=given.tune,
        rounds=given.rounds,
        budget_s=given.budget,
        seed=given.seed,
        jobs=given.jobs,
        resume=given.resume,
        progress=_say,
    )
    for row in rows:
        print(_line(row))
    print(f"{len(rows)} rows")
    for line in notes_behind(rows):
        print(line)
    if given.plot is not None:
        print(f"plot: {plot(rows, given.plot)}")
    return 0


def _table(given: argparse.Namespace) -> int:
    if given.rows is not None:
        return _table_from_rows(given)
    path = given.out or table_path(given.device)
    kept = None if given.fresh else read_table(path)
    kind = given.device.partition(":")[0]
    budget = 120.0 if given.budget is None else given.budget
    wanted = [p for p in table_problems(kind) if (given.only or "") in p.describe()]
    data = build_table(wanted, given.device, budget_s=budget, extend=kept, progress=_say)
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


def _line(row: Row) -> str:
    head = f"{row['problem']} | {row['direction']} {row['metric']} | {row['contender']}: "
    if row["skipped"]:
        return head + f"skipped, {row['skipped']}"
    if not row["valid"]:
        return head + f"wrong, error {row['error']} against torch's {row['torch_error']}"
    if row["metric"] == "peak_memory":
        return head + f"{row['peak_bytes']} bytes"
    if row["metric"] == "kernels":
        return head + f"{len(row['kernels'])}: {', '.join(row['kernels'])}"
    text = head + f"{row['median_us']:.2f} us"
    if row["ratio_to_best"] is not None:
        text += f", {row['ratio_to_best']:.3f} of {row['best_peer']}"
    if row["roofline"] is not None:
        text += f", {100 * row['roofline']['fraction']:.1f}% of the {row['roofline']['bound']} roof"
    return text


if __name__ == "__main__":
    sys.exit(main())
