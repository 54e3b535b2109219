"""How the backends of ragged_linear want tensors to lie, in Python and as steps of a tape."""

from __future__ import annotations

from torch import Tensor

from fastlinear.ops.common.tape import Tape
from fastlinear.ops.grouped_linear.operands import Operand


def has_rows(t: Tensor) -> bool:
    """Whether a matrix has contiguous rows that do not overlap."""
    return t.stride(1) == 1 and t.stride(0) >= t.shape[1]


def with_rows(t: Tensor) -> Tensor:
    """t, or a copy with contiguous rows."""
    t = t.resolve_neg()
    return t if has_rows(t) else t.contiguous()


def dense(p: Tape, t: Operand) -> Operand:
    """The tensor, copied unless it is contiguous."""
    return t if t.tensor.is_contiguous() else Operand(t.tensor.contiguous(), p.dense(t.number))


def dense_rows(p: Tape, t: Operand) -> Operand:
    """``with_rows`` as a step."""
    return t if has_rows(t.tensor) else dense(p, t)
