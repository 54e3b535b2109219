"""ragged_linear by PyTorch's products, a group at a time, into memory that all groups share."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.families.grouped.ragged.validation import counted
from fastlinear.op import differentiable


def loop(
    x: Tensor, weight: Tensor, group_sizes: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """act(x_g W_gᵀ + b_g) by one product of PyTorch a group; the sizes are read on the host.

    Raises:
        InputError: a size is negative, or their sum passes the number of rows.
    """
    sizes = counted(group_sizes, x.shape[0])
    given = [t for t in (x, weight, bias) if t is not None]
    watched = calls.transforms_active() or calls.watched()
    if watched or torch.compiler.is_compiling() or any(type(t) not in calls.PLAIN for t in given):
        return composed(x, weight, bias, sizes, activation)
    if torch.is_grad_enabled() and any(t.requires_grad for t in given):
        y: Tensor = Products.apply(x, weight, bias, sizes, activation)
        return y
    return forward(x, weight, sizes, bias, activation, False)[0]


def forward(
    x: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None]:
    """(y, pre if asked), (T, N) each; rows after the last group's are 0 in y.

    Args:
        x: (T, K).
        weight: (G, N, K).
        sizes: rows of each group, which sum to at most T.
        bias: (G, N), or None.
        activation: its name.
        save_pre: also return the pre-activation.
    """
    total = sum(sizes)
    pre = x.new_empty(x.shape[0], weight.shape[1])
    _multiply(pre, x, weight.transpose(1, 2), sizes, bias)
    pre[total:].zero_()
    if activation == "none":
        return pre, pre if save_pre else None
    y = activation_of(activation).value(pre)
    y[total:].zero_()
    return y, pre if save_pre else None


def gradients(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    sizes: Sequence[int],
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, dW, db), each None where not needed; exact zeros for rows of no group and for groups
    without rows."""
    total = sum(sizes)
    dpre = dy if saved is None else activation_of(activation).backward(dy, saved)
    dx = dw = db = None
    if needs[0]:
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        _multiply(dx, dpre, weight, sizes, None)
        dx[total:].zero_()
    if needs[1]:
        dw = torch.empty_like(weight, memory_format=torch.contiguous_format)
        for g, (a, b) in enumerate(_bounds(sizes)):
            if a < b:
                torch.mm(dpre[a:b].t(), x[a:b], out=dw[g])
            else:
                dw[g].zero_()
    if needs[2]:
        db = dpre.new_empty(weight.shape[:2])
        for g, (a, b) in enumerate(_bounds(sizes)):
            torch.sum(dpre[a:b], 0, out=db[g])
    return dx, dw, db


def _multiply(
    out: Tensor, rows: Tensor, matrices: Tensor, sizes: Sequence[int], bias: Tensor | None
) -> None:
    """out[rows of g] = rows of g @ matrices[g] + bias[g]."""
    groups, size = len(sizes), sizes[0]
    if size and rows.device.type == "cpu" and min(sizes) == max(sizes):
        given, found = (t[: groups * size].unflatten(0, (groups, size)) for t in (rows, out))
        if bias is None:
            torch.bmm(given, matrices, out=found)
        else:
            torch.baddbmm(bias[:, None], given, matrices, out=found)
        return
    for g, (a, b) in enumerate(_bounds(sizes)):
        if a == b:
            continue
        if bias is None:
            torch.mm(rows[a:b], matrices[g], out=out[a:b])
        else:
            torch.addmm(bias[g], rows[a:b], matrices[g], out=out[a:b])


def _bounds(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """First row of each group, and the one after its last."""
    found, begin = [], 0
    for size in sizes:
        found.append((begin, begin + size))
        begin += size
    return found


class Products(torch.autograd.Function):
    """The autograd formula over these."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        sizes: Sequence[int],
        activation: str,
    ) -> Tensor:
        """y (T, N)."""
        kind = activation_of(activation).saved
        y, pre = forward(x, weight, sizes, bias, activation, kind == "pre")
        ctx.save_for_backward(x, weight, bias, {"none": None, "output": y, "pre": pre}[kind])
        ctx.call = sizes, activation
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        """(dx, dW, db, None, None); by differentiable ops where a graph or a transform asks."""
        x, weight, bias, saved = ctx.saved_tensors
        sizes, activation = ctx.call
        need_x, need_weight, need_bias = calls.wanted(ctx)[:3]
        needs = need_x, need_weight, need_bias
        # batched and dual gradients have no rules for products into given memory
        if not torch.is_grad_enabled() and not calls.beyond_memory(dy):
            return (*gradients(dy, saved, x, weight, sizes, activation, needs), None, None)
        run = partial(composed, sizes=sizes, activation=activation)
        return (*differentiable.gradients(run, (x, weight, bias), needs, dy), None, None)


def composed(
    x: Tensor, weight: Tensor, bias: Tensor | None, sizes: Sequence[int], activation: str
) -> Tensor:
    """The same by PyTorch's differentiable ops alone."""
    value = activation_of(activation).value
    parts = x.split([*sizes, x.shape[0] - sum(sizes)])
    weights = weight.unbind()  # one backward for all; of weight[g] each makes zeros of all groups
    biases = [None] * len(weights) if bias is None else bias.unbind()
    rows = [
        value(torch.nn.functional.linear(part, w, b))
        for part, w, b in zip(parts[:-1], weights, biases, strict=True)
        if part.shape[0]
    ]
    y = torch.cat([*rows, parts[-1].new_zeros(parts[-1].shape[0], weight.shape[1])])
    if rows:
        return y
    # no row has a group: still a function of all, whose gradients are zeros
    return y + 0 * (x[:0].sum() + weight[:, :0].sum() + (0 if bias is None else bias[:, :0].sum()))
