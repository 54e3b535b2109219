"""Copies of tokens between any strides, tile by tile: neither side is walked number by number.

Importing this file imports Triton, so it is imported lazily.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.families.grouped.triton import tensors
from fastlinear.families.grouped.triton.kernels import _copy_tokens_kernel
from fastlinear.kernels.triton.launch import Launch

_NUMBERS = 4096  # of a tile
_MOST_TOKENS = 64
_plans: dict[Any, Launch] = {}


def copy_tokens(t: Tensor, out: Tensor) -> None:
    """Write t (B, L, G, D) to ``out`` (B, L, G, E) and zeros behind D; both of any strides."""
    key = tensors.facts_of(t, out)
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= tensors.MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = _launch(t, out)
    plan(t, out)


def _launch(t: Tensor, out: Tensor) -> Launch:
    (batch, length, groups, d), e = t.shape, out.shape[3]
    block_l = min(_MOST_TOKENS, 1 << (length - 1).bit_length())
    block_e = min(_NUMBERS // block_l, 1 << (e - 1).bit_length())
    tiles = -(-length // block_l) * -(-e // block_e)
    rest = (length, groups, d, e, *t.stride(), *out.stride(), block_l, block_e)
    return Launch(_copy_tokens_kernel, (batch * groups * tiles,), rest, t.device, warps=4)
