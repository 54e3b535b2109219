"""Linears written on parameters, ``F.linear(x, self.w, self.b)`` and the like: what a rewritten
forward knows of one, and what it calls in its place.

The parameters are looked up at each call, from the module whose forward it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.core.calls import PLAIN
from fastlinear.profile.equations import Linear

LINEAR, ADDMM, SUM, EINSUM = "linear", "addmm", "sum", "einsum"


@dataclass(frozen=True)
class FunctionalLinear:
    """A linear written on parameters.

    Attributes:
        weight, bias: the names that lead to its parameters; of no bias None.
        turned: whether the weight is (K, N).
        form: ``LINEAR`` (``F.linear``), ``ADDMM``, or ``SUM``: a product, and a bias added to it;
            ``EINSUM``: the same with that product written as ``equation`` says.
        equation: of ``EINSUM``.
    """

    weight: tuple[str, ...]
    bias: tuple[str, ...] | None
    turned: bool
    form: str
    equation: Linear | None = None

    def tensors(self, parent: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """The weight as (N, K) and the bias as they are now; None where one is no plain parameter
        any more, or where for such an input it is no linear."""
        weight = _parameter(parent, self.weight)
        bias = None if self.bias is None else _parameter(parent, self.bias)
        if weight is None or (bias is None) is not (self.bias is None):
            return None
        rank = 2 if self.form == ADDMM else self.equation and self.equation.rank
        if (rank is not None and x.dim() != rank) or (
            # autocast does not cast what is added by itself
            self.form in (SUM, EINSUM)
            and bias is not None
            and torch.is_autocast_enabled(x.device.type)
        ):
            return None
        return (weight.t() if self.turned else weight), bias

    def plain(self, parent: nn.Module, x: Tensor) -> Tensor:
        """The linear as the forward has it."""
        bias = None if self.bias is None else _attribute(parent, self.bias)
        return self.compute(x, _attribute(parent, self.weight), bias)

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The linear as the forward has it, of these parameters."""
        if self.form == LINEAR:
            return F.linear(x, weight.t() if self.turned else weight, bias)
        weight = weight if self.turned else weight.t()
        if self.form == ADDMM:
            assert bias is not None
            return torch.addmm(bias, x, weight)
        if self.equation is not None:
            w = weight if self.equation.turned else weight.t()
            y = torch.einsum(self.equation.equation, x, w)
        else:
            y = x @ weight
        return y if bias is None else y + bias


class AsLayer(nn.Module):
    """A linear written on parameters as a layer that shares them: it is tried and timed by that."""

    def __init__(self, linear: FunctionalLinear, parent: nn.Module) -> None:
        super().__init__()
        self.linear = linear
        self.weight = _attribute(parent, linear.weight)
        self.bias = None if linear.bias is None else _attribute(parent, linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(..., K) → (..., N)."""
        return self.linear.compute(x, self.weight, self.bias)


def _parameter(module: nn.Module, path: tuple[str, ...]) -> Tensor | None:
    here: Any = module
    for name in path[:-1]:
        here = here.__dict__["_modules"].get(name)
        if here is None:
            return None
    found = here.__dict__["_parameters"].get(path[-1])
    return found if type(found) in PLAIN else None


def _attribute(module: nn.Module, path: tuple[str, ...]) -> Any:
    here: Any = module
    for name in path:
        here = getattr(here, name)
    return here
