"""The Problem of one diagonal_linear call, and how its x lies in memory."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.space import Space

NAME = "diagonal_linear"
PIECES = ("forward", "backward")
STEP = "step"


def problem(
    piece: str,
    m: int,
    k: int,
    *,
    dtype: str,
    device: str,
    activation: str = "none",
    bias: bool = True,
    residual: bool = False,
    needs_grad: bool = False,
    x_layout: str = "rows",
    captured: bool = False,
) -> Problem:
    """A diagonal_linear Problem: M rows of x with K features.

    Args:
        residual: whether a tensor of x's shape is added after the activation.
        x_layout: ``"rows"`` (dense), ``"rows_apart"`` (unit stride along K, any stride between
            rows) or ``"strided"`` (anything else).
    """
    options = (
        ("activation", activation),
        ("bias", "yes" if bias else "no"),
        ("residual", "yes" if residual else "no"),
        ("x", x_layout),
    )
    dims = (("M", m), ("K", k))
    return Problem(NAME, piece, dims, dtype, device, options, needs_grad, "n/a", captured)


SPACE = Space(
    lambda *call, precision, **options: problem(*call, **options),
    sizes=((1, 1), (7, 33), (65, 16), (300, 24), (33, 130), (3, 1100), (130, 3), (17, 256)),
    options={
        "activation": ACTIVATIONS,
        "x_layout": ("rows", "rows_apart", "strided"),
        "bias": (True, False),
        "residual": (True, False),
    },
    times=7,
)


def problem_of(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    needs_grad: bool,
    captured: bool = False,
) -> Problem:
    """The forward Problem of a call whose arguments are valid."""
    layouts = {layout_of(t) for t in (x, residual) if t is not None}
    worst = next(name for name in ("strided", "rows_apart", "rows") if name in layouts)
    return problem(
        "forward",
        x.shape[:-1].numel(),
        x.shape[-1],
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        bias=bias is not None,
        residual=residual is not None,
        needs_grad=needs_grad,
        x_layout=worst,
        captured=captured,
    )


def layout_of(x: Tensor) -> str:
    """The layout, in the words of ``problem``, of x (..., K) seen as rows."""
    rows = as_rows(x)
    if rows is None:
        return "strided"
    m, k = rows.shape
    if rows.stride(1) != 1 and k > 1:
        return "strided"
    return "rows" if m <= 1 or rows.stride(0) == k else "rows_apart"


def as_rows(x: Tensor) -> Tensor | None:
    """x (..., K) as a view (M, K), or None where its strides allow none."""
    if x.dim() == 2:
        return x.detach()
    shape = torch.Size((x.shape[:-1].numel(), x.shape[-1]))
    try:
        return x.detach().view(shape)
    except RuntimeError:  # torch's own words for strides that do not fit
        return None
