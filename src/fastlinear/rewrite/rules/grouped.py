"""The rule of grouped_linear: linear layers that could be one, because none waits for another.

It only matches; nothing here changes a model or measures anything. Four kinds are known: layers on
parts of one tensor (a loop over chunks), layers on one tensor itself, grouped convolutions over one
position, and modules that multiply by a weight of their own per group, which are found by what they
compute in float64, not by their names.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.grouped_linear import reference
from fastlinear.ops.grouped_linear.layout import LAYOUTS, features_of
from fastlinear.rewrite.exchange.forwards import PLAIN_LINEARS
from fastlinear.rewrite.match.eligible import refuse_module

LINEARS, SHARED, CONVOLUTION, WEIGHTS = "linears", "shared_input", "convolution", "weights"
CHANNELS_FIRST = "b (g k) ..."
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MOST_PROBED = 1 << 22  # numbers of a probe's input or weight
_TOLERANCE = 1e-9
_REFUSALS = (  # what a forward of another kind may raise on float64 numbers
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    AssertionError,
    ArithmeticError,
)


@dataclass(frozen=True)
class Seen:
    """One call of a linear: whose, and where its input lies.

    Attributes:
        fqn: the linear.
        parent: the module whose forward called it.
        storage: the memory of the input, and how often it had been written.
        shape, stride, offset: the input in that memory.
        dtype: of the input.
    """

    fqn: str
    parent: str | None
    storage: tuple[int, int]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Row:
    """Linears called one after another on parts of one tensor, or on one tensor.

    Attributes:
        kind: ``LINEARS`` or ``SHARED``.
        fqn: the module whose forward calls them.
        members: the linears, by where their inputs lie.
        shape, stride: of each input.
        step: numbers from one input to the next; 0 where they share one.
        dtype: of the inputs.
    """

    kind: str
    fqn: str
    members: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    step: int
    dtype: torch.dtype


@dataclass(frozen=True, eq=False)
class Whole:
    """A module that is a grouped linear layer by itself.

    Attributes:
        kind: ``CONVOLUTION`` or ``WEIGHTS``.
        fqn, module: the module.
        layout: of its input.
        activation: its name.
        weight, bias: names of the parameters; bias may be None.
        turned: whether the weight is (G, K, N).
    """

    kind: str
    fqn: str
    module: nn.Module
    layout: str
    activation: str
    weight: str
    bias: str | None
    turned: bool

    def parameters(self) -> tuple[Tensor, Tensor | None]:
        """Weight (G, N, K) and bias (G, N) or None: views of the module's own."""
        weight: Tensor = getattr(self.module, self.weight)
        if self.kind == CONVOLUTION:
            groups: int = self.module.groups  # type: ignore[assignment]
            weight = weight.view(groups, weight.shape[0] // groups, weight.shape[1])
        elif self.turned:
            weight = weight.transpose(1, 2)
        bias = None if self.bias is None else getattr(self.module, self.bias)
        return weight, None if bias is None else bias.reshape(weight.shape[:2])


def rows(calls: Sequence[Seen], linears: Mapping[str, nn.Module]) -> list[Row]:
    """The rows among the calls of one run, in order; a linear called twice is in none.

    Inputs that are parts of one tensor, unwritten since, were all there before the first call: so
    none of the layers waits for another.
    """
    counts: dict[str, int] = {}
    for call in calls:
        counts[call.fqn] = counts.get(call.fqn, 0) + 1
    found: list[Row] = []
    run: list[Seen] = []
    for call in calls:
        if run and not _belongs(run, call, linears):
            found += _row(run, linears)
            run = []
        if counts[call.fqn] == 1 and call.parent is not None:
            run.append(call)
    return found + _row(run, linears)


def _belongs(run: list[Seen], call: Seen, linears: Mapping[str, nn.Module]) -> bool:
    first = run[0]
    return (
        (call.parent, call.storage, call.shape, call.stride, call.dtype)
        == (first.parent, first.storage, first.shape, first.stride, first.dtype)
        and (linears[call.fqn].bias is None) == (linears[first.fqn].bias is None)
        and _steady([*run, call], linears)
    )


def _steady(run: list[Seen], linears: Mapping[str, nn.Module]) -> bool:
    """Whether the inputs lie at one distance, 0 for one input; layers of parts are of one size."""
    offsets = sorted(call.offset for call in run)
    steps = {b - a for a, b in pairwise(offsets)}
    outputs = {linears[call.fqn].out_features for call in run}
    return len(steps) == 1 and (steps == {0} or len(outputs) == 1)


def _row(run: list[Seen], linears: Mapping[str, nn.Module]) -> list[Row]:
    if len(run) < 2 or len({id(linears[call.fqn].weight) for call in run}) < len(run):
        return []
    run = sorted(run, key=lambda call: call.offset)
    first, step = run[0], run[1].offset - run[0].offset
    assert first.parent is not None
    row = Row(
        LINEARS if step else SHARED,
        first.parent,
        tuple(call.fqn for call in run),
        first.shape,
        first.stride,
        step,
        first.dtype,
    )
    return [row]


def plain_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linears of a model that no hook, parametrization or foreign forward stands upon."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if type(module) in PLAIN_LINEARS and refuse_module(module) is None
    }


def suspects(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that may be a ``Whole``: grouped convolutions over one position, and modules with
    a three-dimensional parameter."""
    found = {}
    for fqn, module in model.named_modules():
        own = [p for p in module._parameters.values() if p is not None]
        if refuse_module(module) is None and (
            _is_pointwise(module)
            or (
                not isinstance(module, _CONVOLUTIONS)
                and len(own) <= 2
                and any(p.dim() == 3 for p in own)
            )
        ):
            found[fqn] = module
    return found


def whole(fqn: str, module: nn.Module, x: Tensor) -> Whole | None:
    """What a suspect is, given an input of it, or None."""
    if _is_pointwise(module):
        batched = x.dim() == module.get_parameter("weight").dim()
        bias = None if module.bias is None else "bias"
        made = Whole(CONVOLUTION, fqn, module, CHANNELS_FIRST, "none", "weight", bias, False)
        return made if batched else None
    if isinstance(module, _CONVOLUTIONS) or any(True for _ in module.children()):
        return None
    return _by_weights(fqn, module, x)


def _is_pointwise(module: nn.Module) -> bool:
    """Whether a module is a grouped convolution over one position without padding."""
    if type(module) not in _CONVOLUTIONS or module.groups < 2:  # type: ignore[operator]
        return False
    alone = (1,) * (module.weight.dim() - 2)  # type: ignore[operator]
    unpadded = module.padding in ("valid", "same", (0,) * len(alone))
    return (module.kernel_size, module.stride) == (alone, alone) and unpadded


def _by_weights(fqn: str, module: nn.Module, x: Tensor) -> Whole | None:
    own = {name: p for name, p in module._parameters.items() if p is not None}
    cubes = [name for name, p in own.items() if p.dim() == 3]
    if not cubes or module._buffers or not x.numel():
        return None
    weight = max(cubes, key=lambda name: own[name].numel())
    bias = next((name for name in own if name != weight), None)
    if max(x.numel(), own[weight].numel()) > _MOST_PROBED or own[weight].is_meta:
        return None
    probe = copy.deepcopy(module).to("cpu", torch.float64)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in probe.parameters():
            p.copy_(torch.randn(p.shape, generator=generator).double())
        given = torch.randn(x.shape, generator=generator).double()
        try:
            found = probe(given)
        except _REFUSALS:
            return None
    if not isinstance(found, Tensor):
        return None
    for turned in (False, True):
        made = _fitting(probe, weight, bias, turned, given, found)
        if made is not None:
            return Whole(WEIGHTS, fqn, module, *made, weight, bias, turned)
    return None


def _fitting(
    probe: nn.Module, weight: str, bias: str | None, turned: bool, x: Tensor, y: Tensor
) -> tuple[str, str] | None:
    """(layout, activation) in which the probe is a grouped linear layer, or None."""
    w: Tensor = getattr(probe, weight).detach()
    w = w.transpose(1, 2) if turned else w
    groups, n, k = w.shape
    b: Any = None if bias is None else getattr(probe, bias).detach()
    if b is not None:
        if b.numel() != groups * n:
            return None
        b = b.reshape(groups, n)
    for name, layout in LAYOUTS.items():
        sizes = (groups * k,) if layout.merged else (groups, k)
        if x.dim() < layout.least or features_of(x.shape, name) != sizes:
            continue
        pre = reference.grouped_linear(x, w, b, "none", name)
        if pre.shape != y.shape:
            continue
        for activation in NAMES:
            expected = reference.grouped_linear(x, w, b, activation, name)
            if bool((y - expected).abs().max() <= _TOLERANCE * (1 + expected.abs().max())):
                return name, activation
    return None
