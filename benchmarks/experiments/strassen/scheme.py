"""Strassen's scheme for y = x Wᵀ: block formulas, plane shapes and the error they bring.

Blocks are numbered as A = x, B = Wᵀ and C = y, cut in two along M, K and N:

    m1 = (A11 + A22)(B11 + B22)    m4 = A22 (B21 - B11)    C11 = m1 + m4 - m5 + m7
    m2 = (A21 + A22) B11           m5 = (A11 + A12) B22    C12 = m3 + m5
    m3 = A11 (B12 - B22)           m6 = (A21 - A11)(B11 + B12)
                                   m7 = (A12 - A22)(B21 + B22)
    C21 = m2 + m4                  C22 = m1 - m2 + m3 + m6

Strassen's own formulas rather than Winograd's: those save 3 of 18 additions, which cost nothing
inside a fused pointwise pass, and their error is larger (18 against 12 below).
"""

from __future__ import annotations

from dataclasses import dataclass

_PLANE_COLS = 16  # columns of a plane are a multiple of this, so that every row is aligned


@dataclass(frozen=True, slots=True)
class Scheme:
    """A bilinear scheme: ``name`` "strassen" (7 products a level) or "classical" (8).

    Attributes:
        name: which block formulas.
        levels: 1 or 2, how often the formulas are applied.
    """

    name: str
    levels: int

    @property
    def products(self) -> int:
        """Products of the batched GEMM."""
        base: int = 7 if self.name == "strassen" else 8
        return base if self.levels == 1 else base * base


Terms = tuple[tuple[int, int], ...]
"""A signed sum of blocks: (which, 1 or -1), blocks numbered 11, 12, 21, 22 → 0, 1, 2, 3."""


@dataclass(frozen=True, slots=True)
class Formulas:
    """One level of a scheme: product p is (left[p] of x)(right[p] of W)ᵀ; y from out of products.

    ``right`` is in the blocks of W (N, K), the transpose of B: B12 is W21ᵀ.
    """

    left: tuple[Terms, ...]
    right: tuple[Terms, ...]
    out: tuple[Terms, ...]


FORMULAS = {
    "strassen": Formulas(
        left=(
            ((0, 1), (3, 1)),
            ((2, 1), (3, 1)),
            ((0, 1),),
            ((3, 1),),
            ((0, 1), (1, 1)),
            ((2, 1), (0, -1)),
            ((1, 1), (3, -1)),
        ),
        right=(
            ((0, 1), (3, 1)),
            ((0, 1),),
            ((2, 1), (3, -1)),
            ((1, 1), (0, -1)),
            ((3, 1),),
            ((0, 1), (2, 1)),
            ((1, 1), (3, 1)),
        ),
        out=(
            ((0, 1), (3, 1), (4, -1), (6, 1)),
            ((2, 1), (4, 1)),
            ((1, 1), (3, 1)),
            ((0, 1), (1, -1), (2, 1), (5, 1)),
        ),
    ),
    "classical": Formulas(
        left=(
            ((0, 1),),
            ((1, 1),),
            ((0, 1),),
            ((1, 1),),
            ((2, 1),),
            ((3, 1),),
            ((2, 1),),
            ((3, 1),),
        ),
        right=(
            ((0, 1),),
            ((1, 1),),
            ((2, 1),),
            ((3, 1),),
            ((0, 1),),
            ((1, 1),),
            ((2, 1),),
            ((3, 1),),
        ),
        out=(((0, 1), (1, 1)), ((2, 1), (3, 1)), ((4, 1), (5, 1)), ((6, 1), (7, 1))),
    ),
}


def plane_size(size: int, levels: int, *, columns: bool) -> int:
    """Rows or columns of a plane of a matrix with ``size`` of them; the rest is zero padding."""
    part = -(-size >> levels)
    return -(-part // _PLANE_COLS) * _PLANE_COLS if columns else part


def norm_bound(k: int, levels: int) -> int:
    """c of the bound max|ŷ - x Wᵀ| ≤ c u max|x| max|W| + O(u²), by Higham's theorem 23.2.

    With h = k / 2^levels: c = 12^levels (h² + 5h) - 5k; the classical product has c = k². u is
    the unit rounding. Norm-wise only: a small y beside large ones is not computed to its own size.
    """
    h = plane_size(k, levels, columns=False)
    return int(12**levels * (h * h + 5 * h) - 5 * k) if levels else k * k


def error_growth(levels: int) -> int:
    """Ratio of the bounds for large k, ours to the classical one: 3 a level."""
    return int(3**levels)
