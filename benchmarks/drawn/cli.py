"""``fastlinear bench drawn``."""

from __future__ import annotations

import json as json_text
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from fastlinear.calibration.drawn import FAMILIES
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

Family = StrEnum("Family", {name: name for name in FAMILIES})  # type: ignore[misc]


def drawn(
    family: Annotated[
        list[Family] | None, typer.Option(help="Only these families; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the cases and their tensors.")] = 0,
    count: Annotated[int, typer.Option(min=1, help="Cases of each family.")] = 20,
    device: opt.Place = "cpu",
    mode: Annotated[
        list[opt.Mode] | None,
        typer.Option(help="Without gradients, or forward and backward; both if not given."),
    ] = None,
    dtype: Annotated[
        list[opt.Dtype] | None, typer.Option(help="Only these dtypes; repeatable.")
    ] = None,
    skip: Annotated[
        list[str] | None, typer.Option(help="Leave a peer out: compile takes long to prepare.")
    ] = None,
    batch_invariant: Annotated[
        bool,
        typer.Option(
            "--batch-invariant", help="Time calls whose rows do not depend on each other, too."
        ),
    ] = False,
    rounds: Annotated[int, typer.Option(min=5, help="Interleaved rounds.")] = 9,
    budget: Annotated[
        float | None,
        typer.Option(min=0, help="Start no new case after this many seconds.", show_default=False),
    ] = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=1, help="Processes that prepare cases side by side; each GPU times one at a time."
        ),
    ] = 1,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write the raw rows, one JSON object a line."),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Measure cases that nobody picked: drawn at random from what users have.

    Every backend that can serve a case, and PyTorch's own ways, are verified and timed interleaved.

    Example: fastlinear bench drawn --family linear_act --seed 7 --count 50 --out rows.jsonl
    """
    import torch

    from benchmarks.drawn.measure import measured
    from benchmarks.harness.rows import opened
    from fastlinear.calibration.drawn import cases
    from fastlinear.cli.load import usable_device
    from fastlinear.core.environment import environment

    place = torch.device(usable_device(device))
    check_writable("--out", out)
    if jobs > 1 and place.type == "cpu":
        raise InputError(
            "bench drawn", "--jobs 1 on a CPU", str(jobs), "Cases would disturb each other there."
        )
    names = [f.value for f in family or list(Family)]
    modes = [m.value for m in mode or list(opt.Mode)]
    dtypes = [d.value for d in dtype or ()]
    kinds = [cases(name, seed, count, place.type, m, dtypes) for name in names for m in modes]
    picked = [case for turn in zip(*kinds, strict=True) for case in turn]  # a cut run has all kinds
    env = environment(place)
    rows: list[dict[str, Any]] = []
    unmeasured: list[tuple[str, str]] = []
    if out is not None:
        opened(out, "w").close()
    with progress_bar(quiet=quiet) as progress:
        how: dict[str, Any] = {"skip": skip or (), "rounds": rounds, "invariant": batch_invariant}
        how["jobs"] = jobs
        found = measured(picked, place, env=env, most_seconds=budget, **how)
        for done, (case, row, why) in enumerate(found, 1):
            if row is None:
                unmeasured.append((case.problem.describe(), why))
            else:
                rows.append(row)
                if out is not None:  # at once: a run that is cut keeps what it has
                    with opened(out, "a") as file:
                        file.write(json_text.dumps(row, allow_nan=False) + "\n")
            progress("measuring", done, len(picked))
    if not rows:
        raise InputError(
            "bench drawn",
            "a case that can be measured",
            unmeasured[0][1] if unmeasured else "none within the budget",
            "Give more --budget, or other filters.",
        )
    if out is not None:
        note(f"rows written to {out}", quiet=quiet)
    if json:
        print_json({"kind": "drawn", "rows": rows})
    elif not quiet:
        _show(rows)
        table("not measured", ("case", "why"), unmeasured)


def _show(rows: list[dict[str, Any]]) -> None:
    from benchmarks.drawn import report
    from fastlinear.core.problem import Problem

    wrong = [(row, why) for row in rows if (why := report.wrong(row)) is not None]
    told = [(Problem.from_json(row["problem"]).describe(), why) for row, why in wrong]
    table("less accurate than allowed, not timed", ("case", "why"), told)
    rows = [row for row in rows if report.wrong(row) is None]
    if not rows:
        return
    groups: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        mode = "training" if row["problem"]["needs_grad"] else "inference"
        groups.setdefault(f"{row['family']}, {mode}", []).append(row)
    table("drawn cases", report.SUMMARY, [report.account(n, some) for n, some in groups.items()])
    say(report.LEGEND)
    lines = [report.invariant(n, some) for n, some in groups.items()]
    if costs := [line for line in lines if line is not None]:
        table("what batch-invariant calls cost", report.INVARIANT, costs)
    worst = report.worst(rows)
    table("the cases that lose most", report.COLUMNS, report.lines(worst))
    for o in worst:
        say(o.problem.describe())
        for line in o.explain:
            say(f"  {line}")
    table("time over the best peer's", ("ratio", ">cases", ""), report.histogram(rows))
