"""Modules that are a grouped linear layer by themselves: grouped convolutions over one position,
modules that multiply by a weight of their own per group, and loops over linears.

It only matches. What the last two compute is found on a copy in float64, not by their names.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import NAMES
from fastlinear.families.grouped import reference
from fastlinear.families.grouped.layout import LAYOUTS, features_of
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.rules.grouped.modules.forward import (
    CHANNELS_FIRST,
    CONVOLUTION,
    CONVOLUTIONS,
    LINEARS,
    WEIGHTS,
    Grouped,
    layers_of,
)
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS

_MOST_PROBED = 1 << 22  # numbers of a probe's input or weight
_TOLERANCE = 1e-9
_SMALL = ((2, 3, 2, 2), (3, 2, 4, 3))  # sizes of a probe's token dimensions, twice
_SCALES = (1e9, -1e9, float("nan"))  # of one number of a probe's input: clamps would show
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_REFUSALS = (  # what a forward of another kind may raise on float64 numbers
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)


@dataclass(frozen=True, eq=False)
class Whole:
    """A module that is a grouped linear layer by itself.

    Attributes:
        fqn, module: the module.
        grouped: how.
    """

    fqn: str
    module: nn.Module
    grouped: Grouped

    @property
    def members(self) -> tuple[str, ...]:
        """The linears it loops over, by their names in the model."""
        prefix = f"{self.fqn}." if self.fqn else ""
        return tuple(prefix + name for name in self.grouped.names)

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight (G, N, K) and bias (G, N) or None: views of the module's own, or stacks of its
        linears'."""
        found = self.grouped.parameters(self.module)
        assert found is not None
        return found


def suspects(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that may be a ``Whole``."""
    found = {}
    for fqn, module in model.named_modules():
        if refuse_module(module) is not None:
            continue
        if is_pointwise(module) or _has_cube(module) or _linears(module):
            found[fqn] = module
    return found


def whole(fqn: str, module: nn.Module, x: Tensor) -> Whole | None:
    """What a suspect is, given an input of it, or None."""
    if is_pointwise(module):
        weight: Any = module.weight
        groups: int = module.groups  # type: ignore[assignment]
        sizes = groups, weight.shape[0] // groups, weight.shape[1]
        bias = None if module.bias is None else "bias"
        if x.dim() != weight.dim() or x.shape[1] != groups * weight.shape[1]:
            return None
        how = (CONVOLUTION, CHANNELS_FIRST, "none", *sizes, x.dim(), "weight", bias)
        return Whole(fqn, module, Grouped(*how))
    if isinstance(module, CONVOLUTIONS):
        return None
    for form in _forms(module):
        if max(form.groups * form.n * form.k, 1) > _MOST_PROBED or not x.numel():
            continue
        found = _recognised(module, form, tuple(x.shape))
        if found is not None:
            return Whole(fqn, module, found)
    return None


def is_pointwise(module: nn.Module) -> bool:
    """Whether a module is a grouped convolution over one position without padding."""
    if type(module) not in CONVOLUTIONS or module.groups < 2:  # type: ignore[operator]
        return False
    alone = (1,) * (module.weight.dim() - 2)  # type: ignore[operator]
    unpadded = module.padding in ("valid", "same", (0,) * len(alone))
    return (module.kernel_size, module.stride) == (alone, alone) and unpadded


def _has_cube(module: nn.Module) -> bool:
    """Whether it holds a three-dimensional weight, perhaps a bias, and nothing else."""
    own = [p for p in module._parameters.values() if p is not None]
    if isinstance(module, CONVOLUTIONS) or module._buffers or any(True for _ in module.children()):
        return False
    plain = all(type(p) is nn.Parameter and not p.is_meta for p in own)
    return plain and 1 <= len(own) <= 2 and any(p.dim() == 3 for p in own)


def _linears(module: nn.Module) -> tuple[str, ...]:
    """The linears of one size, two or more, of a module that holds no other state."""
    if isinstance(module, _CONTAINERS) or type(module) in PLAIN_LINEARS:
        return ()
    names, sizes = [], set()
    for name, child in module.named_modules():
        if type(child) in PLAIN_LINEARS:
            names.append(name)
            sizes.add((child.weight.shape, child.bias is None))  # type: ignore[union-attr]
        elif _has_state(child) or (name and not _is_stateless(child)):
            return ()
    if len(sizes) > 1:
        return ()
    return tuple(names) if len(names) > 1 and layers_of(module, names) else ()


def _has_state(module: nn.Module) -> bool:
    return any(t is not None for t in (*module._parameters.values(), *module._buffers.values()))


def _is_stateless(child: nn.Module) -> bool:
    """Whether a guard can tell that it still does what it did."""
    kind = type(child)
    known = kind in (nn.Identity, nn.Dropout, nn.ModuleList)
    return known or (kind.__module__ == nn.ReLU.__module__ and kind is not nn.RReLU)


def _forms(module: nn.Module) -> Iterator[Grouped]:
    """What it may be, layout and activation aside."""
    names = _linears(module)
    if names:
        layer = module.get_submodule(names[0])
        n, k = layer.weight.shape  # type: ignore[union-attr,misc]
        yield Grouped(LINEARS, "", "", len(names), n, k, 0, names=names)
        return
    own = {name: p for name, p in module._parameters.items() if p is not None}
    cubes = [name for name, p in own.items() if p.dim() == 3]
    weight = max(cubes, key=lambda name: own[name].numel())
    bias = next((name for name in own if name != weight), None)
    groups, rows, columns = own[weight].shape
    for turned in (False, True):
        n, k = (columns, rows) if turned else (rows, columns)
        if bias is None or own[bias].numel() == groups * n:
            yield Grouped(WEIGHTS, "", "", groups, n, k, 0, weight, bias, turned)


def _recognised(module: nn.Module, form: Grouped, shape: tuple[int, ...]) -> Grouped | None:
    """The form with its layout and activation, if the module computes it for such inputs.

    On inputs of two small sizes, so that no dimension is taken for another; where the module takes
    none but the shape it was seen with, on that alone.
    """
    probe: nn.Module | None = None
    for layout in _fitting(form, shape):
        if probe is None:
            probe = _copied(module)
            if probe is None:
                return None
        at = replace(form, layout=layout, dims=len(shape))
        small = [_with_tokens(shape, layout, sizes) for sizes in _SMALL]
        for shapes, only in ((small, None), ([shape], (shape,))):
            if only is not None and torch.Size(shape).numel() > _MOST_PROBED:
                continue
            known: str | None = None
            for number, tried in enumerate(shapes):
                names = NAMES if known is None else (known,)
                known = _activation(probe, at, tried, names, number)
                if known is None:
                    break
            if known is not None and all(
                _activation(probe, at, shapes[0], (known,), 0, scale) for scale in _SCALES
            ):
                return replace(at, activation=known, shapes=only)
    return None


def _fitting(form: Grouped, shape: tuple[int, ...]) -> Iterator[str]:
    """The layouts in which an input of that shape has the form's features."""
    for name, layout in LAYOUTS.items():
        sizes = (form.groups * form.k,) if layout.merged else (form.groups, form.k)
        if len(shape) >= layout.least and features_of(shape, name) == sizes:
            yield name


def _with_tokens(shape: tuple[int, ...], layout: str, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with its token dimensions, those that no weight fixes, of these sizes."""
    here, count = LAYOUTS[layout], len(shape)
    if here.order == "channels":
        fixed = {1} if here.merged else {1, 2}
    elif here.merged:
        fixed = {count - 1}
    else:
        fixed = {0 if here.order == "groups" else count - 2, count - 1}
    return tuple(s if i in fixed else sizes[i % len(sizes)] for i, s in enumerate(shape))


def _copied(module: nn.Module) -> nn.Module | None:
    """A copy in float64 with other numbers."""
    try:
        probe = copy.deepcopy(module).to("cpu", torch.float64)
    except _REFUSALS:
        return None
    generator = torch.Generator("cpu").manual_seed(0)
    with torch.no_grad():
        for p in probe.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, device="cpu").double())
    return probe


def _activation(
    probe: nn.Module,
    form: Grouped,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    seed: int,
    scale: float = 1.0,
) -> str | None:
    """The activation with which the probe computes the form on inputs of that shape, or None."""
    x = torch.randn(
        shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu"
    ).double()
    x.view(-1)[0] *= scale
    read = x.clone()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            y = probe(read)
        except _REFUSALS:
            return None
        if not isinstance(y, Tensor) or y.dtype != x.dtype:
            return None
        if not torch.equal(read.nan_to_num(), x.nan_to_num()):
            return None  # it writes to its input
        found = form.parameters(probe)
        if found is None:
            return None
        for name in names:
            expected = reference.grouped_linear(x, *found, name, form.layout)
            if expected.shape != y.shape:
                return None
            bound = _TOLERANCE * (1 + expected.nan_to_num().abs().max())
            if torch.allclose(y, expected, rtol=0.0, atol=float(bound), equal_nan=True):
                return name
    return None
