"""Backend ``planes`` of gated_mlp: float32 by products of float16 on Hopper, see linear_act's.

What the gate lets through and the gradients of both pre-activations are worked out where they are
split into planes, by rows and by columns at once; as float32 they are never written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.families.gated.problem import has_down
from fastlinear.families.gated.stacking import (
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    empty_pre,
    halves_of_any,
    hidden,
    split_pre,
    split_weights,
)
from fastlinear.families.linear.cuda.planes import Derivation, parts, why_not_of
from fastlinear.families.linear.cuda.planes_product import product
from fastlinear.families.linear.cuda.planes_split import Planes, Source, split

# Numbers of the widest matrix of a part of the rows: planes of five exist at once, of 8 bytes.
_AT_ONCE = 1 << 25
_WEIGHTS = ("first", "second", "gate", "up", "down")
_LEAST = 8  # products in a sum, of which each has 22 bits


Split = dict[tuple[str, bool], Planes]
"""Planes of operands by name, and whether they are by columns."""


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve a Problem, whatever the device is, or None."""
    if p.dtype != "float32" or p.precision != "highest":
        return "for float32 of full precision only"
    if not has_down(p):
        return "without a down projection little is derived"
    if p.option("order") == "interleaved":
        return "interleaved halves have no rows side by side"
    m, k, h, n = (p.dim(name) for name in "MKHN")
    if min(k, h, n) < _LEAST:
        return "sums of so few products are less exact"
    return why_not_of(m, k, h) or why_not_of(m, h, n)


def row_parts(rows: int, *widths: int) -> list[slice]:
    """Rows that are worked on one after the other, of matrices so wide."""
    return parts(rows, max(widths), _AT_ONCE)


def _of_rows(pre: Pre, rows: slice) -> Pre:
    first, second = pre
    return first[rows], None if second is None else second[rows]


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) float32 → (y (M, N), then the pre-activations or None twice)."""
    (m, k), size = x.shape, hidden(weights)
    assert weights.down is not None
    n = len(weights.down)
    kept = empty_pre(x, size, order) if save_pre else None
    y = x.new_empty(m, n)
    each = row_parts(m, k, size, n)
    made: Split = {}
    for rows in each:
        pre = empty_pre(x[rows], size, order) if kept is None else _of_rows(kept, rows)
        _pre_activations(x[rows], weights, biases, pre, made)
        gate, up = split_pre(pre, order)
        h = Source(up, True, derivation=Derivation.GATED, saved=gate, activation=activation)
        through = _split(made, h=h, down=Source(weights.down, by_rows=True))["h", False]
        product(through, made["down", False], biases.down, into=(y[rows], None))
        made = _of_weights(made)
    return (y, None, None) if kept is None else (y, *kept)


def _pre_activations(
    x: Tensor, weights: Weights, biases: Biases, into: Pre, made: Split, again: bool = False
) -> None:
    """x Wgᵀ + bg and x Wuᵀ + bu, or their stack. Weights that are ``made`` are not split anew; x is
    split by columns as well where it is read ``again``."""
    firsts = {"first": weights.gate, "second": weights.up}
    sources = {name: Source(w, by_rows=True) for name, w in firsts.items() if w is not None}
    found = _split(made, x=Source(x, by_rows=True, by_columns=again), **sources)
    for name, bias, to in zip(sources, biases, into, strict=False):
        assert to is not None
        product(found["x", False], made[name, False], bias, into=(to, None))


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
    """dy (M, N), dense, float32 → the seven gradients; pre None is formed again from x.

    Where no more than the down projection is wanted and pre is given, the other tensors are not
    looked at: they may be any.
    """
    m, n = dy.shape
    size = hidden(weights) if pre is None else split_pre(pre, order)[0].shape[1]
    given = x, weights.gate, weights.up, None, biases.gate, biases.up, None
    found = [
        t.new_empty(t.shape) if need and t is not None else None
        for need, t in zip(needs, given, strict=True)
    ]
    found[3], found[6] = (
        dy.new_empty(shape) if need else None
        for need, shape in ((needs[3], (n, size)), (needs[6], (n,)))
    )
    inner = any(needs[i] for i in (0, 1, 2, 4, 5))
    wide = (n, size, x.shape[1]) if inner or pre is None else (n, size)
    dx, *others = found
    each = row_parts(m, *wide)
    made: Split = {}
    for i, rows in enumerate(each):
        at = None if pre is None else _of_rows(pre, rows)
        if at is None and any(needs[:6]):
            at = empty_pre(x[rows], size, order)
            _pre_activations(x[rows], weights, biases, at, made, again=needs[1] or needs[2])
        into = None if dx is None else dx[rows], *others
        own = x[rows] if inner else x
        _backward_part(dy[rows], at, own, weights, activation, order, into, i > 0, made)
        made = _of_weights(made)
    return tuple(found)


def _backward_part(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    activation: str,
    order: str,
    into: Gradients,
    added: bool,
    made: Split,
) -> None:
    """Gradients of some rows ``into`` memory for those that are wanted, or ``added`` to what it
    holds of other rows. What is split already is ``made``."""
    dx, gate_weight, up_weight, down_weight, *biases = into
    d_gate, d_up = halves_of_any(gate_weight, up_weight, order)
    sums = [None if b is None else torch.empty_like(b) if added else b for b in biases]
    gate_sums, up_sums = halves_of_any(sums[0], sums[1], order)
    inner = any(into[i] is not None for i in (0, 1, 2, 4, 5))
    sources = {"dy": Source(dy, inner, down_weight is not None, sums=sums[2])}
    if inner:
        assert weights.down is not None
        sources["down"] = Source(weights.down, by_columns=True)
        sources["x"] = Source(x, by_columns=d_gate is not None or d_up is not None)
    if dx is not None:
        for name, weight in zip(("gate", "up"), split_weights(weights, order), strict=True):
            sources[name] = Source(weight, by_columns=True)
    _split(made, **sources)
    if pre is not None:
        gate, up = split_pre(pre, order)
        of_gate = Source(up, saved=gate, derivation=Derivation.GATED, activation=activation)
        derived = {"h": of_gate._replace(by_columns=down_weight is not None)}
        if inner:
            dh, _ = product(made["dy", False], made["down", True])
            both = of_gate._replace(numbers=dh, by_rows=dx is not None)
            derived["d up"] = both._replace(by_columns=d_up is not None, sums=up_sums)
            both = both._replace(derivation=Derivation.GATE_GRADIENT, other=up)
            derived["d gate"] = both._replace(by_columns=d_gate is not None, sums=gate_sums)
        _split(made, **derived)
    for own, total in zip(sums, biases, strict=True):
        if own is not None and total is not None and added:
            total.add_(own)
    if down_weight is not None:
        product(made["dy", True], made["h", True], into=(down_weight, None), added=added)
    for name, to in (("gate", d_gate), ("up", d_up)):
        if to is not None:
            product(made[f"d {name}", True], made["x", True], into=(to, None), added=added)
        if dx is not None:
            rows, turned = made[f"d {name}", False], made[name, True]
            product(rows, turned, into=(dx, None), added=name == "up")


def _of_weights(made: Split) -> Split:
    """Those that all parts of the rows share."""
    return {name: planes for name, planes in made.items() if name[0] in _WEIGHTS}


def _split(made: Split, /, **sources: Source) -> Split:
    """``made`` with the planes of these, by name and by whether they are by columns, all split
    together; but for those that are there."""
    wanted = {}
    for name, s in sources.items():
        by_rows, by_columns = (
            way and (name, turned) not in made
            for turned, way in ((False, s.by_rows), (True, s.by_columns))
        )
        if by_rows or by_columns or s.sums is not None:
            wanted[name] = s._replace(by_rows=by_rows, by_columns=by_columns)
    if wanted:
        names = [
            (name, by_columns)
            for name, s in wanted.items()
            for by_columns in (False, True)
            if (s.by_columns if by_columns else s.by_rows)
        ]
        made.update(zip(names, split([*wanted.values()]), strict=True))
    return made
