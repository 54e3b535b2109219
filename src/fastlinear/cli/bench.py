"""``fastlinear bench``: hands its arguments to the package ``benchmarks`` of a checkout.

The product imports that package here only, and only when the command runs.
"""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import typer

import fastlinear
from fastlinear.core.errors import UnsupportedError

_PACKAGE = "benchmarks"
_MARK = 'BENCHMARKS_OF = "fastlinear"'


def register(app: typer.Typer) -> None:
    """Add the command."""
    unread = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
    app.command("bench", rich_help_panel="Ops", context_settings=unread)(bench)


def bench(context: typer.Context) -> None:
    """Measure an experiment on this machine, every peer beside ours, losses included.

    Needs a checkout of fastlinear: its package `benchmarks` is in no wheel.
    """
    root = _root()
    if root is None:
        raise UnsupportedError(
            "bench",
            f"the package {_PACKAGE}, which a checkout of fastlinear holds and a wheel does not",
            "neither a checkout around this installation nor one in the current folder",
            "Clone the repository with git, and run `fastlinear bench` in the clone's folder.",
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    cli: Any = importlib.import_module(f"{_PACKAGE}.cli")
    command, arguments = cli.command(context.args)
    with command.make_context(context.info_name, arguments, parent=context.parent) as own:
        command.invoke(own)


def _root() -> Path | None:
    """The folder that holds our ``benchmarks``: this checkout, else the current folder or one on
    the path. A package of that name without our mark is passed over."""
    checkout = Path(fastlinear.__file__).parents[2]
    folders = dict.fromkeys((checkout, Path.cwd(), *map(Path, sys.path)))
    return next((folder for folder in folders if _is_ours(folder / _PACKAGE)), None)


def _is_ours(package: Path) -> bool:
    try:
        return _MARK in (package / "__init__.py").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
