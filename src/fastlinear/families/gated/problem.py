"""The Problem of one gated_mlp or gated_linear call."""

from __future__ import annotations

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space
from fastlinear.families.gated.stacking import ORDERS

NAME = "gated_mlp"
PIECES = ("forward", "backward")
STEP = "step"


def problem(
    piece: str,
    m: int,
    k: int,
    h: int,
    n: int = 0,
    *,
    dtype: str,
    device: str,
    activation: str = "silu",
    bias: str = "no",
    needs_grad: bool = False,
    order: str = "apart",
    recompute: bool = False,
    x: str = "dense",
    w: str = "dense",
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """A gated Problem: M tokens of K features, H gated ones, N out features.

    Args:
        n: N of the down projection; 0 for ``gated_linear``, which has none.
        bias: ``"yes"``, ``"no"`` or ``"some"``.
        order: how gate and up weights lie, a name in ``stacking.ORDERS``.
        recompute: whether a training call keeps x alone.
        x, w: ``"dense"`` or ``"strided"``.
    """
    options = (
        ("activation", activation),
        ("bias", bias),
        ("order", order),
        ("recompute", "yes" if recompute else "no"),
        ("x", x),
        ("w", w),
    )
    down = (("N", n),) if n else ()
    dims = (("M", m), ("K", k), ("H", h), *down)
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)


SPACE = Space(
    problem,
    sizes=(
        *((1, 1, 1, 1), (7, 33, 20, 5), (40, 24, 48, 16), (3, 65, 130, 33), (33, 7, 17, 64)),
        *((65, 16, 33), (5, 20, 7)),  # gated_linear
    ),
    options={
        "activation": ACTIVATIONS,
        "bias": ("yes", "no", "some"),
        "needs_grad": (True, False),
        "order": ORDERS,
        "recompute": (False, False, True),
        "x": ("dense", "strided"),
        "w": ("dense", "strided"),
    },
    narrowed={STEP: {"recompute": (False,)}},
)


def has_down(p: Problem) -> bool:
    """Whether the Problem has a down projection."""
    return "N" in dict(p.dims)
