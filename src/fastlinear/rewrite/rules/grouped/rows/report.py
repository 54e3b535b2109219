"""What findings say of linears on one input, or on its parts."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.families.grouped.op import grouped_linear
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.in_code import in_code_together
from fastlinear.rewrite.rules.grouped.advice import advised, cost_of, first_problem, report, strided
from fastlinear.rewrite.rules.grouped.rows.observed import Row
from fastlinear.rewrite.session import Session


def of_row(session: Session, row: Row) -> Fusion | None:
    """The same layers with their weights laid together once, by hand."""
    layers: list[Any] = [session.model.get_submodule(fqn) for fqn in row.members]
    count, k = len(layers), row.shape[-1]
    empty = not math.prod(row.shape) or any(s.out_features == 0 for s in layers)
    if empty or row.dtype not in DTYPE_NAMES:
        return None
    shape, stride = (*row.shape[:-1], count, k), (*row.stride[:-1], row.step, row.stride[-1])
    x = strided(session, shape, stride, row.dtype).detach()
    tokens, size = math.prod(row.shape[:-1]), row.dtype.itemsize
    widths = tuple(layer.out_features for layer in layers)
    outputs = sum(widths)
    cost = cost_of(tokens, tokens * k * (count if row.step else 1), k * outputs, outputs, size)
    own = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    join: Any = torch.stack if row.step else torch.cat
    grad = any(p.requires_grad for p in own)
    weight, bias = join([m.weight.detach() for m in layers]).requires_grad_(grad), None
    biases = [m.weight.new_zeros(len(m.weight)) if m.bias is None else m.bias for m in layers]
    if any(m.bias is not None for m in layers):
        bias = join([b.detach() for b in biases]).requires_grad_(grad)
    new = [t for t in (weight, bias) if t is not None]

    def before(x: Tensor) -> tuple[Tensor, ...]:
        return tuple(type(m).forward(m, p) for m, p in zip(layers, x.unbind(-2), strict=True))

    def after(x: Tensor) -> tuple[Tensor, ...]:
        if row.step:
            return (grouped_linear(x, weight, bias, layout="... g k"),)
        return F.linear(x.select(-2, 0), weight, bias).split(widths, -1)

    held = in_code_together(session.model, row.members)
    if row.step:
        read, words = "parts of one tensor", "on parts of one tensor run one after another"
        advice = f"fl.nn.GroupedLinear.from_linears({held})"
        advice += ", whose weight[g] is the weight of layer g"
    else:
        read, words = "one input", "read one input, each by itself"
        cat = f"torch.cat([m.weight for m in {held}])"
        advice = f"one linear of {outputs} outputs, of weight {cat}, its result split"
    told = report(
        session,
        kind=row.kind,
        title=f"{count} linears of {k} features on {read}",
        words=f"{count} linears {words}",
        advice=advice,
        linears=row.members,
        cost=cost,
    )
    return advised(
        *(session, told),
        fqn=row.fqn,
        x=x,
        calls=row.calls,
        input_grad=row.grad,
        before=before,
        after=after,
        tensors=[*own, *new],
        problem=first_problem(session, layers[0], x.select(-2, 0)),
        alike=(row.kind, widths, x.stride()),
    )
