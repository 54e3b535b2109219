"""The Problem of one grouped_linear call."""

from __future__ import annotations

from fastlinear.core.problem import Problem

NAME = "grouped_linear"
PIECES = ("forward", "backward")
STEP = "step"


def problem(
    piece: str,
    m: int,
    groups: int,
    k: int,
    n: int,
    *,
    dtype: str,
    device: str,
    activation: str = "none",
    bias: bool = True,
    needs_grad: bool = False,
    order: str = "tokens",
    length: int = 0,
    x: str = "dense",
    w: str = "dense",
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """A grouped_linear Problem: M tokens, each with K in and N out features in G groups.

    Args:
        order: how x and y lie in memory: ``"tokens"`` (M, G, features), ``"groups"``
            (G, M, features) or ``"channels"`` (B, G, features, L).
        length: L of ``"channels"``, whose batch is B = M / L.
        x, w: ``"dense"`` (x in that order, weight (G, N, K)) or ``"strided"``.
    """
    options = (
        ("activation", activation),
        ("bias", "yes" if bias else "no"),
        ("order", order),
        ("x", x),
        ("w", w),
    )
    positions = (("L", length),) if order == "channels" else ()
    dims = (("M", m), ("G", groups), ("K", k), ("N", n), *positions)
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)


def tokens_of(p: Problem) -> tuple[int, int]:
    """(B, L) of a Problem; a bucket's M need not be a multiple of L."""
    m = p.dim("M")
    if p.option("order") != "channels":
        return 1, m
    length = p.dim("L")
    return max(1, round(m / length)), length
