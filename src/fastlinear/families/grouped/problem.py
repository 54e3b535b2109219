"""The Problem of one grouped_linear call."""

from __future__ import annotations

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space

NAME = "grouped_linear"
PIECES = ("forward", "backward")
STEP = "step"
MULTIPLE = 16  # numbers: Triton knows then that rows begin at 16 bytes


def problem(
    piece: str,
    m: int,
    groups: int,
    k: int,
    n: int,
    length: int = 0,
    *,
    dtype: str,
    device: str,
    activation: str = "none",
    bias: bool = True,
    needs_grad: bool = False,
    order: str = "tokens",
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


SPACE = Space(
    problem,
    sizes=(
        *((1, 1, 1, 1, 1), (12, 3, 5, 7, 4), (70, 2, 33, 20, 35), (40, 2, 100, 100, 10)),
        *((66, 3, 17, 50, 3), (36, 1, 136, 24, 18), (7, 5, 24, 130, 7)),
    ),
    options={
        "activation": ACTIVATIONS,
        "bias": (True, False),
        "needs_grad": (True, False),
        "order": ("tokens", "groups", "channels"),
        "x": ("dense", "strided"),
        "w": ("dense", "strided"),
    },
    narrowed={STEP: {"x": ("dense",)}},
)


def tokens_of(p: Problem) -> tuple[int, int]:
    """(B, L) of a Problem; a bucket's M need not be a multiple of L."""
    m = p.dim("M")
    if p.option("order") != "channels":
        return 1, m
    length = p.dim("L")
    return max(1, round(m / length)), length


SIZES = tuple(size[:4] for size in SPACE.sizes)
"""M, G, K and N of small calls, of rows in any order."""


def bits(number: int) -> str:
    """``"32"`` or ``"64"``: how wide a signed integer must be to hold it."""
    return "64" if number >= 1 << 31 else "32"


def lies_well(p: Problem) -> bool:
    """Whether backend ``padded`` would copy nothing."""
    dense = p.option("x") == "dense" and p.option("w") == "dense"
    return dense and p.option("order") != "channels" and p.dim("K") % MULTIPLE == 0


def padded_size(k: int) -> int:
    """Features of a row that it copies."""
    return -(-k // MULTIPLE) * MULTIPLE


def inner_order(order: str) -> str:
    """How the tokens lie that it multiplies."""
    return "groups" if order == "channels" else order
