"""What reaches the terminal: results on stdout; progress, notes and errors on stderr."""

from __future__ import annotations

import json
import uuid
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from fastlinear.core import text_table
from fastlinear.core.errors import CacheWarning, InputError
from fastlinear.core.plain_text import one_line, plain
from fastlinear.core.progress import Progress as Callback
from fastlinear.core.progress import silent


def show_error(message: str, hint: str = "") -> None:
    """One error on stderr, without a traceback."""
    text = Text.assemble(
        ("error: ", "bold red"), plain(message), (f" {hint}" if hint else "", "dim")
    )
    Console(stderr=True).print(text, soft_wrap=True)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Inside it what the cache warns of is one line on stderr, without a place in the source."""
    before = warnings.showwarning

    def show(message: Any, category: Any, *rest: Any, **named: Any) -> None:
        if issubclass(category, CacheWarning):
            text = Text.assemble(("warning: ", "bold yellow"), plain(str(message)))
            Console(stderr=True).print(text, soft_wrap=True)
        else:
            before(message, category, *rest, **named)

    with warnings.catch_warnings():
        warnings.simplefilter("always", CacheWarning)
        warnings.showwarning = show  # type: ignore[assignment]
        yield


def say(text: str) -> None:
    """Lines of a result on stdout."""
    typer.echo(plain(text))


def note(message: str, *, quiet: bool = False) -> None:
    """One line on stderr about what was done."""
    if not quiet:
        Console(stderr=True).print(Text(plain(message), style="dim"), soft_wrap=True)


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
        # no thread that redraws now and then: it would take turns with what is being timed
        with Progress(*columns, console=console, transient=True, auto_refresh=False) as bars:
            tasks: dict[str, Any] = {}

            def report(stage: str, done: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(escape(one_line(stage)), total=total)
                bars.update(tasks[stage], completed=done, total=total, refresh=True)

            yield report


def _lines(console: Console) -> Callback:
    seen: set[str] = set()

    def report(stage: str, done: int, total: int) -> None:
        if stage not in seen:
            seen.add(stage)
            console.print(Text(f"- {one_line(stage)}", style="dim"), soft_wrap=True)

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


def width() -> int:
    """Columns of the terminal on stdout; a pipe has none, and its lines are kept whole."""
    console = Console()
    return console.width if console.is_terminal else text_table.PIPE_WIDTH


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout, nothing without rows. Columns named ``>…`` are right-aligned."""
    if not rows:
        return
    console = Console(width=width())
    if title:
        console.print(Text(one_line(title), style="bold"), soft_wrap=True)
    console.print(text_table.table(columns, rows, width=console.width))
    console.print()


def check_writable(option: str, path: Path | None, *, through_another: bool = False) -> None:
    """Raise InputError, before any work is done, unless a file can be written at ``path``.

    Makes the folder it is to lie in, opens a file there and leaves none behind.
    ``through_another``: it will be written beside its place and then renamed.
    """
    if path is None:
        return
    why = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.is_dir():
            why = "it is a folder"
        else:
            _try_to_write(path)
            if through_another:
                _try_to_write(path.with_name(f".{path.name}.{uuid.uuid4().hex}"))
    except FileExistsError as error:
        why = f"{error.filename} is no folder"
    except OSError as error:
        why = error.strerror
    if why is not None:
        raise InputError(
            option,
            "a file that can be written",
            f"{path}: {why}",
            "Choose another place.",
        )


def _try_to_write(path: Path) -> None:
    """Open a file for writing and leave it as it was. Pipes and devices are not touched."""
    new = not path.exists()
    if not new and not path.is_file():
        return
    with path.open("ab"):
        pass
    if new:
        path.resolve().unlink()  # what a link points to


def write_page(path: Path, data: dict[str, Any], *, quiet: bool) -> None:
    """Render a result as a self-contained page, into a file ``check_writable`` has passed."""
    from fastlinear.report import page

    path.write_text(page(data), encoding="utf-8")
    note(f"report written to {path}", quiet=quiet)
