"""The options of gated_mlp in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

from fastlinear.families.gated.op import explain
from fastlinear.families.gated.problem import NAME
from fastlinear.families.gated.spec import FRONT
from fastlinear.op.command import FEATURES, Command, Option, Request
from fastlinear.op.spec import Arguments

HIDDEN = 4


def _arguments(call: Request) -> Arguments:
    k, stacked = call["k"], call["stacked"]
    h, n = call["hidden"] or HIDDEN * k, call["n"] or k
    gate, up = call.matrix(k, 2 * h if stacked else h), None if stacked else call.matrix(k, h)
    weights = gate, up, call.matrix(h, n)
    biases = tuple(None if w is None else call.vector(w.shape[0]) for w in weights)
    options = NAME, call.activation, stacked or "apart", None
    return call.empty(call.m, k), weights, biases, *options


COMMAND = Command(
    FRONT,
    options=(
        Option("--k", f"In features; {FEATURES} if left out.", FEATURES),
        Option("--n", "Out features; as --k if left out."),
        Option(
            "--hidden",
            f"Features of the gate and of the up projection; {HIDDEN} times --k if left out.",
        ),
        Option(
            "--stacked",
            "gate_up, up_gate or interleaved: how gate and up lie in one weight; two if left out.",
            kind=str,
        ),
    ),
    about="gate, up and down",
    remedy="Its sizes are --k, --hidden and --n.",
    arguments=_arguments,
    activation="silu",
    explain=explain,
)
