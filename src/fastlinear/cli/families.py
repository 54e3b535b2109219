"""The options of ``fastlinear explain`` and ``fastlinear tune`` that ops declare for themselves."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from copy import copy
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from typer.core import TyperCommand
from typer.main import get_command

from fastlinear.dispatch.backend import family, names

if TYPE_CHECKING:
    from fastlinear.op.command import Command, Option

DEFAULT = "linear_act"
_SHOWN, _GIVEN = "ops whose options are shown", "options of ops"


def command_of(op: str) -> Command | None:
    """How options describe the calls of an op; None of one that declares none."""
    return cast("Command | None", family(op).load_command() if op in names() else None)


def options_of(ops: Iterable[str]) -> dict[str, dict[str, Option]]:
    """Flag of an option → op → the option, of those ops that have it."""
    found: dict[str, dict[str, Option]] = {}
    for op in ops:
        command = command_of(op)
        for option in () if command is None else command.options:
            found.setdefault(option.flag, {})[op] = option
    return found


def given_of(ctx: typer.Context) -> dict[str, Any]:
    """The options of ops on this command line, by flag."""
    return dict(ctx.meta[_GIVEN])


class FamilyCommand(TyperCommand):
    """A command whose options are also those of the op it names.

    No other op is imported, unless its options are to be shown or one of them was given.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse with the options of the op; their values are left to ``given_of``."""
        words = {a.partition("=")[0] for a in args}
        helped = words & set(ctx.help_option_names)
        named = [op for op in names() if words & {op, op.replace("_", "-")}]
        shown = named or ([] if helped else [DEFAULT])
        own = [*self.params, *_parameters(shown)]
        known = {*helped, *(flag for p in own for flag in (*p.opts, *p.secondary_opts))}
        if any(word.startswith("--") and word not in known for word in words):
            shown = []
        ctx.meta[_SHOWN] = shown or names()
        rest = super().parse_args(ctx, args)
        given = {p.opts[0]: ctx.params.pop(p.name, None) for p in _parameters(ctx.meta[_SHOWN])}
        ctx.meta[_GIVEN] = {flag: value for flag, value in given.items() if value is not None}
        return rest

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters of the command, before them those of the op or of all."""
        shown = ctx.meta.get(_SHOWN, names())
        return [*_parameters(shown), *(_told(p, shown) for p in super().get_params(ctx))]


def _told(parameter: Any, ops: Iterable[str]) -> Any:
    """The parameter; that which names the op says what the ops are."""
    if parameter.name != "family":
        return parameter
    commands = {op: command_of(op) for op in ops}
    abouts = (f"{op} ({c.about})" for op, c in commands.items() if c is not None)
    told = copy(parameter)
    told.help = f"The op: {', '.join(abouts)}. After its name, --help shows its options alone."
    return told


def _parameters(ops: Iterable[str]) -> list[Any]:
    """The ops' options as parameters of a command; those that several share once."""

    def stub(**_: Any) -> None:
        """Its signature says what there is."""

    keyword = inspect.Parameter.KEYWORD_ONLY
    shown = []
    for by_op in options_of(ops).values():
        name = next(iter(by_op.values())).name
        annotation = _annotated(by_op)
        shown.append(inspect.Parameter(name, keyword, default=None, annotation=annotation))
    stub.__signature__ = inspect.Signature(shown)  # type: ignore[attr-defined]
    stub.__annotations__ = {p.name: p.annotation for p in shown}
    app = typer.Typer(add_completion=False)
    app.command()(stub)
    return list(get_command(app).params)


def _annotated(by_op: dict[str, Option]) -> Any:
    helps: dict[str, list[str]] = {}
    for op, option in by_op.items():
        helps.setdefault(option.help, []).append(op)
    text = " ".join(f"{', '.join(ops)}: {help_}" for help_, ops in helps.items())
    option = next(iter(by_op.values()))
    declared = typer.Option(
        option.flag,
        min=1 if option.kind is int else None,
        metavar=option.metavar,
        help=text if len(helps) > 1 else option.help,
        show_default=False,
        rich_help_panel=", ".join(by_op),
    )
    return Annotated[option.kind | None, declared]
