"""Which Problems the backend ``padded`` serves, and which it is expected to pay for."""

from __future__ import annotations

from fastlinear.core.problem import Problem

MULTIPLE = 16  # elements: what kernels' pointers and tensor maps want of a row's length
_LOADABLE = 8
_LARGEST_ELEMENTS = 1 << 28  # of a copy
_LEAST_ROWS = 256  # below, the copy of the weight takes longer than the product
_LEAST_WORK = 1 << 30  # M K N from which its launches are hidden behind the product
_LEAST_WORK_CAPTURED = 1 << 28
_LEAST_WORK_SINGLE = 1 << 33  # in float32, whose products lose little on odd rows


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


def pays(p: Problem) -> bool:
    """Whether the copies were measured to cost less than they save, around such a Problem."""
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    if aligned(p) or m < _LEAST_ROWS:
        return False
    if p.dtype == "float32":
        return p.piece == "forward" and m * k * n >= _LEAST_WORK_SINGLE
    loadable = k % _LOADABLE == 0 and n % _LOADABLE == 0  # by PyTorch's products, 16 bytes at once
    return not loadable and m * k * n >= (_LEAST_WORK_CAPTURED if p.captured else _LEAST_WORK)
