"""Which Problems the backend ``padded`` serves."""

from __future__ import annotations

from fastlinear.core.problem import Problem
from fastlinear.families.linear.problem import WHOLE_BACKWARD

_READ = {"forward": "xw", "grad_input": "w", "grad_weight": "x", WHOLE_BACKWARD: "xw"}
MULTIPLE = 16  # elements: what kernels' pointers and tensor maps want of a row's length
_LARGEST_ELEMENTS = 1 << 28  # of a copy


def padded_size(size: int) -> int:
    """The next multiple, at least ``size``."""
    return -(-size // MULTIPLE) * MULTIPLE


def row_length(size: int, itemsize: int) -> int:
    """Numbers from row to row of so many, where rows begin on 16 bytes."""
    return padded_size(size) if size * itemsize % 16 else size


def aligned(p: Problem) -> bool:
    """Whether rows of K and of N features begin at multiples of 16 elements."""
    return p.dim("K") % MULTIPLE == 0 and p.dim("N") % MULTIPLE == 0


def apart(p: Problem) -> tuple[str, ...]:
    """Which of "x" and "w" a piece reads whose numbers do not lie in rows that can be loaded."""
    odd = ("strided", "rows_odd")
    return tuple(name for name in _READ[p.piece] if p.option(name) in odd)


def reason_not(p: Problem) -> str | None:
    """Why ``padded`` cannot serve a Problem of ``forward``, ``grad_input``, ``grad_weight`` or the
    whole backward on a GPU."""
    if aligned(p) and not apart(p):
        return f"K and N are multiples of {MULTIPLE} already, and rows lie well"
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    if min(m, k, n) == 0:
        return "nothing is to be computed"
    if max(m * k, m * n, k * n) > _LARGEST_ELEMENTS:
        return f"its copies would take more than {_LARGEST_ELEMENTS} elements"
    return None
