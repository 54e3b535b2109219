"""The application: its commands, and the one place where errors become exit codes."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from fastlinear.cli import bench, cache, doctor, explain, optimize, profile, tune
from fastlinear.cli.console import plain_warnings, show_error
from fastlinear.core.errors import FastlinearError

INTERRUPTED = 130


class ErrorGroup(TyperGroup):
    """A command group in which an error is one clear line and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command; errors end here unless ``--debug`` asks for the traceback."""
        try:
            with plain_warnings():
                return super().invoke(ctx)
        except KeyboardInterrupt:
            show_error("interrupted;", hint="what was tuned so far is remembered.")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as error:
            if ctx.meta.get("debug") or _is_control_flow(error):
                raise
            if isinstance(error, FastlinearError):
                show_error(str(error))
                raise typer.Exit(error.exit_code) from None
            show_error(f"{type(error).__name__}: {error}", hint="--debug shows the traceback.")
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
    5 unsupported environment · 130 interrupted.
    """


for _commands in (optimize, profile, bench, tune, explain, doctor, cache):
    _commands.register(app)


def main() -> None:
    """The console entry point."""
    app()
