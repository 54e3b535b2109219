"""What a call of unequal_linear is made of: sizes, and buffers that results of all groups share.

Operands are tensors, or numbers of tensors of a fast path's tape: what is computed where is said
once for both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

_ALIGN = 64  # bytes at which each result begins
_MAX_LAYOUTS = 1024
_MOST_PITCH = 2**31 - 1

Sizes = tuple[tuple[int, int, int], ...]
"""(M, N, K) of each group."""
Shape = tuple[int, ...]
Piece = tuple[Any, Shape, int] | None
"""A buffer, the shape of a dense result in it, and how many numbers lie before that."""
Make = Callable[[int], Any]
"""Numbers → a new buffer of so many."""


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
    xs: Sequence[Any]
    x_pitch: tuple[int, ...]
    weights: Sequence[Any]
    biases: Sequence[Any]
    y: Any
    pre: Any
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
    dys: Sequence[Any]
    dy_pitch: tuple[int, ...]
    saved: Sequence[Any] | None
    pre: Any
    offsets: tuple[int, ...]
    xs: Sequence[Any]
    x_pitch: tuple[int, ...]
    weights: Sequence[Any]
    dx: Any
    dw: Any
    db: Any
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


def pitches_of(tensors: Sequence[Tensor | None]) -> tuple[int, ...]:
    """Of each; its features for one that has to be copied first, 0 for one that is not read."""
    found = [0 if t is None else pitch_of(t) for t in tensors]
    pairs = zip(tensors, found, strict=True)
    return tuple([t.shape[-1] if p is None and t is not None else p or 0 for t, p in pairs])


def input_shapes(dys: Sequence[Tensor | None], sizes: Sizes) -> list[Shape]:
    """Of the inputs, by the gradients of the results; () for a group whose result is not used."""
    pairs = zip(dys, sizes, strict=True)
    return [() if dy is None else (*dy.shape[:-1], k) for dy, (_, _, k) in pairs]


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


def forward_call(
    sizes: Sizes,
    activation: str,
    dtype: torch.dtype,
    operands: tuple[Sequence[Any], tuple[int, ...], Sequence[Any], Sequence[Any]],
    keeps_pre: bool,
    make: Make,
) -> Forward:
    """The call on inputs, their pitches, weights and biases, with buffers for its results."""
    total, offsets = y_offsets(sizes, dtype.itemsize)
    y = make(total)
    pre = make(total) if keeps_pre else None
    return Forward(sizes, activation, dtype, *operands, y, pre, offsets)


def backward_call(
    sizes: Sizes,
    activation: str,
    dtype: torch.dtype,
    operands: tuple[Sequence[Any], Sequence[Any] | None, Any, Sequence[Any], Sequence[Any]],
    pitches: tuple[tuple[int, ...], tuple[int, ...]],
    shapes: Sequence[Shape],
    needs: Sequence[bool],
    make: Make,
) -> tuple[Backward, list[Piece]]:
    """The call on dys, saved, pre, inputs and weights, with buffers for its results.

    Args:
        pitches: of the dys, and of the inputs.
        shapes: of the inputs.
        needs: whether gradients of each input, weight and bias are wanted; of biases either one a
            group or one for none.

    Returns:
        The call, and a piece or None for each of ``needs``.
    """
    dys, saved, pre, xs, weights = operands
    groups = len(sizes)
    offsets = y_offsets(sizes, dtype.itemsize)[1]
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
    layouts = [placed(count, dtype.itemsize) for count in counts]
    buffers = [
        make(total) if any(at is not None for at in places) else None for total, places in layouts
    ]
    dx_at, dw_at, db_at = (places for _, places in layouts)
    pieces: list[Piece] = []
    for shape, at in zip(shapes, dx_at, strict=True):
        pieces.append(None if at is None else (buffers[0], tuple(shape), at))
    for (_, n, k), need, at in zip(sizes, need_w, dw_at, strict=True):
        pieces.append((buffers[1], (n, k), at) if need and at is not None else None)
    for (_, n, _), at in zip(sizes, db_at, strict=True):
        pieces.append(None if at is None else (buffers[2], (n,), at))
    call = Backward(
        sizes,
        activation,
        dtype,
        dys,
        pitches[0],
        saved,
        pre,
        offsets,
        xs,
        pitches[1],
        weights,
        buffers[0],
        buffers[1],
        buffers[2],
        dx_at,
        dw_at,
        db_at,
    )
    return call, pieces[: len(needs)] + [None] * (len(needs) - len(pieces))


def taken(piece: Piece) -> Tensor | None:
    """The dense result that a piece of a tensor is, as a view of it."""
    if piece is None:
        return None
    buffer, shape, at = piece
    found: Tensor = buffer.as_strided(shape, _dense_strides(shape), at)
    return found


def result(buffer: Tensor, shape: Shape, at: int) -> Tensor:
    """The same as a tensor of its own, which may be changed in place."""
    memory = buffer.untyped_storage()
    return buffer.new_empty(0).set_(memory, at, shape, _dense_strides(shape))  # type: ignore[call-overload,no-any-return]


def _dense_strides(shape: Shape) -> list[int]:
    strides = [1] * len(shape)
    for i in range(len(shape) - 1, 0, -1):
        strides[i - 1] = strides[i] * max(1, shape[i])
    return strides
