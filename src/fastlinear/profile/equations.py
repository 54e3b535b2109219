"""Equations of ``torch.einsum`` that are a linear's, or a product number by number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_REST = "..."


@dataclass(frozen=True)
class Linear:
    """An equation of x (..., K) and a weight.

    Attributes:
        x: which of the two operands x is.
        turned: whether the weight is (K, N), not (N, K).
        rank: of x; None where it may be any.
    """

    x: int
    turned: bool
    rank: int | None

    @property
    def equation(self) -> str:
        """The same with x first."""
        lead = _REST if self.rank is None else "abcdefghij"[: self.rank - 1]
        return f"{lead}k,{'kn' if self.turned else 'nk'}->{lead}n"


def linear(equation: Any) -> Linear | None:
    """What linear an equation is, or None."""
    operands, result = _parts(equation)
    if len(operands) != 2:
        return None
    for i, (x, w) in enumerate((operands, operands[::-1])):
        lead, k = x[:-1], x[-1:]
        letters = lead.removeprefix(_REST)
        if len(w) != 2 or not w.isalpha() or k not in w or w[0] == w[1]:
            continue
        n = w.replace(k, "")
        alike = len({*letters, k, n}) == len(letters) + 2 and (letters + k).isalpha()
        if alike and result == lead + n and len(letters) < 10:
            rank = None if lead.startswith(_REST) else len(letters) + 1
            if rank is not None or not letters:  # "...ab" of x: as any rank from 3 on
                return Linear(i, w[0] == k, rank)
    return None


def is_product(equation: Any) -> bool:
    """Whether it multiplies two values of one shape number by number."""
    operands, result = _parts(equation)
    letters = result.removeprefix(_REST)
    return operands == [result, result] and len(set(letters)) == len(letters)


def _parts(equation: Any) -> tuple[list[str], str]:
    if not isinstance(equation, str) or "->" not in equation:
        return [], ""
    given, _, result = equation.replace(" ", "").partition("->")
    return given.split(","), result
