"""Memory of large results on a CPU, kept at hand for the next ones (``allocator.h``).

Pages of a new result cost more than most passes over it. Blocks of 32 MiB and more that are free
again are kept, as far as ``FASTLINEAR_KEEP_MIB`` allows; pages of those that are not used again
while others come and go the system may take where memory runs short. Smaller ones are malloc's,
which is had to keep as many bytes of them, 1 GiB at most, where the variable allows 64 MiB or more.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fastlinear.fastpath import autograd_node, recorder

LEAST = 1 << 25
"""Bytes of the results that this is for; malloc keeps smaller ones."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A new contiguous tensor on the CPU, uninitialised, as tapes make theirs."""
    large = math.prod(shape) * dtype.itemsize >= LEAST
    recorded = recorder.active() is not None  # a tape makes its own
    known = dtype in recorder.SCALAR_TYPES
    if recorded or not (large and known and autograd_node.begun()):
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    return autograd_node.empty(tuple(shape), recorder.SCALAR_TYPES[dtype])


def release_memory() -> int:
    """Give memory of results that is kept for the next ones back to the system.

    On the CPU only; a GPU's is PyTorch's own. Memory of tensors that exist is not touched.

    Returns:
        How many bytes it was, those that malloc had kept not counted.
    """
    return autograd_node.release_kept()
