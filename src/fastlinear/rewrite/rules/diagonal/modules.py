"""Modules that scale every feature by a number of its own, found by ``recognise``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastlinear.families.diagonal.op import diagonal_linear
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.rules.diagonal.recognise import recognise
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS

LAYER_SCALE, AFFINE, LINEAR = "layer_scale", "affine", "linear"


@dataclass(frozen=True, eq=False)
class Diagonal:
    """A module that computes act(x ∘ w + b).

    Attributes:
        fqn, module: the module.
        kind: ``"layer_scale"`` (x ∘ w alone), ``"affine"``, or ``"linear"``: an ``nn.Linear`` whose
            weight is exactly diagonal.
        activation: its name.
        weight, bias: names of the parameters; for a linear, weight is the matrix. Those of other
            modules may have shape (1, …, 1, K).
        minus: whether the bias is subtracted.
        in_place: whether the result is written over x.
    """

    fqn: str
    module: nn.Module
    kind: str
    activation: str
    weight: str
    bias: str | None
    minus: bool = False
    in_place: bool = False

    @property
    def features(self) -> int:
        """K."""
        return int(getattr(self.module, self.weight).shape[-1])

    def scale(self) -> Tensor:
        """The numbers it scales by: the module's own parameter, of a linear a new one."""
        weight: Tensor = getattr(self.module, self.weight)
        if self.kind != LINEAR:
            return weight
        kept = weight.detach().diagonal().clone()
        return nn.Parameter(kept, requires_grad=weight.requires_grad)

    def instead(self, weight: Tensor | None = None) -> Callable[[Tensor], Tensor]:
        """The same by ``diagonal_linear``, on ``scale()`` by default."""
        scale = self.scale() if weight is None else weight
        bias = None if self.bias is None else getattr(self.module, self.bias)

        def run(x: Tensor) -> Tensor:
            w, b = vector(scale), None if bias is None else vector(bias, self.minus)
            return diagonal_linear(x, w, b, activation=self.activation)

        return run

    def advice(self, module: str = "module") -> str:
        """The line that puts one in the place of the module, which is called so."""
        if self.kind == LINEAR:
            return f"fl.nn.DiagonalLinear.from_linear({module})"
        weight: Tensor = getattr(self.module, self.weight)
        if self.kind == LAYER_SCALE and weight.dim() == 1 and not self.in_place:
            return f"fl.nn.DiagonalLinear.from_layer_scale({module})"
        w, bias = written(f"{module}.{self.weight}", weight), ""
        if self.bias is not None:
            b = written(f"{module}.{self.bias}", getattr(self.module, self.bias), self.minus)
            bias = f", {b}"
        act = "" if self.activation == "none" else f", activation={self.activation!r}"
        return f"fl.diagonal_linear(x, {w}{bias}{act})"


def vector(parameter: Tensor, minus: bool = False) -> Tensor:
    """A parameter of shape (1, …, 1, K) as (K,), negated if asked for."""
    flat = parameter if parameter.dim() == 1 else parameter.flatten()
    return -flat if minus else flat


def written(name: str, parameter: Tensor, minus: bool = False) -> str:
    """The same as code on a parameter of that name."""
    flat = name if parameter.dim() == 1 else f"{name}.flatten()"
    return f"-{flat}" if minus else flat


def match(model: nn.Module) -> list[Diagonal]:
    """The diagonal modules of a model that no hook, parametrization or swap stands upon."""
    return list(_found(model))


def _found(model: nn.Module) -> Iterator[Diagonal]:
    for fqn, module in model.named_modules():
        if refuse_module(module) is not None:
            continue
        if type(module) in PLAIN_LINEARS:
            if _exactly_diagonal(module.weight):
                bias = None if module.bias is None else "bias"
                yield Diagonal(fqn, module, LINEAR, "none", "weight", bias)
            continue
        found = recognise(module)
        if not isinstance(found, str):
            plain = found.bias is None and found.activation == "none"
            kind = LAYER_SCALE if plain else AFFINE
            yield Diagonal(
                *(fqn, module, kind, found.activation, found.weight, found.bias),
                minus=found.minus,
                in_place=found.in_place,
            )


def _exactly_diagonal(weight: Tensor) -> bool:
    """Whether a matrix of two features or more is square, and zero off its diagonal."""
    if weight.dim() != 2 or weight.shape[0] != weight.shape[1] or weight.shape[0] < 2:
        return False
    full = weight.detach()
    return bool(torch.count_nonzero(full) == torch.count_nonzero(full.diagonal()))
