"""``fastlinear bench``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.drawn.cli import drawn as draw
from benchmarks.suite.cli import asked as asks_for_suite
from benchmarks.suite.cli import suite
from fastlinear.cli import options as opt
from fastlinear.cli.console import (
    check_writable,
    note,
    print_json,
    progress_bar,
    say,
    table,
    width,
)
from fastlinear.core.errors import InputError

_PLOTS = (".png", ".svg")


def command(arguments: Sequence[str]) -> tuple[Any, list[str]]:
    """The command line as the library below typer has it, and the arguments for it."""
    app = typer.Typer(rich_markup_mode="markdown", add_completion=False)
    given = list(arguments)
    if given[:1] == ["drawn"]:
        given = given[1:]
        app.command("bench drawn")(draw)
    elif asks_for_suite(given):
        given.remove("models")
        given.remove("--suite")
        app.command("bench models --suite")(suite)
    else:
        app.command("bench")(bench)
    return typer.main.get_command(app), given


def bench(
    experiment: Annotated[
        str,
        typer.Argument(
            help="linear, linear-bias, linear-modules, pseudo-linear, overhead, mlps, strassen, "
            "graphed, groups, ragged, unequal, gated-mlp, models; drawn and models --suite have a "
            "help of their own."
        ),
    ] = "linear",
    device: opt.Place = "cpu",
    dtype: Annotated[
        list[opt.Dtype] | None, typer.Option(help="Only these dtypes; repeatable.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="torch's threads on a CPU.", show_default=False)
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer shapes and rounds, for a first look.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="Only cases whose name contains this.", show_default=False)
    ] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUES",
            help="Only cases of these sizes or options: M=8192, or L=8,4; repeatable.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="Only this contender, however long it takes to prepare; repeatable.",
        ),
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave a contender out.")] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Tune fastlinear for every case first.")
    ] = False,
    rounds: Annotated[
        int | None, typer.Option(min=5, help="Interleaved rounds.", show_default=False)
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Start no new case after this many seconds.", show_default=False),
    ] = None,
    seed: opt.Seed = 0,
    jobs: Annotated[
        int,
        typer.Option(min=1, help="Processes that compile ahead for the contenders that compile."),
    ] = 1,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Go on with a run that was cut: keep the rows of its finished cases.",
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write the raw rows, one JSON object a line."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the rows as PNG or SVG (needs the extra [plots])."),
    ] = None,
    json: opt.Json = False,
    html: opt.Html = None,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Measure an experiment on this machine, every peer beside ours, losses included.

    Example: fastlinear bench linear --quick --out rows.jsonl --plot rows.svg
    """
    from benchmarks.harness.run import run
    from fastlinear.cli.load import usable_device

    place = str(usable_device(device))
    for option, path in (("--out", out), ("--plot", plot), ("--html", html)):
        check_writable(option, path)
    if out is None:
        check_writable("--resume", resume)
    if plot is not None and plot.suffix.lower() not in _PLOTS:
        raise InputError(
            "--plot",
            f"a file ending in {' or '.join(_PLOTS)}",
            str(plot),
            "The ending chooses the format.",
        )
    with progress_bar(quiet=quiet) as progress:
        rows = run(
            experiment,
            device=place,
            quick=quick,
            out=out,
            dtypes=None if not dtype else [d.value for d in dtype],
            threads=threads,
            only=only,
            where=where or (),
            peers=peer or None,
            skip=skip or (),
            tune=tune,
            rounds=rounds,
            budget_s=budget,
            seed=seed,
            jobs=jobs,
            resume=resume,
            progress=progress,
        )
    if html is not None:
        from benchmarks.harness.page import page

        html.write_text(page(rows), encoding="utf-8")
        note(f"report written to {html}", quiet=quiet)
    if json:
        print_json({"kind": "bench", "rows": rows})
    elif not quiet:
        _show(rows)
    if plot is not None:  # last: where it cannot be drawn, the rows are not lost
        from benchmarks.harness.plot import plot as draw

        draw(rows, plot)
        note(f"plot written to {plot}", quiet=quiet)


def _show(rows: list[dict[str, Any]]) -> None:
    from benchmarks.experiments.overhead.heat import print_heat
    from benchmarks.experiments.pseudo_linear import table as pseudo_table
    from benchmarks.harness.text import COLUMNS, LEGEND, left_out, tables

    if rows[0]["experiment"] == pseudo_table.EXPERIMENT:
        say(pseudo_table.table(rows, width()).rstrip("\n"))
        _show_late(rows)
        return
    based = any(r["contender"] == "eager" and r["median_us"] is not None for r in rows)
    if rows[0]["experiment"] == "overhead" and based:
        print_heat(rows)
        reasons = dict.fromkeys((r["contender"], r["skipped"]) for r in rows if r["skipped"])
        table("not measured", ("contender", "why"), list(reasons))
        _show_late(rows)
        return
    for title, lines in tables(rows):
        table(title, COLUMNS, lines)
    say(f"{LEGEND}\n")
    table("left out", ("contender", "why", ">measurements"), left_out(rows))
    _show_late(rows)


def _show_late(rows: list[dict[str, Any]]) -> None:
    from benchmarks.harness.above import notes_above
    from benchmarks.harness.notes import notes_behind

    asked = {(r["contender"], "; ".join(r["terms"])) for r in rows if r.get("terms")}
    table("on terms of their own", ("contender", "terms"), sorted(asked))
    for line in (*notes_behind(rows), *notes_above(rows)):
        say(line)
