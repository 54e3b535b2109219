"""The options of linear_act in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

from fastlinear.families.linear.spec import FRONT
from fastlinear.op.command import FEATURES, Command, Option, Request
from fastlinear.op.spec import Arguments


def _arguments(call: Request) -> Arguments:
    k, n = call["k"], call["n"]
    return call.empty(call.m, k), call.matrix(k, n), call.vector(n), call.activation


COMMAND = Command(
    FRONT,
    options=(
        Option("--k", f"In features; {FEATURES} if left out.", FEATURES),
        Option("--n", f"Out features; {FEATURES} if left out.", FEATURES),
    ),
    about="a linear layer",
    remedy="These belong to another op: name it first, as in mlp --widths 64,128,10, "
    "gated_mlp --hidden 4096 or grouped_linear --groups 16.",
    arguments=_arguments,
)
