"""The options of unequal_linear in ``fastlinear explain`` and ``fastlinear tune``."""

from __future__ import annotations

from fastlinear.families.grouped.unequal.spec import FRONT
from fastlinear.op.command import GROUP_OPTIONS, Command, Request
from fastlinear.op.spec import Arguments


def _arguments(call: Request) -> Arguments:
    """Groups in eight steps, from an eighth of the largest size to the largest."""
    k = call["k"]
    n = call["n"] or k
    parts = [g % 8 + 1 for g in range(call["groups"])]
    sizes = [(max(1, k * part // 8), max(1, n * part // 8)) for part in parts]
    xs = tuple(call.empty(call.m, k) for k, _ in sizes)
    weights = tuple(call.matrix(k, n) for k, n in sizes)
    return xs, weights, tuple(call.vector(n) for _, n in sizes), call.activation


COMMAND = Command(
    FRONT,
    options=GROUP_OPTIONS,
    about="linear layers of different sizes",
    remedy="Its sizes are --m rows of each group, --groups, and --k and --n of the largest group.",
    arguments=_arguments,
)
