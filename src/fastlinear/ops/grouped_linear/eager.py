"""Backend ``eager`` as steps of a tape: the very ops of PyTorch that ``reference`` calls."""

from __future__ import annotations

import torch

from fastlinear.ops.common.tape import Tape
from fastlinear.ops.grouped_linear import reference
from fastlinear.ops.grouped_linear.operands import (
    Backward,
    Forward,
    Numbers,
    Operand,
    laid_out,
)


def forward_steps(call: Forward) -> tuple[int, int | None] | None:
    """``reference.forward`` as steps of a tape: the numbers of y and the pre-activation.

    None where the bias is added on the way into the order.
    """
    p, weight = call.tape, call.weight
    x = call.x
    if call.bias is not None and reference.copied(x.tensor, call.order):
        return None
    turned = weight.tensor.transpose(1, 2)
    w = p.strided(weight.number, turned.shape, turned.stride())
    bias = None if call.bias is None else call.bias.number
    pre = _product(p, x, _by_group(p, x), Operand(turned, w), call.order, call.shape, bias)
    y = pre
    if call.activation != "none":
        y = p.activate(call.activation, pre, not call.save_pre)
    return y, pre if call.save_pre else None


def backward_steps(call: Backward) -> Numbers:
    """``reference.backward`` as steps of a tape."""
    p, dpre = call.tape, call.dy
    if call.saved is not None:
        number = p.differentiate(call.activation, dpre.number, call.saved.number)
        dpre = Operand(dpre.tensor, number)  # dense, as dy and what was saved are
    rows = _by_group(p, dpre) if any(call.needs[:2]) else dpre
    dx = dw = db = None
    if call.needs[0]:
        dx = _product(p, dpre, rows, call.weight, call.order, call.shape)
    if call.needs[1]:
        turned = rows.tensor.transpose(1, 2)
        a = p.strided(rows.number, turned.shape, turned.stride())
        dw = p.batched(a, _by_group(p, call.x).number)
    if call.needs[2]:
        t = dpre.tensor
        db = p.row_sum(p.strided(dpre.number, t.shape, t.stride()), (0, 1))
    return dx, dw, db


def _by_group(p: Tape, t: Operand) -> Operand:
    """``reference.by_group``."""
    like = torch.empty_strided(t.tensor.shape, t.tensor.stride(), device="meta")
    found = reference.by_group(like)
    if found.untyped_storage()._cdata == like.untyped_storage()._cdata:  # a view
        return Operand(found, p.strided(t.number, found.shape, found.stride()))
    rows = t.tensor.permute(2, 0, 1, 3)
    number = p.dense(p.strided(t.number, rows.shape, rows.stride()))
    return Operand(found, p.view(number, found.shape))


def _product(
    p: Tape,
    t: Operand,
    rows: Operand,
    w: Operand,
    order: str,
    shape: tuple[int, ...],
    bias: int | None = None,
) -> int:
    """``reference.product`` of t, whose groups are ``rows``, in that shape of the user's."""
    batch, length, groups, _ = t.tensor.shape
    like = laid_out((batch, length, groups, w.tensor.shape[2]), order, t.tensor.dtype)
    out = p.empty(shape, t.tensor.dtype, t.number)
    apart = like.permute(2, 0, 1, 3)
    if reference.copied(t.tensor, order):
        assert bias is None
        made = p.view(p.batched(rows.number, w.number), apart.shape)
        p.copy(p.strided(out, apart.shape, apart.stride()), made)
        return out
    flat = apart.view(groups, batch * length, -1)
    into = p.strided(out, flat.shape, flat.stride())
    if bias is None:
        p.batched(rows.number, w.number, into=into)
    else:
        p.copy(p.strided(out, like.shape, like.stride()), bias)
        p.accumulate_batched(into, rows.number, w.number)
    return out
