"""The options of diagonal_linear in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

from fastlinear.families.diagonal.spec import FRONT
from fastlinear.op.command import FEATURES, Command, Option, Request
from fastlinear.op.spec import Arguments


def _arguments(call: Request) -> Arguments:
    k = call["width"]
    return call.empty(call.m, k), call.empty(k), (call.vector(k), None), call.activation


COMMAND = Command(
    FRONT,
    options=(
        Option(
            "--width",
            f"Features, each with a weight of its own; {FEATURES} if left out.",
            FEATURES,
        ),
    ),
    about="features with a weight each",
    remedy="It has one size besides the rows: --width.",
    arguments=_arguments,
    without={
        "--weight-layout": "Its weight is a vector, which has no layout: leave the option out."
    },
)
