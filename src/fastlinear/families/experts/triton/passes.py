"""The passes between the products by Triton, on sm_80 and later. Importing this imports Triton."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import math_of
from fastlinear.families.experts.gate import Gate
from fastlinear.families.experts.triton.kernels import (
    _combine_kernel,
    _expert_gate_bwd_kernel,
    _expert_gate_fwd_kernel,
    _gather_kernel,
    _sort_kernel,
)
from fastlinear.families.grouped.ragged.layout import with_rows
from fastlinear.families.grouped.triton import tensors
from fastlinear.families.grouped.triton.config import padded
from fastlinear.kernels.triton.launch import Launch

_MOST_SLOTS = 4096  # that a program of the sort looks at together
_NUMBERS = 2048  # of a tile
_plans: dict[Any, Launch] = {}


def sort(index: Tensor, first: int, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order (S,), place (S,), sizes (E,)), int32, of topk_index (T, k), in one launch.

    order is the slot at each place, stably sorted by expert; place the reverse, -1 for slots whose
    expert is none of those from ``first`` on. Those come last, and count in no size.
    """
    index = index.contiguous()
    slots = index.numel()
    order, place, sizes = (
        torch.empty(size, dtype=torch.int32, device=index.device)
        for size in (slots, slots, experts)
    )
    block = min(_MOST_SLOTS, padded(slots))
    rest = (slots, experts, first, block)
    _run(
        _sort_kernel,
        (experts + 1,),
        rest,
        (index, order, place, sizes),
        warps=8 if block > 1024 else 4,
    )
    return order, place, sizes


def gather(x: Tensor, order: Tensor, top: int, weight: Tensor | None = None) -> Tensor:
    """The row of its token at each place, (S, H), dense; times its slot's weight where given.

    Args:
        x: (T, H).
        order: (S,).
        top: k.
        weight: (T, k), contiguous, or None.
    """
    x, slots, h = with_rows(x), order.shape[0], x.shape[1]
    out = tensors.vector((slots, h), x)
    block_m, block_n = _tile(h)
    columns = -(-h // block_n)
    rest = (slots, columns, x.stride(0), top, h, block_m, block_n)
    grid = (-(-slots // block_m) * columns,)
    _run(_gather_kernel, grid, rest, (x, order, weight, out), warps=4)
    return tensors.rounded(out, x)


def combine(rows: Tensor, place: Tensor, top: int, weight: Tensor | None = None) -> Tensor:
    """y (T, H): the rows of each token's slots, times their weights where given, in their order.

    Args:
        rows: (S, H), dense, by place.
        place: (S,).
        top: k.
        weight: (T, k), contiguous, or None.
    """
    slots, h = rows.shape
    tokens = slots // top
    out = tensors.vector((tokens, h), rows)
    block_m, block_n = _tile(h)
    columns = -(-h // block_n)
    rest = (tokens, columns, top, h, block_m, block_n)
    grid = (-(-tokens // block_m) * columns,)
    _run(_combine_kernel, grid, rest, (rows, place, weight, out), warps=4)
    return tensors.rounded(out, rows)


def gate_forward(pre: Tensor, gate: Gate) -> Tensor:
    """h (S, I), dense, of pre (S, 2I), dense."""
    slots, size = pre.shape[0], pre.shape[1] // 2
    h = tensors.vector((slots, size), pre)
    block_m, block_n = _tile(size)
    columns = -(-size // block_n)
    rest = (slots, size, columns, pre.stride(0), *_constants(pre, gate), block_m, block_n)
    grid = (-(-slots // block_m) * columns,)
    _run(_expert_gate_fwd_kernel, grid, rest, (*gate.split(pre), h), warps=4)
    return tensors.rounded(h, pre)


def gate_backward(
    dh: Tensor,
    pre: Tensor,
    gate: Gate,
    order: Tensor,
    index: Tensor,
    weight: Tensor,
    first: int,
    experts: int,
    dy: Tensor,
    bias: Tensor | None,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dpre (S, 2I), w h (S, I), dweight (T, k)), each None where not needed, in one pass.

    Args:
        dh: dy W_down (S, I), dense.
        pre: (S, 2I), dense.
        order: (S,).
        index, weight: (T, k), contiguous.
        dy: (S, H), dense, by place.
        bias: of the down projection (E, H), contiguous, or None.
        needs: which results are wanted.
    """
    slots, size = dh.shape
    dpre = tensors.vector(tuple(pre.shape), pre) if needs[0] else None
    h = tensors.vector((slots, size), dh) if needs[1] else None
    dweight = tensors.vector(tuple(weight.shape), weight) if needs[2] else None
    block_m, block_n = _tile(size)
    rest = (
        *(slots, size, dy.shape[1], experts, first, pre.stride(0)),
        *(*_constants(pre, gate), block_m, block_n),
    )
    halves = (None, None) if dpre is None else gate.split(dpre)
    given = (dh, *gate.split(pre), *halves, h, order, index, weight, dweight)
    grid = (-(-slots // block_m),)
    _run(_expert_gate_bwd_kernel, grid, rest, (*given, dy, bias), warps=4)
    return (
        None if dpre is None else tensors.rounded(dpre, pre),
        None if h is None else tensors.rounded(h, dh),
        None if dweight is None else tensors.rounded(dweight, weight),
    )


def _tile(h: int) -> tuple[int, int]:
    """Rows and columns of a tile: as wide as rows of so many, up to 512."""
    columns = min(512, padded(h))
    return _NUMBERS // columns, columns


def _constants(pre: Tensor, gate: Gate) -> tuple[Any, ...]:
    step = 2 if gate.order == "interleaved" else 1
    numbers = gate.limit, gate.alpha, gate.offset
    return gate.activation, math_of(pre.dtype), *numbers, step


def _run(kernel: Any, grid: tuple[int, ...], rest: Any, given: Any, *, warps: int) -> None:
    """Launch a kernel; what a launch is made for is remembered."""
    key = (kernel, rest, *tensors.facts_of(*given))
    launch = _plans.get(key)
    if launch is None:
        if len(_plans) >= tensors.MAX_PLANS:
            _plans.clear()
        launch = _plans[key] = Launch(kernel, grid, rest, given[0].device, warps=warps)
    launch(*given)
