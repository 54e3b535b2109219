"""Tensors as the kernels for many rows read them, by TMA."""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.families.linear.padded import aligned_copy
from fastlinear.families.linear.padded_problem import padded_size
from fastlinear.families.mlp.cuda.rows import COPIES_KERNEL, copies_source
from fastlinear.families.mlp.cuda.rows_plans import CopiesPlan
from fastlinear.families.mlp.reference import Weights
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.prepared import Plans

_copies_plans: Plans[CopiesPlan] = Plans()


def rows_of(t: Tensor) -> Tensor:
    """A matrix whose columns lie side by side."""
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def on_16_bytes(t: Tensor) -> bool:
    """Whether TMA can read rows of t."""
    apart = t.stride(0) >= t.shape[1] and t.stride(0) % 8 == 0
    return t.stride(1) == 1 and apart and t.data_ptr() % 16 == 0


def aligned(matrix: Tensor) -> Tensor:
    """A matrix as TMA reads it: rows of contiguous numbers that begin on 16 bytes."""
    if on_16_bytes(matrix):
        return matrix
    copied = aligned_copy(matrix)[:, : matrix.shape[1]]
    if on_16_bytes(copied):
        return copied
    return matrix.clone(memory_format=torch.contiguous_format)  # of rows long enough, but misplaced


def all_aligned(weights: Weights) -> list[Tensor]:
    """Weights as TMA reads them: those that are not so are copied."""
    found = list(weights)
    odd = [i for i, weight in enumerate(weights) if not on_16_bytes(weight)]
    if not odd:
        return found
    for i in odd:
        found[i] = pitched(weights[i], weights[i].shape[1])
    given = [*(weights[i] for i in odd), *(found[i] for i in odd)]
    device = given[0].device
    key = tuple([(*t.shape, *t.stride()) for t in given]), device.index

    def plan() -> CopiesPlan:
        with compiled.current(device.index):
            return CopiesPlan(
                compiled.kernel(copies_source(), COPIES_KERNEL, 0, device.index), given
            )

    _copies_plans.of(key, plan).run(*given)
    return found


def pitched(like: Tensor, columns: int) -> Tensor:
    """New memory (M, columns) whose rows begin on 16 bytes."""
    return like.new_empty(like.shape[0], padded_size(columns))[:, :columns]
