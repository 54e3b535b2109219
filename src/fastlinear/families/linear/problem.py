"""What linear_act asks dispatch: its pieces and the Problem of a call."""

from __future__ import annotations

from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space

NAME = "linear_act"
BACKWARD_PIECES = ("grad_pre", "grad_input", "grad_weight")
PIECES = ("forward", *BACKWARD_PIECES)
WHOLE_BACKWARD = "backward"
STEP = "step"


def problem(
    piece: str,
    m: int,
    k: int,
    n: int,
    *,
    dtype: str,
    device: str,
    activation: str = "none",
    bias: bool = True,
    needs_grad: bool = False,
    x_layout: str = "rows",
    w_layout: str = "nk",
    precision: str = "n/a",
    captured: bool = False,
) -> Problem:
    """A linear_act Problem: M rows of x, K in features, N out features.

    Args:
        x_layout: ``"rows"`` (unit stride along K, rows dense or a multiple of 16 bytes apart),
            ``"rows_odd"`` (unit stride along K, other row strides: expanded and overlapping rows as
            well) or ``"strided"``.
        w_layout: ``"nk"`` (contiguous, as in nn.Linear), ``"kn"`` (a transposed view, as in
            transformers' Conv1D) or ``"strided"``.
    """
    options = (
        ("activation", activation),
        ("bias", "yes" if bias else "no"),
        ("x", x_layout),
        ("w", w_layout),
    )
    dims = (("M", m), ("K", k), ("N", n))
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, precision, captured)


SPACE = Space(
    problem,
    sizes=((1, 1, 1), (7, 33, 65), (1, 65, 7), (33, 7, 1), (65, 1, 33), (33, 65, 64), (7, 7, 7)),
    options={
        "activation": ACTIVATIONS,
        "x_layout": ("rows", "strided"),
        "w_layout": ("nk", "kn"),
        "bias": (True, False),
        "needs_grad": (True, False),
    },
    narrowed={piece: {"activation": ("none",)} for piece in ("grad_input", "grad_weight")},
    times=7,
    times_on_cuda=3,
)


def x_layout_of(rows: Tensor) -> str:
    """The x layout of ``problem`` for x seen as its rows (M, K), by strides alone."""
    m, k = rows.shape
    if rows.stride(1) != 1 and k != 1:
        return "strided"
    if m <= 1 or rows.stride(0) == k:
        return "rows"
    aligned = rows.stride(0) > k and rows.stride(0) * rows.itemsize % 16 == 0
    return "rows" if aligned else "rows_odd"
