"""Random inputs of Problems: what ``Family.make_inputs`` draws."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fastlinear.core.compare import clear_of_kinks
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem


class Draw:
    """(shape) → normal numbers times ``scale``, in the Problem's dtype on a device."""

    def __init__(self, p: Problem, device: torch.device, seed: int) -> None:
        self.dtype, self.device = FLOAT_DTYPES[p.dtype], device
        self.generator = torch.Generator(device=device).manual_seed(seed)

    def __call__(self, *shape: int, scale: float = 1.0) -> Tensor:
        values = torch.randn(shape, generator=self.generator, device=self.device)
        return (values * scale).to(self.dtype)


def linear_clear_of_kinks(
    x: Tensor, weight: Tensor, bias: Tensor | None, draw: Callable[[int, int], Tensor]
) -> Tensor:
    """``clear_of_kinks`` for one linear layer: x (M, K) whose pre-activations stay away from 0,
    where rounding would choose the gradient.

    Args:
        draw: (m, K) → so many new rows in x's dtype.
    """

    def pre_activations(rows: Tensor) -> tuple[Tensor]:
        b = None if bias is None else bias.to(rows.dtype)
        return (torch.nn.functional.linear(rows, weight.to(rows.dtype), b),)

    return clear_of_kinks(x, pre_activations, lambda rows: draw(rows, x.shape[1]))[0]
