"""Backend ``planes`` of grouped_linear: float32 by three products of float16 on Hopper.

One launch splits all groups' tokens and weights into planes (``families/linear/cuda/planes.h``),
one more multiplies all groups; a third adds up sums over K that several blocks share. A backward
splits once and multiplies twice.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_hopper
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.reference import Gradients, Needs, by_group
from fastlinear.families.linear.cuda.planes import Derivation, reason_not_exact, why_not_of
from fastlinear.families.linear.cuda.planes_product import product
from fastlinear.families.linear.cuda.planes_split import Source, split


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve a Problem, or None."""
    if (why := why_no_hopper(p) or reason_not_exact(p)) is not None:
        return why
    if p.option("order") == "channels" or p.option("x") != "dense":
        return "features of a token have to lie side by side, all tokens of a group alike"
    m, k, n, groups = map(p.dim, "MKNG")
    if groups < 1:
        return "no groups"
    return why_not_of(m, k, n, max(2, groups))  # one group begins and ends at 64 rows, too


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool, order: str
) -> tuple[Tensor, Tensor | None]:
    """(y, pre): x (B, L, G, K), weight (G, N, K), bias (G, N) → y (B, L, G, N), pre if asked."""
    shape = *x.shape[:3], weight.shape[1]
    y = layouts.empty(shape, order, x, x.dtype)
    pre = layouts.empty(shape, order, x, x.dtype) if save_pre else None
    first, second = split((Source(by_group(x), by_rows=True), Source(weight, by_rows=True)))
    into = by_group(y), None if pre is None else by_group(pre)
    product(first, second, bias, activation, save_pre, into=into)
    return y, pre


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
) -> Gradients:
    """(dx, dW, db), each None where not needed; dx lies in ``order``, dW and db are contiguous."""
    for_dx, for_dw, for_db = needs
    groups, n, k = weight.shape
    gradient = Source(_rows(dy, order), by_rows=for_dx, by_columns=for_dw)
    if saved is not None and activation != "none":
        gradient = gradient._replace(
            derivation=Derivation.GRADIENT, saved=_rows(saved, order), activation=activation
        )
    db = dy.new_empty(groups, n) if for_db else None
    sources = [gradient._replace(sums=db)]
    if for_dx:
        sources.append(Source(weight, by_columns=True))
    if for_dw:
        sources.append(Source(_rows(x, order), by_columns=True))
    made = split(sources) if any(needs) else []
    dx = layouts.empty(x.shape, order, x, x.dtype) if for_dx else None
    if dx is not None:
        product(made[0], made[for_dx + for_dw], into=(by_group(dx), None))
    dw = dy.new_empty(groups, n, k) if for_dw else None
    if dw is not None:
        product(made[for_dx], made[-1], into=(dw, None))
    return dx, dw, db


def _rows(t: Tensor, order: str) -> Tensor:
    """t (B, L, G, D) as (G, B·L, D): a view where it is dense in that order, else of a copy."""
    return by_group(layouts.dense(t, order))
