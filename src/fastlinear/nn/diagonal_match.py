"""Telling whether a module computes act(x ∘ w ± b): by what it computes, never by its name.

A copy of the module in float64 is compared with the formula on random parameters and inputs, large
ones too, in training and not, values and gradients; what its own parameters hold does not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor, nn

from fastlinear.core.errors import FOREIGN_ERRORS
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.diagonal_linear import reference

_SHAPES = ((32,), (1,), (2, 3), (2, 2, 2))  # of a probe's x, besides its features
_SCALES = ((3.0, 1.0), (1e9, 1.0), (1e-3, 1.0), (1.0, 1e4), (1.0, 1e-4))  # of x, of parameters
_TOLERANCE = 1e-9


@dataclass(frozen=True)
class Scaling:
    """How a module computes act(x ∘ w ± b).

    Attributes:
        activation: its name.
        weight, bias: names of the parameters, of shape (K,) or (1, …, 1, K); bias may be None.
        minus: whether the bias is subtracted.
        in_place: whether the result is written over x.
    """

    activation: str
    weight: str
    bias: str | None = None
    minus: bool = False
    in_place: bool = False


def recognise(module: nn.Module) -> Scaling | None:
    """How the module computes act(x ∘ w ± b) of its one argument, or None where it does not.

    It may hold one or two parameters and nothing else, neither children nor buffers.
    """
    own = {name: p for name, p in module._parameters.items() if p is not None}
    if not 1 <= len(own) <= 2 or any(True for _ in module.children()) or module._buffers:
        return None
    if not all(_is_vector(p) for p in own.values()):
        return None
    if len({p.shape[-1] for p in own.values()}) > 1:
        return None
    # grad mode and the default device are the caller's, and may be anything
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        torch.random.fork_rng(devices=[]),
        torch.device("cpu"),
    ):
        try:
            probe = copy.deepcopy(module).to("cpu", torch.float64).requires_grad_(True)
        except FOREIGN_ERRORS:
            return None
        return _recognised(probe, tuple(own))


def _is_vector(p: Tensor) -> bool:
    plain = type(p) is nn.Parameter and not p.is_meta and p.is_floating_point()
    return plain and p.dim() > 0 and 0 < p.numel() == p.shape[-1]


def _recognised(probe: nn.Module, names: tuple[str, ...]) -> Scaling | None:
    candidates = list(_candidates(names))
    in_place = False
    generator = torch.Generator().manual_seed(0)
    given = [probe.get_parameter(name) for name in names]
    dims, k = max(p.dim() for p in given), given[0].shape[-1]
    for training in (False, True):
        probe.train(training)
        ran = False
        for rows in _SHAPES:
            if len(rows) + 1 < dims:
                continue
            for i, (of_x, of_parameters) in enumerate(_SCALES):
                with torch.no_grad():  # those of a fresh LayerScale may all be equal, or 0
                    for p in given:
                        p.copy_(of_parameters * _randn(p.shape, generator))
                x = of_x * _randn((*rows, k), generator)
                dy = _randn(x.shape, generator)
                try:
                    found = _run(probe, given, x, dy)
                except FOREIGN_ERRORS:
                    found = None
                    if not i:
                        break  # not for inputs of so many dimensions
                if found is None:
                    return None
                ran, in_place = True, in_place or found[1]
                candidates = [c for c in candidates if _agrees(probe, c, given, x, dy, found[0])]
                if not candidates:
                    return None
        if not ran:
            return None
    first = candidates[0]
    return Scaling(first.activation, first.weight, first.bias, first.minus, in_place)


def _candidates(names: tuple[str, ...]) -> Iterator[Scaling]:
    for order in permutations(names):
        for activation in NAMES:
            if len(order) == 1:
                yield Scaling(activation, order[0])
            else:
                yield Scaling(activation, order[0], order[1])
                yield Scaling(activation, order[0], order[1], minus=True)


def _randn(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _run(
    probe: nn.Module, given: list[nn.Parameter], x: Tensor, dy: Tensor
) -> tuple[list[Tensor], bool] | None:
    """[y, dx and the gradients of the parameters], and whether y is written over x; None where
    it does anything but compute."""
    leaf = x.clone().requires_grad_()
    read = leaf * 1.0
    y = probe(read)
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype or not y.requires_grad:
        return None
    with torch.no_grad():
        in_place = not torch.equal(read, x)
        if in_place and not torch.equal(read, y):
            return None
    grads = torch.autograd.grad(y, [leaf, *given], dy, allow_unused=True)
    if any(g is None for g in grads):
        return None
    return [y.detach(), *grads], in_place


def _agrees(
    probe: nn.Module,
    scaling: Scaling,
    given: list[nn.Parameter],
    x: Tensor,
    dy: Tensor,
    found: list[Tensor],
) -> bool:
    leaf = x.clone().requires_grad_()
    w = probe.get_parameter(scaling.weight)
    b: Tensor | None = None if scaling.bias is None else probe.get_parameter(scaling.bias)
    b = -b if scaling.minus and b is not None else b
    y = reference.diagonal_linear(leaf, w, b, scaling.activation, None)
    expected = [y.detach(), *torch.autograd.grad(y, [leaf, *given], dy)]
    with torch.no_grad():
        size = (x * w).abs()
        if not _close(found[0], expected[0], size):
            return False
        return all(
            _close(a, e, e.abs().max() + size.max())
            for a, e in zip(found[1:], expected[1:], strict=True)
        )


def _close(found: Tensor, expected: Tensor, size: Tensor) -> bool:
    return bool(((found - expected).abs() <= _TOLERANCE * (1 + expected.abs() + size)).all())
