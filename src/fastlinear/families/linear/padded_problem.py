"""Which Problems the backend ``padded`` serves, and what it copies for them."""

from __future__ import annotations

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.linear.problem import WHOLE_BACKWARD

MULTIPLE = 16  # elements: what kernels' pointers and tensor maps want of a row's length
_LARGEST_ELEMENTS = 1 << 28  # of a copy
_UNREADABLE = ("strided", "rows_odd")


def padded_size(size: int) -> int:
    """The next multiple, at least ``size``."""
    return -(-size // MULTIPLE) * MULTIPLE


def row_length(size: int, itemsize: int) -> int:
    """Numbers from row to row of so many, where rows begin on 16 bytes."""
    return padded_size(size) if size * itemsize % 16 else size


def writes_odd_rows(p: Problem, capability: tuple[int, int]) -> bool:
    """Whether the product of copies writes rows of any length itself, as ``cuda``'s does."""
    able = p.dtype in ("bfloat16", "float16") and capability == (9, 0)
    return able and _wants_own_product(p)


def _wants_own_product(p: Problem) -> bool:
    """Whether another product than ``cuda``'s would need more copies: results have odd rows, or
    weights lie turned. Of any other piece dispatch chooses the aligned product."""
    k, n = p.dim("K") % MULTIPLE > 0, p.dim("N") % MULTIPLE > 0
    odd = {"forward": n, "grad_input": k}.get(p.piece, k or n)
    turned = p.option("w") == "kn" and p.piece != "grad_weight"
    return odd or turned or p.piece == WHOLE_BACKWARD


def copied(p: Problem, odd_rows: bool, derived: bool = False) -> tuple[int, ...]:
    """How many numbers each copy of a piece takes, before its product and after it.

    Args:
        odd_rows: whether the GPU has a product that writes odd rows; see ``writes_odd_rows``.
        derived: whether dpre is at hand as a copy.
    """
    if p.piece == WHOLE_BACKWARD:
        pieces = map(p.with_piece, ("grad_input", "grad_weight"))
        return tuple(n for q in pieces for n in copied(q, odd_rows, derived))
    odd_rows = odd_rows and _wants_own_product(p)
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    odd_k, odd_n = k % MULTIPLE > 0, n % MULTIPLE > 0
    cut_k, cut_n = (odd and not odd_rows for odd in (odd_k, odd_n))
    turned = odd_rows and p.option("w") == "kn"
    x = m * k * (odd_k or p.option("x") in _UNREADABLE)
    w = k * n * (odd_k or cut_n or turned or p.option("w") in _UNREADABLE)
    dpre = m * n * (odd_n and not derived)
    if p.piece == "grad_input":
        return dpre, w, m * k * cut_k
    if p.piece == "grad_weight":
        return dpre, x, k * n * (cut_k or cut_n)
    y = m * n * cut_n
    pre = y * (p.needs_grad and activation_of(p.option("activation")).saved == "pre")
    return x, w, n * (cut_n and p.option("bias") == "yes"), y, pre


def reason_not(p: Problem, odd_rows: bool = False) -> str | None:
    """Why ``padded`` cannot serve a Problem of ``forward``, ``grad_input``, ``grad_weight`` or the
    whole backward on a GPU; ``odd_rows``: see ``writes_odd_rows``."""
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    if min(m, k, n) == 0:
        return "nothing is to be computed"
    if not any(copied(p, odd_rows)):
        return f"nothing is to be copied: rows are of multiples of {MULTIPLE} already, and lie well"
    if max(m * k, m * n, k * n) > _LARGEST_ELEMENTS:
        return f"its copies would take more than {_LARGEST_ELEMENTS} elements"
    return None
