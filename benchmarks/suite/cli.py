"""``fastlinear bench models --suite``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import (
    check_writable,
    note,
    print_json,
    progress_bar,
    say,
    table,
)
from fastlinear.core.errors import InputError

_COMPILING = ("compile", "compile_reduce_overhead", "compile_max_autotune", "fastlinear_asked")


def asked(arguments: Sequence[str]) -> bool:
    """Whether a command line of ``bench`` asks for the suite."""
    return "models" in arguments and "--suite" in arguments


def suite(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only families whose name contains this; repeatable."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="Only families of this kind (language, fields, ...); repeatable."),
    ] = None,
    device: opt.Place = "cpu",
    mode: Annotated[
        list[opt.Mode] | None,
        typer.Option(help="Without gradients, or forward and backward; both if not given."),
    ] = None,
    dtype: Annotated[
        opt.Dtype | None, typer.Option(help="By default float32 on a CPU, bfloat16 on a GPU.")
    ] = None,
    skip: Annotated[
        list[str] | None,
        typer.Option(help=f"Leave a contender out: {', '.join(_COMPILING)}; repeatable."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(min=0.1, help="Of each family, for tuning and comparing.")
    ] = 8.0,
    rounds: Annotated[int, typer.Option(min=5, help="Interleaved rounds.")] = 15,
    threads: Annotated[
        int | None, typer.Option(min=1, help="torch's threads on a CPU.", show_default=False)
    ] = None,
    limit: Annotated[
        float, typer.Option(min=1, help="Seconds after which a family's process is ended.")
    ] = 300.0,
    budget: Annotated[
        float | None,
        typer.Option(
            min=0, help="Start no new family after this many seconds.", show_default=False
        ),
    ] = None,
    seed: opt.Seed = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Write the rows, one JSON object a line; a run that was cut goes on there.",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Name the families and measure nothing.")
    ] = False,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Optimize small models of the field's families, verify them, and time them beside peers.

    Each family runs in a process of its own: one that crashes is a row with its error.

    Example: fastlinear bench models --suite --kind fields --mode train --out suite.jsonl
    """
    from benchmarks.harness.pick import command
    from benchmarks.suite.measure import How
    from benchmarks.suite.registry import picked
    from benchmarks.suite.run import left, run
    from fastlinear.cli.load import usable_device

    families = picked(only or (), kind or ())
    if listed:
        table("", ("family", "kind"), [(f.name, f.kind) for f in families])
        return
    unknown = sorted(set(skip or ()) - set(_COMPILING))
    if unknown:
        raise InputError(
            "bench models --suite",
            f"--skip in {', '.join(_COMPILING)}",
            ", ".join(unknown),
            "Eager mode and fastlinear always take part.",
        )
    place = usable_device(device)
    check_writable("--out", out)
    names = [m.value for m in mode or list(opt.Mode)]
    number = dtype.value if dtype else "bfloat16" if place.type == "cuda" else "float32"
    told: dict[str, Any] = {"suite": True, "only": only, "kind": kind, "mode": names}
    told |= {"dtype": [number], "skip": skip, "seconds": seconds, "rounds": rounds}
    told |= {"threads": threads, "seed": seed}
    common: dict[str, Any] = {"device": str(place), "dtype": number, "seed": seed}
    common |= {"seconds": seconds, "rounds": rounds, "skip": tuple(skip or ())}
    common["command"] = command("models", place, told)
    tasks = [(family, How(mode=name, **common)) for family in families for name in names]
    with progress_bar(quiet=quiet) as progress:
        how: dict[str, Any] = {"budget_s": budget, "limit_s": limit, "threads": threads}
        rows = run(tasks, out=out, progress=progress, **how)
    if not rows:
        raise InputError(
            "bench models --suite", "a family within the budget", "none", "Give more --budget."
        )
    if missing := left(tasks, rows):
        text = f"{len(missing)} not begun within the budget, from {missing[0]} on"
        note(text, quiet=quiet)
    if out is not None:
        note(f"rows written to {out}", quiet=quiet)
    if json:
        print_json({"kind": "suite", "rows": rows})
    elif not quiet:
        show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Rows as tables on stdout, with what they say together."""
    from benchmarks.suite import summary

    table("model families", summary.COLUMNS, summary.lines(rows))
    table("speed by kind", summary.KIND_COLUMNS, summary.by_kind(rows))
    for line in summary.notes(rows):
        say(line)
