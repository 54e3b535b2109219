"""The rule of diagonal_linear: modules that scale every feature by a number of its own.

It only matches; nothing here changes a model or measures anything. What a module computes is found
by computing it in float64, not by its name.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn

from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.diagonal_linear import reference
from fastlinear.ops.diagonal_linear.op import diagonal_linear
from fastlinear.rewrite.exchange.forwards import PLAIN_LINEARS
from fastlinear.rewrite.match.eligible import refuse_module

LAYER_SCALE, AFFINE, LINEAR = "layer_scale", "affine", "linear"
_ROWS = 32
_TOLERANCE = 1e-9
_REFUSALS = (  # what a forward of another kind may raise on a matrix of float64
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)


@dataclass(frozen=True, eq=False)
class Diagonal:
    """A module that computes act(x ∘ w + b).

    Attributes:
        fqn, module: the module.
        kind: ``"layer_scale"`` (x ∘ w alone), ``"affine"``, or ``"linear"``: an ``nn.Linear`` whose
            weight is exactly diagonal.
        activation: its name.
        weight, bias: names of the parameters; for a linear, weight is the matrix.
    """

    fqn: str
    module: nn.Module
    kind: str
    activation: str
    weight: str
    bias: str | None

    @property
    def features(self) -> int:
        """K."""
        return int(getattr(self.module, self.weight).shape[0])

    def instead(self) -> Callable[[Tensor], Tensor]:
        """The same by ``diagonal_linear``, on the module's own parameters."""
        weight: Tensor = getattr(self.module, self.weight)
        if self.kind == LINEAR:
            kept = weight.detach().diagonal().clone()
            weight = nn.Parameter(kept, requires_grad=weight.requires_grad)
        bias = None if self.bias is None else getattr(self.module, self.bias)
        return lambda x: diagonal_linear(x, weight, bias, activation=self.activation)

    @property
    def advice(self) -> str:
        """The line that puts one in the module's place."""
        made = {
            LAYER_SCALE: "fl.nn.DiagonalLinear.from_layer_scale(module)",
            LINEAR: "fl.nn.DiagonalLinear.from_linear(module)",
        }
        bias = "" if self.bias is None else f", module.{self.bias}"
        act = "" if self.activation == "none" else f", activation={self.activation!r}"
        call = f"fl.diagonal_linear(x, module.{self.weight}{bias}{act})"
        return made.get(self.kind, call)


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
        found = _scaling(module)
        if found is not None:
            activation, weight, bias = found
            kind = LAYER_SCALE if bias is None and activation == "none" else AFFINE
            yield Diagonal(fqn, module, kind, activation, weight, bias)


def _exactly_diagonal(weight: Tensor) -> bool:
    """Whether a matrix of two features or more is square, and zero off its diagonal."""
    if weight.dim() != 2 or weight.shape[0] != weight.shape[1] or weight.shape[0] < 2:
        return False
    full = weight.detach()
    return bool(torch.count_nonzero(full) == torch.count_nonzero(full.diagonal()))


def _scaling(module: nn.Module) -> tuple[str, str, str | None] | None:
    """(activation, name of the weight, name of the bias) of a module that computes nothing else."""
    own = {name: p for name, p in module._parameters.items() if p is not None}
    names = list(own)
    if not 1 <= len(names) <= 2 or any(True for _ in module.children()) or module._buffers:
        return None
    given = [own[name] for name in names]
    if any(type(p) is not nn.Parameter or p.dim() != 1 or p.is_meta for p in given):
        return None
    if len({p.shape for p in given}) > 1 or not given[0].numel():
        return None
    probe = copy.deepcopy(module).to("cpu", torch.float64)
    values = {name: probe.get_parameter(name) for name in names}
    generator = torch.Generator().manual_seed(0)
    k = given[0].numel()
    with torch.no_grad():
        for name in names:  # other numbers: those of a fresh LayerScale may all be equal, or 0
            values[name].copy_(torch.randn(k, generator=generator).double())
        x = 3.0 * torch.randn(_ROWS, k, generator=generator).double()
        try:
            read = x.clone()
            found = probe(read)
        except _REFUSALS:
            return None
        if not torch.equal(read, x):  # it works in place, which nothing of ours does
            return None
        if not isinstance(found, Tensor) or found.shape != x.shape or found.dtype != x.dtype:
            return None
        for order in permutations(names):
            weight, bias = order[0], order[1] if len(order) > 1 else None
            w, b = values[weight], None if bias is None else values[bias]
            for activation in NAMES:
                expected = reference.diagonal_linear(x, w, b, activation, None)
                if bool((found - expected).abs().max() <= _TOLERANCE * (1 + expected.abs().max())):
                    return activation, weight, bias
    return None
