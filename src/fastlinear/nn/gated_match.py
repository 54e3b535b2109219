"""Telling whether a module is a gated MLP: by what it computes, never by its name.

A copy of the module with small linear layers in place of its own, in float64, is compared with the
formula; what the module's own parameters hold does not matter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastlinear.core.errors import FOREIGN_ERRORS
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.gated_mlp import reference
from fastlinear.ops.gated_mlp.stacking import STACKED, Biases, Weights

PLAIN = (nn.Linear, NonDynamicallyQuantizableLinear)
_ROWS = 16
_IN, _HIDDEN, _OUT = 10, 6, 7  # features of a probe; out is in where the module's are equal
_TOLERANCE = 1e-9
_SCALES = (1e9, -1e9)  # of one number of a probe's input


@dataclass(frozen=True)
class Gated:
    """How a module computes a gated MLP.

    Attributes:
        gate, up, down: names of its linear layers; up is None where gate holds both, down where
            there is no down projection.
        order: how gate and up lie, a name of ``stacking.ORDERS``.
        activation: of the gate.
        dropout: the rate at which what the gate lets through is dropped in training.
    """

    gate: str
    up: str | None
    down: str | None
    order: str
    activation: str
    dropout: float = 0.0

    @property
    def names(self) -> tuple[str, ...]:
        """The linear layers there are."""
        return tuple(n for n in (self.gate, self.up, self.down) if n is not None)


def recognise(module: nn.Module) -> Gated | None:
    """How the module computes a gated MLP of its one argument, or None where it does not.

    Its linear layers must be its own children, plain ``nn.Linear`` with neither hooks nor
    parametrizations; besides them it may hold only children without state. It must compute the same
    in training, but for an ``nn.Dropout`` on what the gate lets through.
    """
    linears = _linears(module)
    if linears is None:
        return None
    for roles in _roles(linears):
        probe = _probe(module, linears, roles)
        x = torch.randn(_ROWS, _IN, generator=torch.Generator().manual_seed(0)).double()
        y = None if probe is None else _run(probe, x)
        if probe is None or y is None:
            continue
        rates = {d.p for d in probe.modules() if isinstance(d, nn.Dropout) and d.p}
        for found in _candidates(roles):
            expected = _formula(probe, found, x)
            if not _close(y, expected) or not _unbounded(probe, found, x):
                continue
            if not _anyhow_shaped(probe, found, x):
                return None
            if len(rates) > 1:
                return None
            found = replace(found, dropout=rates.pop() if rates else 0.0)
            return found if _trains_alike(probe, found, x) else None
    return None


def weights_of(module: nn.Module, gated: Gated) -> tuple[Weights, Biases]:
    """The parameters of a module that is recognised, as they are now."""
    held: dict[str, Any] = module._modules
    layers = [None if n is None else held[n] for n in (gated.gate, gated.up, gated.down)]
    return (
        Weights(*(None if a is None else a.weight for a in layers)),  # type: ignore[arg-type]
        Biases(*(None if a is None else a.bias for a in layers)),
    )


def are_plain(module: nn.Module, gated: Gated) -> bool:
    """Whether the layers of a recognised module do what plain linear layers do, and nothing else:
    an adapter may have been put in the place of one, or hooks on it."""
    held = module._modules
    for name in (gated.gate, gated.up, gated.down):
        if name is not None:
            layer = held.get(name)  # None, or gone, where the caller has put nothing in its place
            if type(layer) not in PLAIN or _hooked(layer):  # type: ignore[arg-type]
                return False
    return True


def is_hooked(module: nn.Module) -> bool:
    """Whether calls of the module, or of its state_dict, run hooks of its own."""
    of_state = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks")
    more = (*of_state, "_load_state_dict_post_hooks")
    return _hooked(module) or any(module.__dict__.get(name) for name in more)


def _linears(module: nn.Module) -> dict[str, nn.Linear] | None:
    """The one to three linear children of a module that holds no other state."""
    linears: dict[str, nn.Linear] = {}
    for name, child in module._modules.items():
        if child is None:
            continue
        if type(child) in PLAIN:
            if _hooked(child) or set(child._parameters) != {"weight", "bias"}:
                return None
            linears[name] = child  # type: ignore[assignment]
        elif _stateful(child) or _hooked(child):
            return None
    own = [t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None]
    if own or not 1 <= len(linears) <= 3:
        return None
    return linears if len({id(a) for a in linears.values()}) == len(linears) else None


def _stateful(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _hooked(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks)
    return any(hooks) or bool(module._backward_pre_hooks) or "forward" in module.__dict__


def _roles(linears: dict[str, nn.Linear]) -> Iterator[tuple[str, str | None, str | None]]:
    """(gate, up, down) that the sizes of the layers allow."""
    for names in permutations(linears):
        layers = [linears[n] for n in names]
        sizes = [(a.in_features, a.out_features) for a in layers]
        if len(names) == 3 and sizes[0] == sizes[1] and sizes[2][0] == sizes[0][1]:
            yield names[0], names[1], names[2]
        elif len(names) == 2:
            if sizes[0][1] == 2 * sizes[1][0]:
                yield names[0], None, names[1]
            if sizes[0] == sizes[1]:
                yield names[0], names[1], None
        elif len(names) == 1 and sizes[0][1] % 2 == 0:
            yield names[0], None, None


def _candidates(roles: tuple[str, str | None, str | None]) -> Iterator[Gated]:
    for order in STACKED if roles[1] is None else ("apart",):
        for activation in NAMES:
            yield Gated(*roles, order, activation)


def _probe(
    module: nn.Module, linears: dict[str, nn.Linear], roles: tuple[str, str | None, str | None]
) -> nn.Module | None:
    """A copy in float64 with small linear layers, in eval mode; None where it cannot be copied."""
    gate, up, down = roles
    first = linears[gate]
    out = _OUT
    if down is not None and linears[down].out_features == first.in_features:
        out = _IN
    memo: dict[int, Any] = {}
    sizes = {gate: (_IN, _HIDDEN if up is not None else 2 * _HIDDEN)}
    if up is not None:
        sizes[up] = (_IN, _HIDDEN)
    if down is not None:
        sizes[down] = (_HIDDEN, out)
    generator = torch.Generator().manual_seed(1)
    for name, (k, n) in sizes.items():
        biased = linears[name].bias is not None
        small = nn.Linear(k, n, biased, device="meta", dtype=torch.float64).to_empty(device="cpu")
        with torch.no_grad():
            for p in small.parameters():
                p.copy_(torch.randn(p.shape, generator=generator).double())
        memo[id(linears[name])] = small
    try:
        return copy.deepcopy(module, memo).eval()
    except FOREIGN_ERRORS:
        return None


def _run(probe: nn.Module, x: Tensor) -> Tensor | None:
    """What the probe makes of x; None where it fails, or does anything but compute."""
    read = x.clone()
    try:
        with torch.no_grad():
            y = probe(read)
    except FOREIGN_ERRORS:
        return None
    if not isinstance(y, Tensor) or y.dtype != x.dtype or not torch.equal(read, x):
        return None
    return y


def _unbounded(probe: nn.Module, found: Gated, x: Tensor) -> bool:
    """Whether the probe computes the formula for large numbers as well: a clamp would show."""
    for scale in _SCALES:
        large = x.clone()
        large[0, 0] *= scale
        y = _run(probe, large)
        if y is None or not _close(y, _formula(probe, found, large)):
            return False
    return True


def _anyhow_shaped(probe: nn.Module, found: Gated, x: Tensor) -> bool:
    """Whether the probe computes the formula for other numbers of rows and dimensions as well."""
    for given in (x[:1], x.view(2, -1, _IN)):
        y = _run(probe, given)
        if y is None or not _close(y, _formula(probe, found, given)):
            return False
    return True


def _formula(probe: nn.Module, found: Gated, x: Tensor) -> Tensor:
    weights, biases = weights_of(probe, found)
    with torch.no_grad():
        return reference.gated_mlp(x, weights, biases, found.activation, found.order)


def _trains_alike(probe: nn.Module, found: Gated, x: Tensor) -> bool:
    """Whether in training the probe computes the same, but for what it drops of the product."""
    weights, biases = weights_of(probe, found)
    if found.dropout and weights.down is None:
        return False
    probe.train()
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(2)
        y = _run(probe, x)
        torch.manual_seed(2)
        inner = weights._replace(down=None), biases._replace(down=None)
        expected = reference.gated_mlp(x, *inner, found.activation, found.order)
        if weights.down is not None:
            expected = F.dropout(expected, found.dropout, True)
            expected = F.linear(expected, weights.down, biases.down)
    return y is not None and _close(y, expected)


def _close(y: Tensor, expected: Tensor) -> bool:
    if y.shape != expected.shape:
        return False
    return bool((y - expected).abs().max() <= _TOLERANCE * (1 + expected.abs().max()))
