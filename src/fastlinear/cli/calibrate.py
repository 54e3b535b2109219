"""``fastlinear calibrate``."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import check_writable, note, print_json, progress_bar, say

if TYPE_CHECKING:
    from fastlinear.calibration.calibrate import Calibrated


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("calibrate", rich_help_panel="Ops")(calibrate)


def calibrate(
    device: opt.Place = "cpu",
    seconds: Annotated[float, typer.Option(min=1, help="How long to measure.")] = 10.0,
    seed: Annotated[int, typer.Option(help="Draws the calls that are measured.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="torch's threads on a CPU.", show_default=False)
    ] = None,
    rows: Annotated[
        Path | None,
        typer.Option(metavar="FILE.jsonl", help="Write what was measured as well."),
    ] = None,
    json: opt.Json = False,
    quiet: opt.Quiet = False,
    debug: opt.Debug = False,
) -> None:
    """Measure what work costs on this machine, so that choices are predicted from its own prices.

    Calls drawn at random are measured for some seconds, on a machine that is otherwise idle. The
    prices that explain their times are kept in the user's cache; `fastlinear cache clear` removes
    them. Until then choices stand on the prices shipped for the device most like this one.

    Example: fastlinear calibrate --seconds 30
    """
    import torch

    from fastlinear.calibration.calibrate import calibrate as run
    from fastlinear.cli.load import usable_device

    place = usable_device(device)
    check_writable("--rows", rows)
    if threads is not None:
        torch.set_num_threads(threads)
    with progress_bar(quiet=quiet) as progress:
        found = run(place, seconds=seconds, seed=seed, rows=rows, progress=progress)
    if json:
        print_json(
            {
                "kind": "calibration",
                "device": found.prices.device,
                "calls": found.calls,
                "off_before": found.off_before,
                "off_after": found.off_after,
                "path": str(found.path),
            }
        )
    elif not quiet:
        say(f"{found.calls} calls measured; the median prediction is off by {_off(found)}")
    note(f"prices written to {found.path}", quiet=quiet or json)


def _off(found: Calibrated) -> str:
    before, after = (100 * math.expm1(off) for off in (found.off_before, found.off_after))
    told = "" if math.isnan(before) else f" (by {before:.0f}% with the shipped prices)"
    return f"{after:.0f}%{told}"
