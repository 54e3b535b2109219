"""Backend ``planes`` of ragged_linear: float32 by three products of float16 on Hopper.

A launch finds where groups lie, for only the device knows their sizes; another splits all rows and
weights into planes (``families/linear/cuda/planes.h``), and one more multiplies all groups. A
backward splits once and multiplies twice.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_hopper
from fastlinear.families.linear.cuda.planes import (
    MOST_OF_GROUPS,
    SEGMENT,
    Derivation,
    pitch,
    reason_not_exact,
    why_not_of,
)
from fastlinear.families.linear.cuda.planes_product import product
from fastlinear.families.linear.cuda.planes_split import Source, split
from fastlinear.kernels.cuda.ragged import Ragged, ragged


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve a Problem, or None."""
    if (why := why_no_hopper(p) or reason_not_exact(p)) is not None:
        return why
    m, k, n, groups = map(p.dim, "MKNG")
    if groups < 1 or m < 1:
        return "no groups" if m else "no rows"
    if (m + SEGMENT * min(m, groups)) * pitch(max(k, n)) > MOST_OF_GROUPS:
        return "planes of all rows may have 2^28 elements, 64 rows at a time"
    return why_not_of(SEGMENT, k, n, max(2, groups))


def _groups(sizes: Tensor, x: Tensor) -> Ragged:
    return ragged(sizes.contiguous(), x.shape[0])


def forward(
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None, None]:
    """(y, pre if asked, None), (T, N) each: x (T, K), weight (G, N, K), sizes (G,), bias (G, N)."""
    given = Source(x.resolve_neg(), by_rows=True, ragged=_groups(sizes, x))
    first, second = split((given, Source(weight.resolve_neg(), by_rows=True)))
    return *product(first, second, bias, activation, save_pre), None


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx (T, K), dW (G, N, K), db (G, N)), each None where not needed; dy (T, N)."""
    for_dx, for_dw, for_db = needs
    groups, n, _ = weight.shape
    rows = _groups(sizes, x)
    db = dy.new_empty(groups, n) if for_db else None
    gradient = Source(dy.resolve_neg(), by_rows=for_dx, by_columns=for_dw, sums=db, ragged=rows)
    if saved is not None and activation != "none":
        gradient = gradient._replace(
            derivation=Derivation.GRADIENT, saved=saved, activation=activation
        )
    sources = [gradient]
    if for_dx:
        sources.append(Source(weight.resolve_neg(), by_columns=True))
    if for_dw:
        sources.append(Source(x.resolve_neg(), by_columns=True, ragged=rows))
    made = split(sources) if any(needs) else []
    dx = product(made[0], made[for_dx + for_dw])[0] if for_dx else None
    dw = product(made[for_dx], made[-1])[0] if for_dw else None
    return dx, dw, db
