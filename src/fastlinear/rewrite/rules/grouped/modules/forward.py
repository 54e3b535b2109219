"""The forward put in place of a module that computes a grouped linear layer.

The weights stay the module's own: a convolution's or a stack's is viewed, those of several linears
are stacked at each call. A stack kept from call to call would have to be compared with the weights
each time, because a write through ``.data`` shows nowhere else, and that costs what stacking does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.calls import PLAIN
from fastlinear.families.grouped.layout import features_of
from fastlinear.families.grouped.op import call, grouped_linear
from fastlinear.profile.graph import Observed
from fastlinear.rewrite.swap.forwards import (
    PLAIN_LINEARS,
    Forward,
    is_hooked,
    overridden,
)
from fastlinear.rewrite.swap.guard import guarded

CONVOLUTION, WEIGHTS, LINEARS = "convolution", "weights", "linears"
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
CHANNELS_FIRST, CHANNELS_LAST = "b (g k) ...", "... (g k)"

Parameters = tuple[Tensor, Tensor | None]
"""Weight (G, N, K), and bias (G, N) or None."""


@dataclass(frozen=True)
class Grouped:
    """How a module computes a grouped linear layer of its one argument.

    Attributes:
        kind: ``CONVOLUTION`` (over one position), ``WEIGHTS`` (parameters of its own) or
            ``LINEARS`` (layers that it holds).
        layout: of its input.
        activation: its name.
        groups, n, k: sizes.
        dims: dimensions of its input.
        weight, bias: names of its own parameters; None where it has none.
        turned: whether its own weight is (G, K, N).
        names: of ``LINEARS``, where the layers are inside the module, the first group's first.
        shapes: the only shapes of inputs that are known to be computed so; None for all with these
            features and as many dimensions.
    """

    kind: str
    layout: str
    activation: str
    groups: int
    n: int
    k: int
    dims: int
    weight: str | None = None
    bias: str | None = None
    turned: bool = False
    names: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] | None = None

    def views(self, weight: Tensor, bias: Tensor | None) -> Parameters:
        """The module's own weight and bias as (G, N, K) and (G, N)."""
        if self.kind == CONVOLUTION:
            weight = weight.reshape(self.groups, self.n, self.k)
        elif self.turned:
            weight = weight.transpose(1, 2)
        return weight, None if bias is None else bias.reshape(self.groups, self.n)

    def parameters(self, module: nn.Module) -> Parameters | None:
        """The module's parameters as they are now; None where they are not what they were."""
        if self.kind == LINEARS:
            return self._of_linears(module)
        held: Any = module._parameters
        weight = held.get(self.weight or "")
        bias: Any = None if self.bias is None else held.get(self.bias)
        if type(weight) not in PLAIN or weight.numel() != self.groups * self.n * self.k:
            return None
        if tuple(weight.shape[:2]) != self._outer:
            return None
        outputs = self.groups * self.n
        if self.bias is not None and (type(bias) not in PLAIN or bias.numel() != outputs):
            return None
        return self.views(weight, bias)

    @property
    def _outer(self) -> tuple[int, int]:
        """The first two sizes of its own weight."""
        if self.kind == CONVOLUTION:
            return self.groups * self.n, self.k
        return self.groups, self.k if self.turned else self.n

    def _of_linears(self, module: nn.Module) -> Parameters | None:
        layers = layers_of(module, self.names)
        if layers is None or overridden():
            return None
        weights, biases = parameters_of(layers)
        if not all(w is not None and w.shape == (self.n, self.k) for w in weights):
            return None
        return stacked(weights, biases)

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether such an input is computed so."""
        if x.dim() != self.dims or (self.shapes is not None and tuple(x.shape) not in self.shapes):
            return False
        merged = (self.groups * self.k,)
        if features_of(x.shape, self.layout) not in (merged, (self.groups, self.k)):
            return False
        if torch.is_autocast_enabled(x.device.type):
            # what is cast depends on the ops it is written in
            return self.kind != WEIGHTS and not activation_of(self.activation).widened
        return x.dtype is weight.dtype and x.device == weight.device


def layers_of(module: nn.Module, names: Sequence[str]) -> list[nn.Module] | None:
    """The linears of these names, while all are plain and none carries a hook."""
    found = []
    for name in names:
        layer: Any = module
        for part in name.split("."):
            layer = layer._modules.get(part)
            if layer is None:
                return None
        if type(layer) not in PLAIN_LINEARS or is_hooked(layer.__dict__):
            return None
        found.append(layer)
    return found


def parameters_of(layers: Sequence[nn.Module]) -> tuple[list[Any], list[Any]]:
    """Weights and biases where modules keep them; None for what is not there."""
    held = [layer.__dict__["_parameters"] for layer in layers]
    return [p.get("weight") for p in held], [p.get("bias") for p in held]


def stacked(weights: Sequence[Any], biases: Sequence[Any]) -> Parameters | None:
    """Weights (N, K) and biases as (G, N, K) and (G, N); None where they are not of one kind.

    Gradients reach every one of them.
    """
    first = weights[0]
    for w in weights:
        if type(w) not in PLAIN or w.dtype is not first.dtype or w.device != first.device:
            return None
    missing = [b is None for b in biases]
    if all(missing):
        return torch.stack(tuple(weights)), None
    if any(missing) or any(type(b) not in PLAIN or b.dtype is not first.dtype for b in biases):
        return None
    return torch.stack(tuple(weights)), torch.stack(tuple(biases))


def grouped_forward(
    module: nn.Module, grouped: Grouped, observed: Observed, backend: str | None
) -> Forward:
    """A forward that makes one call of ``grouped_linear`` while the module is as it was.

    Args:
        module: what computes it; the result holds no reference to it.
        grouped: how.
        observed: its arguments: one tensor.
        backend: forced backend, or None.
    """
    run = _one_call(grouped, backend)
    if grouped.kind != CONVOLUTION:
        return guarded(module, run, observed, other_children(module, grouped))
    original: Any = type(module).forward
    settings = {n: module.__dict__[n] for n in _SETTINGS}

    def forward(self: Any, input: Tensor) -> Any:
        own = self.__dict__
        if (
            type(self).forward is original
            and isinstance(input, Tensor)
            and all(own[n] == v for n, v in settings.items())
        ):
            return run(self, input)
        return type(self).forward(self, input)

    return forward


_SETTINGS = ("groups", "kernel_size", "stride", "padding", "padding_mode")


def other_children(module: nn.Module, grouped: Grouped) -> tuple[str, ...]:
    """Modules inside that hold nothing, and that one call passes over."""
    known = {name.rpartition(".")[0] for name in grouped.names} | set(grouped.names) | {""}
    return tuple(name for name, _ in module.named_modules() if name not in known)


def call_grouped(
    x: Tensor, weight: Tensor, bias: Tensor | None, grouped: Grouped, backend: str | None
) -> Tensor:
    """``grouped_linear`` as one of torch's functions, in the memory format PyTorch's own has."""
    if not lies_channels_last(x, grouped):
        return call_plain(x, weight, bias, grouped.activation, grouped.layout, backend)
    rows = x.movedim(1, -1)
    y = call_plain(rows, weight, bias, grouped.activation, CHANNELS_LAST, backend)
    return y.movedim(-1, 1)


def lies_channels_last(x: Tensor, grouped: Grouped) -> bool:
    """Whether a convolution's input lies channels last, as its output then does."""
    if grouped.kind != CONVOLUTION or x.dim() < 4 or x.is_contiguous():
        return False
    return x.movedim(1, -1).is_contiguous()


def call_plain(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None,
) -> Tensor:
    """``grouped_linear`` as one of torch's functions: a function mode sees the call whole."""
    if has_torch_function_unary(x):
        y: Tensor = handle_torch_function(
            grouped_linear,
            (x,),
            *(x, weight, bias),
            activation=activation,
            layout=layout,
            backend=backend,
        )
        return y
    return call(x, weight, bias, activation, layout, backend)


def _one_call(grouped: Grouped, backend: str | None) -> Callable[..., Any]:
    def run(self: nn.Module, x: Tensor) -> Any:
        found = grouped.parameters(self)
        if found is None or not grouped.takes(x, found[0]):
            return type(self).forward(self, x)
        return call_grouped(x, *found, grouped, backend)

    return run
