"""What lies between an expert's two products: ``h = act(α g) / α · (u + offset)``.

Where there is a limit, g is clamped from above, and u from both sides.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.families.gated.stacking import halves

PLAIN = "inf 1.0 0.0"
"""The numbers of a gate that clamps, scales and shifts nothing, as an option of a call."""

_LEAST, _MOST = 1e-30, 1e30  # of float32, with room for what they meet


class Gate(NamedTuple):
    """A gate.

    Attributes:
        activation: its name.
        order: how gate and up lie in a row of 2I numbers, a name of ``stacking.STACKED``.
        limit: above which g, and beyond which u, are clamped; infinite for no limit.
        alpha: α.
        offset: what is added to u.
    """

    activation: str
    order: str
    limit: float
    alpha: float
    offset: float

    def split(self, pre: Tensor) -> tuple[Tensor, Tensor]:
        """(g, u) as views of pre (S, 2I)."""
        return halves(pre, None, self.order, 1)

    def value(self, pre: Tensor) -> Tensor:
        """h (S, I) by PyTorch's differentiable ops."""
        gate, up = self.split(pre)
        if self.limit != math.inf:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        act = activation_of(self.activation).value
        through = act(gate) if self.alpha == 1 else act(gate * self.alpha) / self.alpha
        return through * (up + self.offset if self.offset else up)


@lru_cache(maxsize=1024)
def gate_of(activation: str, order: str, numbers: str) -> Gate:
    """The gate of a call's options."""
    return Gate(activation, order, *map(float, numbers.split()))


def numbers_of(limit: Any, alpha: Any, offset: Any) -> str:
    """A gate's numbers as an option of a call.

    Raises:
        InputError: one of them is no number in its range.
    """
    if limit is None and alpha == 1 and offset == 0:
        return PLAIN
    limit = math.inf if limit is None else limit
    for name, value, fits, expected in (
        (
            "limit",
            limit,
            lambda v: v == math.inf or _LEAST <= v <= _MOST,
            f"None, or from {_LEAST} to {_MOST}",
        ),
        ("alpha", alpha, lambda v: _LEAST <= v <= _MOST, f"from {_LEAST} to {_MOST}"),
        ("up_offset", offset, lambda v: abs(v) <= _MOST, f"of at most {_MOST}"),
    ):
        if isinstance(value, bool) or not isinstance(value, int | float) or not fits(value):
            raise InputError(
                "experts",
                f"{name} to be {expected}",
                repr(value),
                "gpt-oss has limit=7.0, alpha=1.702 and up_offset=1.0.",
            )
    return f"{float(limit)} {float(alpha)} {float(offset)}"
