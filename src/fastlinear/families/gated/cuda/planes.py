"""Backend ``planes`` of gated_mlp: float32 by products of float16 on Hopper, see linear_act's.

What the gate lets through and the gradients of both pre-activations are worked out where they are
split into planes, by rows and by columns at once; as float32 they are never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_hopper
from fastlinear.families.gated.problem import has_down
from fastlinear.families.gated.stacking import (
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    empty_pre,
    halves,
    hidden,
    split_pre,
    split_weights,
)
from fastlinear.families.linear.cuda.planes import Form, why_not_of
from fastlinear.families.linear.cuda.planes_product import product
from fastlinear.families.linear.cuda.planes_split import Planes, Source, split

# Numbers of (M, H) whose planes exist at once: five times as many, of 8 bytes.
_AT_ONCE = 1 << 25
_ROWS = 128  # of a part a multiple


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve a Problem, or None."""
    return why_no_hopper(p) or reason_not_any(p)


def reason_not_any(p: Problem) -> str | None:
    """The same, whatever the device is."""
    if p.dtype != "float32" or p.precision != "highest":
        return "for float32 of full precision only"
    if not has_down(p):
        return "without a down projection little is derived"
    if p.option("order") == "interleaved":
        return "interleaved halves have no rows side by side"
    m, k, h, n = (p.dim(name) for name in "MKHN")
    return why_not_of(m, k, h) or why_not_of(m, h, n)


def _parts(rows: int, size: int) -> list[slice]:
    """Rows of (M, H) that are worked on one after the other."""
    each = rows if rows * size <= _AT_ONCE else max(1, _AT_ONCE // (size * _ROWS)) * _ROWS
    return [slice(i, min(i + each, rows)) for i in range(0, rows, each)]


def _pre_activations(x: Tensor, weights: Weights, biases: Biases, into: Pre) -> None:
    """x Wgᵀ + bg and x Wuᵀ + bu, or their stack."""
    firsts = [w for w in (weights.gate, weights.up) if w is not None]
    rows, *each = split([Source(t, by_rows=True) for t in (x, *firsts)])
    for planes, bias, to in zip(each, biases, into, strict=False):
        assert to is not None
        product(rows, planes, bias, into=(to, None))


def _of_rows(pre: Pre, rows: slice) -> Pre:
    first, second = pre
    return first[rows], None if second is None else second[rows]


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) float32 → (y (M, N), then the pre-activations or None twice)."""
    m, size = len(x), hidden(weights)
    assert weights.down is not None
    kept = empty_pre(x, size, order) if save_pre else None
    y = x.new_empty(m, len(weights.down))
    for rows in _parts(m, size):
        part = x[rows]
        pre = empty_pre(part, size, order) if kept is None else _of_rows(kept, rows)
        _pre_activations(part, weights, biases, pre)
        gate, up = split_pre(pre, order)
        h = Source(up, True, form=Form.GATED, saved=gate, activation=activation)
        through, down = split((h, Source(weights.down, by_rows=True)))
        product(through, down, biases.down, into=(y[rows], None))
    return (y, None, None) if kept is None else (y, *kept)


def backward(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    over: bool = False,
) -> Gradients:
    """dy (M, N), dense, float32 → the seven gradients; pre None is formed again from x."""
    given = zip(needs, (x, *weights, *biases), strict=True)
    found = tuple(t.new_empty(t.shape) if need and t is not None else None for need, t in given)
    dx, *others = found
    for i, rows in enumerate(_parts(len(dy), hidden(weights))):
        part = x[rows]
        at = None if pre is None else _of_rows(pre, rows)
        if at is None and any(needs[:6]):
            at = empty_pre(part, hidden(weights), order)
            _pre_activations(part, weights, biases, at)
        into = None if dx is None else dx[rows], *others
        _backward_part(dy[rows], at, part, weights, activation, order, into, i > 0)
    return found


def _backward_part(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    activation: str,
    order: str,
    into: Gradients,
    added: bool,
) -> None:
    """Gradients of some rows ``into`` memory for those that are wanted, or ``added`` to what it
    holds of other rows."""
    dx, gate_weight, up_weight, down_weight, *biases = into
    d_gate, d_up = _halves(gate_weight, up_weight, order)
    sums = [None if b is None else torch.empty_like(b) if added else b for b in biases]
    gate_sums, up_sums = _halves(sums[0], sums[1], order)
    inner = any(into[i] is not None for i in (0, 1, 2, 4, 5))
    gate_w, up_w = split_weights(weights, order)
    assert weights.down is not None
    outer = _split(
        dy=Source(dy, inner, down_weight is not None, sums=sums[2]),
        down=Source(weights.down, by_columns=inner),
        x=Source(x, by_columns=d_gate is not None or d_up is not None),
        gate=Source(gate_w, by_columns=dx is not None),
        up=Source(up_w, by_columns=dx is not None),
    )
    made = {}
    if pre is not None:
        gate, up = split_pre(pre, order)
        of_gate = Source(up, saved=gate, form=Form.GATED, activation=activation)
        derived = {"h": of_gate._replace(by_columns=down_weight is not None)}
        if inner:
            dh, _ = product(outer["dy", False], outer["down", True])
            both = of_gate._replace(numbers=dh, by_rows=dx is not None)
            derived["up"] = both._replace(by_columns=d_up is not None, sums=up_sums)
            both = both._replace(form=Form.GATE_GRADIENT, other=up)
            derived["gate"] = both._replace(by_columns=d_gate is not None, sums=gate_sums)
        made = _split(**derived)
    for own, total in zip(sums, biases, strict=True):
        if own is not None and total is not None and added:
            total.add_(own)
    if down_weight is not None:
        product(outer["dy", True], made["h", True], into=(down_weight, None), added=added)
    for name, to in (("gate", d_gate), ("up", d_up)):
        if to is not None:
            product(made[name, True], outer["x", True], into=(to, None), added=added)
        if dx is not None:
            rows, turned = made[name, False], outer[name, True]
            product(rows, turned, into=(dx, None), added=name == "up")


def _halves(
    first: Tensor | None, second: Tensor | None, order: str
) -> tuple[Tensor | None, Tensor | None]:
    """Gate and up half of what has a row or a number for each feature, as views."""
    if order == "apart" or first is None:
        return first, second
    return halves(first, None, order, 0)


def _split(**sources: Source) -> dict[tuple[str, bool], Planes]:
    """Planes by name and by whether they are by columns, in one launch."""
    wanted = {
        name: s for name, s in sources.items() if s.by_rows or s.by_columns or s.sums is not None
    }
    if not wanted:
        return {}
    names = [
        (name, by_columns)
        for name, s in wanted.items()
        for by_columns in (False, True)
        if (s.by_columns if by_columns else s.by_rows)
    ]
    return dict(zip(names, split([*wanted.values()]), strict=True))
