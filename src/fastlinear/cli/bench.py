"""``fastlinear bench``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import note, print_json, progress_bar, table, write_page


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("bench", rich_help_panel="Ops")(bench)


def bench(
    experiment: Annotated[str, typer.Argument(help="Which experiment to run.")] = "linear",
    device: opt.Device = "cpu",
    dtype: Annotated[
        list[opt.Dtype] | None, typer.Option(help="Only these dtypes; repeatable.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="torch's threads on a CPU.", show_default=False)
    ] = None,
    quick: Annotated[bool, typer.Option(help="Fewer shapes and rounds, for a first look.")] = False,
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
    from fastlinear.bench import run
    from fastlinear.cli.load import usable_device

    where = str(usable_device(device))
    with progress_bar(quiet=quiet) as progress:
        rows = run(
            experiment,
            device=where,
            quick=quick,
            out=out,
            dtypes=None if not dtype else [d.value for d in dtype],
            threads=threads,
            progress=progress,
        )
    if plot is not None:
        from fastlinear.bench import plot as draw

        draw(rows, plot)
        note(f"plot written to {plot}", quiet=quiet)
    if html is not None:
        write_page(html, {"kind": "bench", "rows": rows}, quiet=quiet)
    if json:
        print_json({"kind": "bench", "rows": rows})
    elif not quiet:
        _show(rows)


def _show(rows: list[dict[str, Any]]) -> None:
    grid = []
    for row in rows:
        low, high = row["ci95_us"]
        roofline = row.get("roofline") or {}
        share = roofline.get("fraction")
        ratio = row.get("ratio_to_best")
        grid.append(
            (
                _problem(row["problem"]),
                f"{row['direction']}, {row['metric']}",
                row["contender"],
                f"{row['median_us']:.1f}",
                f"{low:.1f} - {high:.1f}",
                "-" if ratio is None else f"{ratio:.2f}",
                "-" if share is None else f"{100 * share:.0f}%",
            )
        )
    columns = ("problem", "what", "contender", ">us", ">95%", ">of the best", ">of the roofline")
    table("", columns, grid)


def _problem(problem: Any) -> str:
    if not isinstance(problem, dict):
        return str(problem)
    dims = problem.get("dims", {})
    options = problem.get("options", {})
    parts = [f"{k}={v}" for k, v in dims.items()] + [str(problem.get("dtype", ""))]
    parts += [str(v) for k, v in options.items() if k == "activation"]
    return " ".join(parts)
