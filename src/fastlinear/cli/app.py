"""The application: its commands, and the one place where errors become exit codes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fastlinear.cli import bench, cache, calibrate, doctor, explain, optimize, profile, tune
from fastlinear.cli.console import plain_warnings, show_error
from fastlinear.core.errors import FastlinearError, ModelLoadError

INTERRUPTED, TERMINATED = 130, 143


class Terminated(KeyboardInterrupt):
    """SIGTERM came: whatever is under way is left as if it had been interrupted."""


@contextmanager
def terminable() -> Iterator[None]:
    """Inside it SIGTERM raises Terminated, unless somebody else handles it already.

    A process forked meanwhile ends as it would have. Only a main thread can handle signals.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    owner = os.getpid()

    def stop(*_: object) -> None:
        if os.getpid() == owner:
            raise Terminated
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


class ErrorGroup(TyperGroup):
    """A command group in which an error is one clear line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors end here unless ``--debug`` asks for the traceback."""
        try:
            with terminable(), plain_warnings():
                return super().invoke(ctx)
        except Terminated:
            show_error("terminated;", hint="what was tuned so far is remembered.")
            raise typer.Exit(TERMINATED) from None
        except KeyboardInterrupt:
            show_error("interrupted;", hint="what was tuned so far is remembered.")
            raise typer.Exit(INTERRUPTED) from None
        except SystemExit as error:  # the commands themselves never exit so
            # rich exits so where what it prints to is closed, as by `| head`
            if ctx.meta.get("debug") or isinstance(error.__context__, BrokenPipeError):
                raise
            left = ModelLoadError(
                "fastlinear",
                "the code of the model to come to its end",
                f"SystemExit({error.code!r}) from it",
                "--debug shows where it was raised.",
            )
            show_error(str(left))
            raise typer.Exit(left.exit_code) from None
        except Exception as error:
            if ctx.meta.get("debug") or _is_control_flow(error):
                raise
            if isinstance(error, FastlinearError):
                show_error(str(error))
                raise typer.Exit(error.exit_code) from None
            said = f"{type(error).__name__}: {error}".rstrip(". ")
            show_error(f"{said}.", hint="--debug shows the traceback.")
            raise typer.Exit(1) from None


def _is_control_flow(error: Exception) -> bool:
    """Whether the command-line library itself handles this: exits, usage errors, closed pipes."""
    library = type(error).__module__.partition(".")[0]
    return library in ("typer", "click") or isinstance(error, BrokenPipeError)


app = typer.Typer(
    name="fastlinear",
    cls=ErrorGroup,
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        from fastlinear import __version__

        typer.echo(f"fastlinear {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Make the nn.Linear-shaped work of a PyTorch model faster, and prove it.

    A model is named as `package.module:factory`; the current folder is importable.
    **Naming a model imports and runs that code**, with your permissions. Plans and
    caches are JSON; nothing is ever unpickled.

    Exit codes: 0 done · 1 unforeseen · 2 bad input · 3 numerics failed · 4 nothing profitable ·
    5 unsupported environment · 130 interrupted ·
    143 terminated.
    """


for _commands in (optimize, profile, bench, tune, calibrate, explain, doctor, cache):
    _commands.register(app)


def main() -> None:
    """The console entry point."""
    app()
