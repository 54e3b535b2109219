"""Linears as a gated MLP in a traced forward has them: layers, Sequentials around one, and those
that the forward writes on parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Node

from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.match.on_parameters import Written
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS
from fastlinear.rewrite.swap.functional_linear import AsLayer

_DROPOUTS = {F.dropout: "training", torch.dropout: "train"}


@dataclass(frozen=True, eq=False)
class Projection:
    """A linear, alone or in a Sequential with its activation behind it.

    Attributes:
        name: inside the parent; of one written on parameters that of its weight.
        node: its value, or that of the Sequential.
        first, given: the node that reads what it is given, and that.
        module: the linear; of one written on parameters as a layer.
        activation: in the Sequential behind it.
        sizes: K and N.
        drops: the rate at which the Sequential drops, in training.
        written: how it is written, on parameters.
    """

    name: str
    node: Node
    first: Node
    given: Node
    module: nn.Module
    sizes: tuple[int, int]
    activation: str = "none"
    drops: float = 0.0
    written: Written | None = field(default=None, repr=False)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """What computes it."""
        return (self.first,) if self.first is self.node else (self.first, self.node)


def layer_of(
    parent: nn.Module, node: Node, activation: Callable[[str], str | None]
) -> Projection | None:
    """The linear that a node calls: a layer, or a Sequential of one, an activation behind it and
    what hands on or drops.

    Args:
        parent: whose forward is traced.
        node: a call in it.
        activation: a module's name → which activation it is, or None.
    """
    if node.op != "call_module" or node.kwargs or len(node.args) != 1:
        return None
    (given,) = node.args
    if not isinstance(given, Node):
        return None
    name = str(node.target)
    module: Any = parent.get_submodule(name)
    if type(module) in PLAIN_LINEARS:
        sizes = module.in_features, module.out_features
        return Projection(name, node, node, given, module, sizes)
    if type(module) is not nn.Sequential or refuse_module(module) is not None:
        return None
    linear, found, drops = "", "none", 0.0
    for key, child in module._modules.items():
        rate = dropped_by(child)
        if type(child) in PLAIN_LINEARS and not linear:
            linear = key
        elif rate is not None:
            drops = max(drops, rate)
        elif linear and found == "none":
            own = activation(f"{name}.{key}")
            if own is None:
                return None
            found = own
        else:
            return None
    if not linear:
        return None
    layer: Any = module._modules[linear]
    sizes = layer.in_features, layer.out_features
    return Projection(f"{name}.{linear}", node, node, given, layer, sizes, found, drops)


def written_on(parent: nn.Module, written: Mapping[str, Written]) -> dict[Node, Projection]:
    """The linears written on parameters, by the node of their value."""
    found = {}
    for name, one in written.items():
        layer = AsLayer(one.linear, parent)
        n, k = layer.weight.shape[::-1] if one.linear.turned else layer.weight.shape
        found[one.end] = Projection(name, one.end, one.first, one.given, layer, (k, n), written=one)
    return found


def dropped_by(module: nn.Module | None) -> float | None:
    """The rate at which a module drops what it hands on, 0.0 where it drops nothing; None where it
    is anything else."""
    if module is None or refuse_module(module) is not None:
        return None
    if type(module) is nn.Identity:
        return 0.0
    if type(module) is not nn.Dropout:
        return None
    return module.p if module.training else 0.0


def dropped_at(parent: nn.Module, node: Node, value: Node) -> float | None:
    """``dropped_by`` of a step that reads ``value`` alone."""
    if node.args[:1] != (value,) or len(node.all_input_nodes) != 1:
        return None
    if node.op == "call_module":
        return dropped_by(parent.get_submodule(str(node.target)))
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return None
    default = {"p": 0.5, "training": True} if node.target is F.dropout else {}
    names = ("input", "p", _DROPOUTS[node.target])
    how: dict[str, Any] = default | dict(zip(names, node.args, strict=False)) | node.kwargs
    rate, awake = how.get("p"), how.get(names[2])
    if type(awake) is not bool or not isinstance(rate, int | float):
        return None
    return float(rate) if awake else 0.0
