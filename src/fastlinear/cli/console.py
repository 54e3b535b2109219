"""What reaches the terminal: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fastlinear.core.errors import InputError
from fastlinear.core.progress import Progress as Callback
from fastlinear.core.progress import silent


def show_error(message: str, hint: str = "") -> None:
    """One error on stderr, without a traceback."""
    text = Text.assemble(("error: ", "bold red"), message, (f" {hint}" if hint else "", "dim"))
    Console(stderr=True).print(text, soft_wrap=True)


def note(message: str, *, quiet: bool = False) -> None:
    """One line on stderr about what was done."""
    if not quiet:
        Console(stderr=True).print(Text(message, style="dim"), soft_wrap=True)


@contextmanager
def progress_bar(*, quiet: bool = False) -> Iterator[Callback]:
    """A callback for ``core.progress``: bars on a terminal, one line a stage elsewhere."""
    console = Console(stderr=True)
    if quiet:
        yield silent
    elif not console.is_terminal:
        yield _lines(console)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=console, transient=True) as bars:
            tasks: dict[str, Any] = {}

            def report(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                bars.update(tasks[stage], completed=done, total=total)

            yield report


def _lines(console: Console) -> Callback:
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            console.print(Text(f"- {stage}", style="dim"), soft_wrap=True)

    return report


def print_json(data: Any) -> None:
    """JSON on stdout and nothing else; NaN and infinities become null, as JSON has none."""
    typer.echo(json.dumps(strict(data), indent=2, sort_keys=False))


def strict(data: Any) -> Any:
    """The same data with floats JSON cannot express (NaN, infinities) replaced by None."""
    if isinstance(data, float):
        return data if data - data == 0 else None
    if isinstance(data, dict):
        return {str(key): strict(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [strict(value) for value in data]
    return data


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout. Columns whose name starts with ``>`` are right-aligned."""
    grid = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for name in columns:
        right = name.startswith(">")
        grid.add_column(name.lstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(str(cell)) for cell in row))
    console = Console()
    if not console.is_terminal:  # a pipe has no width; keep lines whole
        console = Console(width=160)
    console.print(grid)


def write_text(path: Path, text: str) -> None:
    """Write a file the user named; the error says which and why."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(
            "fastlinear",
            expected="a file that can be written",
            received=f"{path}: {error.strerror}",
            remedy="Choose another place.",
        ) from error


def write_page(path: Path, data: dict[str, Any], *, quiet: bool) -> None:
    """Render a result as a self-contained page."""
    from fastlinear.report import page

    write_text(path, page(data))
    note(f"report written to {path}", quiet=quiet)
