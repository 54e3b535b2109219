"""Two matrices side by side in one launch, in rows that begin on 16 bytes.

PyTorch's concatenation leaves rows of 319 numbers, for example, which begin anywhere: kernels that
load 16 bytes at once have to copy them.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastlinear.core import calls
from fastlinear.families.linear.padded_problem import row_length
from fastlinear.kernels.cuda.prepared import Plans
from fastlinear.kernels.triton.launch import Launch

_BLOCK_M, _BLOCK_W = 64, 16  # of rows, and of words: 128 bytes side by side
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_plans: Plans[Launch] = Plans()
_is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor


def join(a: Tensor, b: Tensor) -> Tensor:
    """``torch.cat((a, b), -1)``, bit for bit, differentiable to any order.

    Args:
        a: (..., A) of any strides.
        b: (..., B), likewise.

    Returns:
        (..., A + B), a view of new memory. Of plain tensors of one dtype of 16 or 32 bits rows
        begin on 16 bytes, at the next multiple of 16 numbers where they would not. Others take
        torch.cat.
    """
    if not _serves(a, b):
        return torch.cat((a, b), -1)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return Join.apply(a, b)
    return _joined(a, b)


class Join(torch.autograd.Function):
    """``join`` of what its kernel serves."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        """(..., A) beside (..., B)."""
        ctx.columns = a.shape[-1]
        return _joined(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        """Views of the gradient."""
        return g[..., : ctx.columns], g[..., ctx.columns :]


def _serves(a: Tensor, b: Tensor) -> bool:
    """Whether a kernel may read both where they lie, and nobody watches PyTorch's ops."""
    if calls.unlike_plain((a, b)) or calls.watched() or a.is_neg() or b.is_neg():
        return False
    alike = a.dtype is b.dtype and a.device == b.device and a.shape[:-1] == b.shape[:-1]
    known = alike and a.dtype in _DTYPES and a.numel() > 0 and b.numel() > 0
    return known and not (_is_wrapped(a) or _is_wrapped(b))


def _joined(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() != 2:
        y = _joined(a.reshape(-1, a.shape[-1]), b.reshape(-1, b.shape[-1]))
        return y.view(*a.shape[:-1], y.shape[1])
    n = a.shape[1] + b.shape[1]
    out = a.new_empty(a.shape[0], row_length(n, a.itemsize))
    lie = a.shape, a.stride(), a.data_ptr() & 15, b.shape, b.stride(), b.data_ptr() & 15
    _plans.of((*lie, a.dtype, a.device), lambda: _launch(a, b, out))(a, b, out)
    return out.narrow(1, 0, n)


def _launch(a: Tensor, b: Tensor, out: Tensor) -> Launch:
    each = 8 // out.itemsize
    words = out.shape[1] // each
    sizes: list[int] = [*out.shape[:1], a.shape[1], b.shape[1], words]
    wide = []
    for t in (a, b):
        row, column = t.stride()
        wide.append(_in_words(t))
        sizes += row // each if wide[-1] else row, column
    grid = -(-out.shape[0] // _BLOCK_M) * -(-words // _BLOCK_W)
    rest = *sizes, each, -a.shape[1] % each, *wide, _BLOCK_M, _BLOCK_W
    return Launch(_join_kernel, (grid,), rest, out.device, warps=4)


def _in_words(t: Tensor) -> bool:
    """Whether rows are words of 8 bytes, at such addresses."""
    sizes = t.shape[1] * t.itemsize | t.stride(0) * t.itemsize | t.data_ptr()
    return t.stride(1) == 1 and sizes % 8 == 0


@triton.jit
def _part(
    ptr,
    row,
    word,
    known,
    first,
    columns,
    row_stride,
    column_stride,
    EACH: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDE: tl.constexpr,
):
    """What a matrix gives to words of EACH numbers of rows in which its columns begin at number
    ``first``, zeros elsewhere.

    A WIDE one is read by words, each of which lies in two of those, ``first`` + SHIFT being a
    multiple of EACH, and ``row_stride`` counts words. Others are read by numbers.
    """
    BITS: tl.constexpr = 64 // EACH
    if WIDE:
        words = ptr.to(tl.pointer_type(tl.uint64), bitcast=True) + row * row_stride
        at, count = word - (first + SHIFT) // EACH, columns // EACH
        found = tl.load(words + at, mask=known & (at >= 0) & (at < count), other=0)
        if SHIFT > 0:
            after = tl.load(words + at + 1, mask=known & (at >= -1) & (at + 1 < count), other=0)
            found = (found >> (SHIFT * BITS)) | (after << (64 - SHIFT * BITS))
    else:
        if EACH == 4:
            numbers = ptr.to(tl.pointer_type(tl.uint16), bitcast=True) + row * row_stride
        else:
            numbers = ptr.to(tl.pointer_type(tl.uint32), bitcast=True) + row * row_stride
        found = tl.zeros(known.shape, tl.uint64)
        for i in tl.static_range(EACH):
            column = (word * EACH + i - first).to(tl.int64)
            mask = known & (column >= 0) & (column < columns)
            number = tl.load(numbers + column * column_stride, mask=mask, other=0)
            found |= number.to(tl.uint64) << (i * BITS)
    return found


@triton.jit
def _join_kernel(
    a_ptr,
    b_ptr,
    out_ptr,
    M,
    A,
    B,
    words,
    a_row_stride,
    a_column_stride,
    b_row_stride,
    b_column_stride,
    EACH: tl.constexpr,
    SHIFT: tl.constexpr,
    WIDE_A: tl.constexpr,
    WIDE_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """One program writes BLOCK_M rows of BLOCK_W words of out (M, words of EACH numbers): a (M, A),
    b (M, B), then zeros."""
    across = tl.cdiv(words, BLOCK_W)
    first = tl.program_id(0) % across * BLOCK_W
    row = (tl.program_id(0) // across * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)[:, None]
    word = (first + tl.arange(0, BLOCK_W))[None, :]
    known = (row < M) & (word < words)
    found = tl.zeros(known.shape, tl.uint64)
    if first * EACH < A:
        strides = a_row_stride, a_column_stride
        found |= _part(a_ptr, row, word, known, 0, A, *strides, EACH, 0, WIDE_A)
    if (first + BLOCK_W) * EACH > A:
        strides = b_row_stride, b_column_stride
        found |= _part(b_ptr, row, word, known, A, B, *strides, EACH, SHIFT, WIDE_B)
    out = out_ptr.to(tl.pointer_type(tl.uint64), bitcast=True) + row * words
    tl.store(out + word, found, mask=known)
