"""``fastlinear cache show | clear | path``."""

from __future__ import annotations

from typing import Any

import typer

from fastlinear.cli import options as opt
from fastlinear.cli.console import note, print_json, say, table

group = typer.Typer(
    no_args_is_help=True, help="Look at or remove what tuning and calibration remember."
)


def register(app: typer.Typer) -> None:
    """Add the command group."""
    app.add_typer(group, name="cache", rich_help_panel="This machine")


@group.command()
def path(device: opt.Place = "cpu", debug: opt.Debug = False) -> None:
    """Print the file that holds this device's tuned choices (it may not exist yet)."""
    from fastlinear.cli.load import usable_device
    from fastlinear.dispatch.cache import cache_path

    say(str(cache_path(str(usable_device(device)))))


@group.command()
def show(device: opt.Place = "cpu", json: opt.Json = False, debug: opt.Debug = False) -> None:
    """List the tuned choices of a device with their measured times."""
    from fastlinear.cli.load import usable_device
    from fastlinear.dispatch.cache import cache_path, entries

    where = str(usable_device(device))
    found: dict[str, Any] = entries(where)
    if json:
        print_json({"path": str(cache_path(where)), "entries": found})
        return
    if not found:
        say(f"nothing tuned yet: {cache_path(where)}")
        return
    rows = []
    for item in found.values():
        problem = item["problem"]
        times = sorted(item["times_us"].items(), key=lambda pair: pair[1])
        rows.append(
            (
                f"{problem['family']}.{problem['piece']}",
                _sizes(problem),
                problem["dtype"],
                problem["options"].get("activation", ""),
                "train" if problem["needs_grad"] else "",
                item["best"],
                ", ".join(f"{name} {us:.1f}" for name, us in times),
                item.get("doubt", ""),
            )
        )
    columns = ("op", "dims", "dtype", "activation", "for", "best", "us", "in doubt")
    table(str(cache_path(where)), columns, sorted(rows))


def _sizes(problem: dict[str, Any]) -> str:
    """M=64 K=1024 N=1024; for a chain of layers whose widths differ all of these, n_0 first."""
    dims, widths = dict(problem["dims"]), problem["options"].get("widths", "equal")
    if widths != "equal":
        return f"M={dims['M']} {widths}"
    rows = {"M": dims.pop("M")} if "M" in dims else {}
    return " ".join(f"{k}={v}" for k, v in (rows | dims).items())


@group.command()
def clear(device: opt.Place = "cpu", debug: opt.Debug = False) -> None:
    """Forget the tuned choices of a device, and the prices that `calibrate` measured."""
    from fastlinear.cli.load import usable_device
    from fastlinear.dispatch import prices
    from fastlinear.dispatch.cache import cache_path
    from fastlinear.dispatch.cache import clear as clear_cache

    where = str(usable_device(device))
    measured = prices.remove(where)
    count = clear_cache(where)
    note(f"{count} {'entry' if count == 1 else 'entries'} removed from {cache_path(where)}")
    if measured is not None:
        note(f"{measured} removed")
