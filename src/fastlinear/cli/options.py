"""The options that several commands share, each said once."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from fastlinear.core.errors import InputError


class Mode(StrEnum):
    """What is measured: the forward alone, or forward and backward."""

    inference = "inference"
    train = "train"


class Dtype(StrEnum):
    """The dtypes every family accepts."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"
    float64 = "float64"


def _remember_debug(ctx: typer.Context, value: bool) -> bool:
    ctx.meta["debug"] = value
    return value


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:factory, a callable without arguments that returns the nn.Module "
        "(or the module itself). This imports and runs that code.",
        show_default=False,
    ),
]
Inputs = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="PKG:FACTORY",
        help="The model's inputs: a tensor, a tuple of positional arguments, a dict of keyword "
        "arguments or a pair of both (args, kwargs), or a callable returning one of these. "
        "Default: the model factory's `example_inputs`.",
        show_default=False,
    ),
]
Loss = Annotated[
    str | None,
    typer.Option(
        "--loss",
        metavar="PKG:FUNCTION",
        help="Train mode: a function from the model's output to a scalar. "
        "Default: output.loss, or the mean square of the outputs.",
        show_default=False,
    ),
]
Device = Annotated[
    str, typer.Option("--device", help="cpu, cuda or cuda:INDEX; the model is moved there.")
]
Place = Annotated[str, typer.Option("--device", help="cpu, cuda or cuda:INDEX.")]
ModeOption = Annotated[
    Mode, typer.Option("--mode", help="inference: forward only. train: forward and backward.")
]
DtypeOption = Annotated[
    Dtype | None,
    typer.Option(
        "--dtype", help="Convert the model and its floating inputs first.", show_default=False
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the weights and of every draw.")]
Json = Annotated[
    bool, typer.Option("--json", help="Print the result as JSON on stdout, and nothing else.")
]
Html = Annotated[
    Path | None,
    typer.Option(
        "--html", metavar="FILE", help="Write a self-contained report page.", show_default=False
    ),
]
Quiet = Annotated[
    bool, typer.Option("--quiet", "-q", help="No progress and no table; errors are still shown.")
]
Debug = Annotated[
    bool,
    typer.Option(
        "--debug", help="Show the traceback of an error.", callback=_remember_debug, is_eager=True
    ),
]
Rows = Annotated[
    str | None,
    typer.Option(
        "--rows",
        metavar="M,M,...",
        help="Further numbers of rows of a linear's input to tune for, beside the inputs' own.",
        show_default=False,
    ),
]


def numbers(option: str, text: str | None) -> tuple[int, ...]:
    """Whole numbers of at least 1 with commas between them; none of None. Raises InputError."""
    parts = [] if text is None else [part.strip() for part in text.split(",")]
    found = tuple(int(part) for part in parts if part.isascii() and part.isdecimal())
    if len(found) != len(parts) or 0 in found:
        raise InputError(
            option,
            "whole numbers from 1 on, with commas between them",
            repr(text),
            "For example 1,64,1024.",
        )
    return found
