"""The options of mlp in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

from itertools import pairwise

from fastlinear.core.errors import InputError
from fastlinear.families.mlp.spec import FRONT
from fastlinear.op.command import Command, Option, Request
from fastlinear.op.spec import Arguments

LAYERS, WIDTH = 8, 64


def _sizes(call: Request) -> tuple[int, ...]:
    """n_0, n_1, … n_L."""
    widths, layers, width = call["widths"], call["layers"], call["width"]
    if widths is None:
        return (width or WIDTH,) * ((layers or LAYERS) + 1)
    if layers is not None or width is not None:
        raise InputError(
            "--widths",
            "either --widths or --layers and --width",
            "both",
            "--layers and --width make a chain of equal widths.",
        )
    parts = [part.strip() for part in widths.split(",")]
    sizes = tuple(int(part) for part in parts if part.isascii() and part.isdecimal())
    if len(sizes) != len(parts) or len(sizes) < 2 or min(sizes) < 1:
        raise InputError(
            "--widths",
            "two or more whole numbers from 1 on, with commas between them",
            repr(widths),
            "For example 64,128,10: two layers, from 64 features to 128 to 10.",
        )
    return sizes


def _arguments(call: Request) -> Arguments:
    sizes = _sizes(call)
    weights = tuple(call.matrix(k, n) for k, n in pairwise(sizes))
    biases = tuple(map(call.vector, sizes[1:]))
    x = call.empty(call.m, sizes[0])
    return x, weights, biases, call.activation, call["final_activation"]


COMMAND = Command(
    FRONT,
    options=(
        Option(
            "--widths",
            "Features of the input and of every layer's output.",
            kind=str,
            metavar="N0,N1,…,NL",
        ),
        Option(
            "--layers", f"How many layers of --width features, instead of --widths; else {LAYERS}."
        ),
        Option("--width", f"Features of the input and of each of --layers; {WIDTH} if left out."),
        Option(
            "--final-activation",
            "After the last layer; none if left out. --activation follows all others.",
            default="none",
            kind=str,
        ),
    ),
    about="a chain of linear layers in one",
    remedy="Give --widths, or --layers and --width.",
    arguments=_arguments,
    activation="relu",
)
