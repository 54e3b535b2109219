"""What a call of unequal_linear is made of: sizes, and buffers that results of all groups share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fastlinear.fastpath import recorder

_ALIGN = 64  # bytes at which each result begins
_MAX_LAYOUTS = 1024
_MOST_PITCH = 2**31 - 1

Sizes = tuple[tuple[int, int, int], ...]
"""(M, N, K) of each group."""
Shape = tuple[int, ...]
Piece = tuple[Tensor, Shape, int]
"""A buffer, the shape of a dense result in it, and how many numbers lie before that."""
Maybe = Sequence[Tensor | None]


@dataclass(frozen=True)
class Forward:
    """y_g = act(x_g W_gᵀ + b_g): all operands are dense but inputs, of which rows are.

    Attributes:
        xs, weights, biases: one a group; of biases None for none.
        x_pitch: numbers from one row of each input to the next.
        y, pre: buffers of the results and, where kept, of the pre-activations.
        offsets: numbers before those of each group in both.
    """

    sizes: Sizes
    activation: str
    dtype: torch.dtype
    xs: Sequence[Tensor]
    x_pitch: tuple[int, ...]
    weights: Sequence[Tensor]
    biases: Maybe
    y: Tensor
    pre: Tensor | None
    offsets: tuple[int, ...]


@dataclass(frozen=True)
class Backward:
    """dx_g, dW_g and db_g of the groups that want them: all operands are dense but dys and inputs,
    of which rows are.

    Attributes:
        dys: one a group; None for one that is not used, and so for what no product reads.
        dy_pitch, x_pitch: numbers from one row of each dy, and of each input, to the next.
        saved: outputs, where the activation's derivative takes those.
        pre: buffer of the pre-activations, where it takes those; ``offsets`` are of each group.
        dx, dw, db: buffers, or None.
        dx_at, dw_at, db_at: numbers before those of each group; None for a group without. What has
            db has dW.
    """

    sizes: Sizes
    activation: str
    dtype: torch.dtype
    dys: Maybe
    dy_pitch: tuple[int, ...]
    saved: Maybe | None
    pre: Tensor | None
    offsets: tuple[int, ...]
    xs: Maybe
    x_pitch: tuple[int, ...]
    weights: Maybe
    dx: Tensor | None
    dw: Tensor | None
    db: Tensor | None
    dx_at: tuple[int | None, ...]
    dw_at: tuple[int | None, ...]
    db_at: tuple[int | None, ...]


def sizes_of(xs: Sequence[Tensor], weights: Sequence[Tensor]) -> Sizes:
    """Of inputs (..., K) and weights (N, K)."""
    found = []
    for x, w in zip(xs, weights, strict=True):
        shape = x.shape
        found.append((shape[0] if len(shape) == 2 else math.prod(shape[:-1]), *w.shape))
    return tuple(found)


def pitch_of(t: Tensor) -> int | None:
    """Numbers from one row of t, as (rows, features), to the next; None where rows are not dense or
    lie at several distances, or where a GPU would read a dense copy in larger steps."""
    if t.is_contiguous():
        return t.shape[-1]
    *rows, features = zip(t.shape, t.stride(), strict=True)
    if features[0] > 1 and features[1] != 1:
        return None
    pitch, count = None, 1
    for size, stride in reversed(rows):
        if size == 1:
            continue
        if pitch is None:
            pitch = stride
        elif stride != pitch * count:
            return None
        count *= size
    if pitch is None or pitch > _MOST_PITCH:
        return None
    if t.is_cuda and t.element_size() == 2:
        address = t.data_ptr() // 2
        if step_of(features[0] | pitch | address) < step_of(features[0]):
            return None
    return pitch


def step_of(numbers: int) -> int:
    """How many 16-bit numbers half.cu reads at once, by the lowest bit of all distances."""
    return 8 if numbers % 8 == 0 else 2 if numbers % 2 == 0 else 1


def pitches_of(tensors: Maybe) -> tuple[int, ...]:
    """Of each, which has one; 0 for one that is not read."""
    return tuple([0 if t is None else pitch_of(t) or 0 for t in tensors])


@lru_cache(maxsize=_MAX_LAYOUTS)
def placed(counts: tuple[int | None, ...], itemsize: int) -> tuple[int, tuple[int | None, ...]]:
    """Results of so many numbers in one buffer, None for no result: (numbers of all, numbers before
    each)."""
    unit = _ALIGN // itemsize
    total = 0
    found: list[int | None] = []
    for count in counts:
        found.append(None if count is None else total)
        total += -(-(count or 0) // unit) * unit
    return total, tuple(found)


def y_offsets(sizes: Sizes, itemsize: int) -> tuple[int, tuple[int, ...]]:
    """Numbers of the buffer of outputs, and numbers before each."""
    return placed(tuple([m * n for m, n, _ in sizes]), itemsize)  # type: ignore[return-value]


def buffer_of(count: int, like: Tensor) -> Tensor:
    """New memory of so many numbers."""
    return torch.empty(count, dtype=like.dtype, device=like.device)


def forward_call(
    sizes: Sizes,
    activation: str,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe,
    keeps_pre: bool,
) -> Forward:
    """The call on these operands, with buffers for its results."""
    first = xs[0]
    total, offsets = y_offsets(sizes, first.itemsize)
    y = buffer_of(total, first)
    pre = buffer_of(total, first) if keeps_pre else None
    given = xs, pitches_of(xs), weights, biases
    return Forward(sizes, activation, first.dtype, *given, y, pre, offsets)


def backward_call(
    sizes: Sizes,
    activation: str,
    dys: Maybe,
    saved: Maybe | None,
    pre: Tensor | None,
    xs: Maybe,
    weights: Maybe,
    needs: Sequence[bool],
) -> tuple[Backward, list[Piece | None]]:
    """The call on these operands, with buffers for its results.

    Args:
        needs: whether gradients of each input, weight and bias are wanted; of biases either one a
            group or one for none.

    Returns:
        The call, and a piece or None for each of ``needs``.
    """
    groups, first = len(sizes), next(dy for dy in dys if dy is not None)
    need_x, need_w, need_b = (needs[i * groups : (i + 1) * groups] for i in range(3))
    if len(need_b) != groups:
        need_b = (False,) * groups
    counts = (
        tuple([m * k if need else None for (m, _, k), need in zip(sizes, need_x, strict=True)]),
        tuple(
            [
                n * k if w or b else None
                for (_, n, k), w, b in zip(sizes, need_w, need_b, strict=True)
            ]
        ),
        tuple([n if need else None for (_, n, _), need in zip(sizes, need_b, strict=True)]),
    )
    layouts = [placed(count, first.itemsize) for count in counts]
    dx, dw, db = (
        buffer_of(total, first) if any(at is not None for at in places) else None
        for total, places in layouts
    )
    dx_at, dw_at, db_at = (places for _, places in layouts)
    shapes: tuple[list[tuple[int, ...]], ...] = (
        [
            () if dy is None else (*dy.shape[:-1], k)
            for dy, (_, _, k) in zip(dys, sizes, strict=True)
        ],
        [(n, k) for _, n, k in sizes],
        [(n,) for _, n, _ in sizes],
    )
    pieces: list[Piece | None] = []
    for buffer, (_, places), each in zip((dx, dw, db), layouts, shapes, strict=True):
        for shape, at in zip(each, places, strict=True):
            pieces.append(None if buffer is None or at is None else (buffer, shape, at))
    call = Backward(
        sizes,
        activation,
        first.dtype,
        dys,
        pitches_of(dys),
        saved,
        pre,
        y_offsets(sizes, first.itemsize)[1],
        xs,
        pitches_of(xs),
        weights,
        dx,
        dw,
        db,
        dx_at,
        dw_at,
        db_at,
    )
    return call, [p if need else None for p, need in zip(pieces, needs, strict=False)]


def taken(piece: Piece | None) -> Tensor | None:
    """The dense result that a piece of a tensor is, as a view of it."""
    if piece is None:
        return None
    buffer, shape, at = piece
    return buffer.as_strided(shape, _dense_strides(shape), at)


def result(buffer: Tensor, shape: Shape, at: int) -> Tensor:
    """The same as a tensor of its own, which may be changed in place; tapes make that of a view."""
    if recorder.active() is not None:
        return buffer.as_strided(shape, _dense_strides(shape), at)
    memory = buffer.untyped_storage()
    return buffer.new_empty(0).set_(memory, at, shape, _dense_strides(shape))  # type: ignore[call-overload,no-any-return]


def copies(results: Sequence[Tensor]) -> list[Tensor]:
    """Of the results of one buffer: views of one copy of it all."""
    first = results[0]
    memory = first.untyped_storage()
    whole = first.new_empty(0).set_(memory, 0, (memory.nbytes() // first.itemsize,), (1,))  # type: ignore[call-overload]
    copy = whole.clone()
    return [copy.as_strided(t.shape, t.stride(), t.storage_offset()) for t in results]


def _dense_strides(shape: Shape) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(1, shape[i])
    return strides
