"""What a module computes, as the rules of ``optimize_`` recognise it.

Those rules lie above this package and register themselves here, so that a converter takes what they
take and refuses what they refuse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastlinear.families.gated.stacking import Biases, Weights
from fastlinear.nn.parameters import weight_and_bias

T = TypeVar("T")
PLAIN = (nn.Linear, NonDynamicallyQuantizableLinear)
_STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
_recognisers: dict[type, Callable[[nn.Module], Any]] = {}


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


def register(kind: type[T], recognise: Callable[[nn.Module], T | str]) -> None:
    """Have ``recognise`` tell modules of this kind: how one computes, or why it is none."""
    _recognisers[kind] = recognise


def recognised(kind: type[T], module: nn.Module) -> T | str:
    """How a module computes what ``kind`` describes, or why it is not taken for that."""
    if kind not in _recognisers:
        import_module("fastlinear.rewrite")  # rules register themselves as they are loaded
    found: T | str = _recognisers[kind](module)
    return found


def weights_of(module: nn.Module, gated: Gated) -> tuple[Weights, Biases]:
    """The parameters of a module that is recognised, as they are now."""
    modules: dict[str, Any] = module._modules
    gate, gate_bias = weight_and_bias(modules[gated.gate])
    up, up_bias = (None, None) if gated.up is None else weight_and_bias(modules[gated.up])
    down, down_bias = (None, None) if gated.down is None else weight_and_bias(modules[gated.down])
    return Weights(gate, up, down), Biases(gate_bias, up_bias, down_bias)


def plain_weights(module: nn.Module, gated: Gated) -> tuple[Any, Any] | None:
    """The same of a module whose layers do what plain linear layers do, and nothing else, as
    tuples; None where an adapter was put in the place of one, or hooks on it."""
    held = module._modules
    weights: list[Any] = []
    biases: list[Any] = []
    for name in (gated.gate, gated.up, gated.down):
        if name is None:
            weights.append(None)
            biases.append(None)
            continue
        layer = held.get(name)  # None, or gone, where the caller has put nothing in its place
        if type(layer) not in PLAIN or _hooked(layer):  # type: ignore[arg-type]
            return None
        parameters = layer._parameters  # type: ignore[union-attr]
        try:
            weights.append(parameters["weight"])
            biases.append(parameters["bias"])
        except KeyError:  # the caller has put a tensor in a parameter's place
            return weights_of(module, gated)
    return tuple(weights), tuple(biases)


def is_hooked(module: nn.Module) -> bool:
    """Whether calls of the module, or of its state_dict, run hooks of its own."""
    return _hooked(module) or any(module.__dict__.get(name) for name in _STATE_HOOKS)


def _hooked(module: nn.Module) -> bool:
    own = module.__dict__  # asked at every call
    return bool(
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
        or "forward" in own
    )
