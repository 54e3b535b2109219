"""What a training call of gated_mlp keeps between forward and backward, besides the parameters."""

from __future__ import annotations

from collections.abc import Sequence

READERS = 0b0111111
"""The gradients, as bits, that read what is kept: all but the down bias's, which reads dy alone."""
_DOWN_WEIGHT = 0b0001000
"""It reads the pre-activations; no more than they leads to its second derivatives."""


def reads_kept(needs: Sequence[bool]) -> bool:
    """Whether any of the seven gradients that are wanted reads what is kept."""
    return any(needs[:6])


def readers_of_x(save_pre: bool) -> int:
    """The gradients, as bits, for which x is kept, where the pre-activations are or are not."""
    return READERS & ~_DOWN_WEIGHT if save_pre else READERS


def keeps_x(needs: Sequence[bool], save_pre: bool) -> bool:
    """Whether x is kept for the gradients that are wanted."""
    return any(need and readers_of_x(save_pre) >> i & 1 for i, need in enumerate(needs))
