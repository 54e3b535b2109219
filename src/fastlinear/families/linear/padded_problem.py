"""Which Problems the backend ``padded`` serves."""

from __future__ import annotations

from fastlinear.core.problem import Problem

MULTIPLE = 16  # elements: what kernels' pointers and tensor maps want of a row's length
_LARGEST_ELEMENTS = 1 << 28  # of a copy


def padded_size(size: int) -> int:
    """The next multiple, at least ``size``."""
    return -(-size // MULTIPLE) * MULTIPLE


def aligned(p: Problem) -> bool:
    """Whether rows of K and of N features begin at multiples of 16 elements."""
    return p.dim("K") % MULTIPLE == 0 and p.dim("N") % MULTIPLE == 0


def reason_not(p: Problem) -> str | None:
    """Why ``padded`` cannot serve a Problem of ``forward``, ``grad_input`` or ``grad_weight`` on a
    GPU."""
    if aligned(p):
        return f"K and N are multiples of {MULTIPLE} already"
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    if min(m, k, n) == 0:
        return "nothing is to be computed"
    if max(m * k, m * n, k * n) > _LARGEST_ELEMENTS:
        return f"its copies would take more than {_LARGEST_ELEMENTS} elements"
    return None
