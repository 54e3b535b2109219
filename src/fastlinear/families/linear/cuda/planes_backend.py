"""Backend ``planes`` of linear_act: float32 by three products of float16 on Hopper.

A launch splits both operands into two planes of float16 each. Another multiplies, which may split
the first operand itself. A sum over K that several blocks share is added up by one more.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.families.linear.cuda.planes import AT_ONCE, Derivation, parts
from fastlinear.families.linear.cuda.planes_product import (
    empty,
    is_read,
    product,
    sides,
)
from fastlinear.families.linear.cuda.planes_split import Source, split


def _lines(source: Source) -> int:
    return source.numbers.shape[1 if source.by_columns else 0]


def _of_rows(
    a: Source, b: Source, bias: Tensor | None = None, activation: str = "none", save: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``product`` of A by rows: split by it, or before, then in parts where it is large."""
    if is_read(a, _lines(b)):
        (second,) = split((b,))
        return product(a._replace(by_rows=False), second, bias, activation, save)
    lines, width = a.numbers.shape
    each = parts(lines, width, AT_ONCE)
    if len(each) == 1:
        first, second = split((a, b))
        return product(first, second, bias, activation, save)
    (second,) = split((b,))
    y, pre = empty(a.numbers, (lines, sides(second)[0]), save)
    for rows in each:
        (first,) = split((a.rows(rows),))
        into = y[rows], None if pre is None else pre[rows]
        product(first, second, bias, activation, save, into=into)
    return y, pre


def _of_columns(a: Source, b: Source) -> Tensor | None:
    """``product`` of A by columns, in parts where it is large; None where it is but summed."""
    rows, columns = a.numbers.shape
    each = parts(columns, rows, AT_ONCE)
    others = (b,) if a.by_columns else ()
    if len(each) == 1:
        made = split((a, *others))
        return product(made[0], made[1])[0] if made else None
    dw = a.numbers.new_empty(columns, b.numbers.shape[1]) if others else None
    seconds = split(others) if others else []
    for part in each:
        for first, second in zip(split((a.columns(part),)), seconds, strict=True):
            product(first, second, into=(dw[part], None))  # type: ignore[index]
    return dw


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """y = act(x weightᵀ + bias), and the pre-activation if asked.

    Args:
        x: (M, K) float32, M > 0.
        weight: (N, K).
        bias: (N,) or None.
        activation: a public activation name.
        save_pre: also return x weightᵀ + bias.
    """
    save = save_pre and activation != "none"
    given = Source(x, by_rows=True), Source(weight, by_rows=True)
    y, pre = _of_rows(*given, bias, activation, save)
    return y, y if save_pre and activation == "none" else pre


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) weight (N, K)."""
    return _of_rows(Source(dpre, by_rows=True), Source(weight, by_columns=True))[0]


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) x (M, K)."""
    dw = _of_columns(Source(dpre, by_columns=True), Source(x, by_columns=True))
    assert dw is not None
    return dw


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx (M, K), dW (N, K), db (N,)), each None where not wanted; dpre is never written.

    Args:
        dy: (M, N) float32, M > 0.
        saved: (M, N), what the activation saved; None for ``"none"``.
        x: (M, K); may be None where dW is not wanted.
        weight: (N, K); may be None where dx is not wanted.
        activation: a public activation name.
        needs: which of the three are wanted.
    """
    for_dx, for_dw, for_db = needs
    db = dy.new_empty(dy.shape[1]) if for_db else None
    gradient = Source(dy)
    if activation != "none":
        gradient = Source(dy, derivation=Derivation.GRADIENT, saved=saved, activation=activation)
    by_rows = gradient._replace(by_rows=True), Source(weight, by_columns=True)
    by_columns = gradient._replace(by_columns=for_dw, sums=db), Source(x, by_columns=True)
    if not (for_dx and (for_dw or for_db)) or dy.numel() > AT_ONCE:
        dx = _of_rows(*by_rows)[0] if for_dx else None
        return dx, _of_columns(*by_columns) if for_dw or for_db else None, db
    if not for_dw:
        first, second = split((by_rows[0]._replace(sums=db), by_rows[1]))
        return product(first, second)[0], None, db
    both, of_x = by_columns
    rows, columns, w, turned = split((both._replace(by_rows=True), by_rows[1], of_x))
    return product(rows, w)[0], product(columns, turned)[0], db
