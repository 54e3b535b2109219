"""Gradients by PyTorch's own ops, which can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def gradients(
    run: Callable[..., Any],
    tensors: Sequence[Tensor | None],
    needs: Sequence[bool],
    dys: Any,
) -> tuple[Tensor | None, ...]:
    """A gradient for each of the tensors, None where it is not wanted or there is no tensor.

    Args:
        run: the tensors → the result or results, by differentiable ops.
        needs: which gradients are wanted.
        dys: the gradient of the result, or of each.
    """
    # Views make each argument a node of its own: one may depend on another, or two be one tensor,
    # and each gradient must stop at its argument.
    with torch.enable_grad():
        own = [None if t is None else t.view_as(t) for t in tensors]
        wanted = [t for t, need in zip(own, needs, strict=True) if need and t is not None]
        found = iter(torch.autograd.grad(run(*own), wanted, dys, create_graph=True))
    pairs = zip(own, needs, strict=True)
    return tuple([next(found) if need and t is not None else None for t, need in pairs])
