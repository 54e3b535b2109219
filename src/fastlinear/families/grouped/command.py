"""The options of grouped_linear in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

from fastlinear.core.errors import InputError
from fastlinear.families.grouped.layout import LAYOUTS, NAMES, SHARED
from fastlinear.families.grouped.op import explain
from fastlinear.families.grouped.spec import FRONT
from fastlinear.op.command import GROUP_OPTIONS, Command, Option, Request
from fastlinear.op.spec import Arguments


def _arguments(call: Request) -> Arguments:
    m, groups, k, layout = call.m, call["groups"], call["k"], call["x_layout"]
    if layout not in NAMES:
        raise InputError(
            "--x-layout",
            ", ".join(map(repr, NAMES)),
            repr(layout),
            "It names x's dimensions: g groups, k features, b batch, ... any others.",
        )
    channels, length = layout != SHARED and LAYOUTS[layout].order == "channels", call["length"]
    if length is not None and (not channels or m % length):
        raise InputError(
            "--length",
            "a divisor of --m, in layouts that begin with b",
            f"{length} of {m} tokens as {layout!r}",
            "x is (B, G·K, L) with B·L = --m: leave --length out for one long sequence.",
        )
    length = length or m
    shape = {
        "... (g k)": (m, groups * k),
        "... g k": (m, groups, k),
        "g ... k": (groups, m, k),
        "b (g k) ...": (m // length, groups * k, length),
        "b g k ...": (m // length, groups, k, length),
        SHARED: (m, k),
    }[layout]
    n = call["n"] or k
    weight, bias = call.matrix(k, n, groups), call.vector(groups, n)
    return call.empty(*shape), weight, bias, call.activation, layout


def _check(arguments: Arguments) -> None:
    (groups, n, k), layout = arguments[1].shape, arguments[4]
    if layout == SHARED:
        raise InputError(
            "--x-layout",
            "a layout in which every group has an input of its own",
            f"{layout!r}, one input for all: one linear layer of all groups' features",
            f"Tune that: linear_act --k {k} --n {groups * n}.",
        )


COMMAND = Command(
    FRONT,
    options=(
        *GROUP_OPTIONS,
        Option(
            "--x-layout",
            "x's dimensions, as in grouped_linear's layout: '... (g k)' if left out, '... g k', "
            "'g ... k', 'b (g k) ...', 'b g k ...' or '... k'.",
            default="... (g k)",
            kind=str,
            metavar="LAYOUT",
        ),
        Option("--length", "Tokens of each sequence where x's layout begins with b; else all --m."),
    ),
    about="linear layers of one size",
    remedy="Its sizes are --groups, and --k and --n of each group.",
    arguments=_arguments,
    explain=explain,
    check=_check,
)
