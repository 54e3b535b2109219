"""The Triton backend of ragged_linear as steps of a tape: the very launches that ran before.

Importing this file imports Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.ops.common.tape import Tape
from fastlinear.ops.grouped_linear.operands import Numbers, Operand, number_of
from fastlinear.ops.ragged_linear import triton
from fastlinear.ops.ragged_linear.layout import dense, dense_rows


def forward_steps(
    p: Tape,
    x: Operand,
    weight: Operand,
    sizes: Operand,
    bias: Operand | None,
    activation: str,
    save_pre: bool,
) -> tuple[int, int | None] | None:
    """``triton.forward``: the numbers of y and the pre-activation; None where it has not run."""
    flat = None if bias is None else dense(p, bias)
    given = (dense_rows(p, x), weight, flat, None, dense(p, sizes))
    return _product_steps(p, *given, activation, save_pre)


def backward_steps(
    p: Tape,
    dy: Operand,
    saved: Operand | None,
    x: Operand,
    weight: Operand,
    sizes: Operand,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> Numbers | None:
    """``triton.backward`` of a contiguous dy: the numbers of dx, dW and db; None where it has not
    run, or not as launches of ours."""
    sizes = dense(p, sizes)
    dx = dw = db = None
    if needs[0]:
        turned = Operand(weight.tensor.transpose(1, 2), weight.number)
        found = _product_steps(p, dy, turned, None, saved, sizes, activation, False)
        if found is None:
            return None
        dx = found[0]
    if needs[1] or needs[2]:
        x = dense_rows(p, x)
        (groups, n, k), dtype = weight.tensor.shape, x.tensor.dtype
        whole = None if saved is None else saved.tensor
        if needs[1] and triton.pytorch_pays(dy.tensor, whole, x.tensor):
            return None
        shapes = ((groups, n, k), (groups, n))
        likes = [_like(s, x) if need else None for s, need in zip(shapes, needs[1:], strict=True)]
        given = (dy, saved, x, sizes)
        facts = [None if t is None else t.tensor for t in given]
        launch = triton._plans.get(triton._weight_key(*facts, *likes, activation, None))
        if launch is None:
            return None
        dw, db = (None if t is None else p.empty(t.shape, dtype, x.number) for t in likes)
        tiles = {i: t.tensor for i, t in enumerate(given[:3]) if t is not None}
        if not p.launch(launch.in_fastpath((*map(number_of, given), dw, db), tiles)):
            return None
    return dx, dw, db


def _product_steps(
    p: Tape,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    saved: Operand | None,
    sizes: Operand,
    activation: str,
    save_pre: bool,
) -> tuple[int, int | None] | None:
    given = (x, weight, bias, saved, sizes)
    shape = (x.tensor.shape[0], weight.tensor.shape[1])
    facts = [None if t is None else t.tensor for t in given]
    launch = triton._plans.get(
        triton._product_key(*facts, _like(shape, x), activation, save_pre, None)
    )
    if launch is None:
        return None
    y = p.empty(shape, x.tensor.dtype, x.number)
    pre = p.empty(shape, x.tensor.dtype, x.number) if save_pre else None
    tiles = {}
    if launch.described:
        tiles = {0: x.tensor, 1: triton._flat(weight.tensor)}
        if saved is not None:
            tiles[3] = saved.tensor
    made = p.launch(launch.in_fastpath((*map(number_of, given), y, pre), tiles))
    return (y, pre) if made else None


def _like(shape: tuple[int, ...], x: Operand) -> Tensor:
    """What a step will make, without memory."""
    return torch.empty(shape, dtype=x.tensor.dtype, device="meta")
