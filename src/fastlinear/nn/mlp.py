"""A chain of linear layers as one module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import deprecated
from fastlinear.core.errors import InputError
from fastlinear.core.torchscript import script_layer
from fastlinear.dispatch.backend import check_backend
from fastlinear.families.mlp.op import call
from fastlinear.families.mlp.parts import Activations, Skips, hidden, in_parts, placed
from fastlinear.nn.arguments import check_made
from fastlinear.nn.mlp_layer import Layer, by_layer, check_layers
from fastlinear.nn.mlp_sequential import free_name, module_of, read, shared
from fastlinear.nn.plain_linear import hooked, why_not_shared


class MLP(nn.Module):
    """``h_{i+1} = act_i(h_i W_iᵀ + b_i)`` as one operation; a drop-in for an ``nn.Sequential``.

    The ``state_dict`` has the keys of the ``nn.Sequential`` of Linear and activation modules:
    ``0.weight``, ``0.bias``, ``2.weight``… so that either loads the other's.

    Args:
        sizes: n_0, n_1, … n_L: the features of the input and of every layer's output.
        activation: after every layer but the last; a name ``fastlinear.mlp`` knows, or one for each
            of these layers.
        final_activation: after the last layer.
        bias: whether the layers learn an additive bias.
        skips: layers that take the input again, as for ``fastlinear.mlp``; ``state_dict`` then has
            the weights (n_{i+1}, n_i + n_0) of them.
        backend: force a backend of the forward; None lets fastlinear choose.
        allow_fast_matmul: deprecated, without effect; True warns once.
        device, dtype: as for ``nn.Linear``.

    Shapes: input (..., n_0) → output (..., n_L).

    A hook on a layer is called, as are those of ``parallelize_module`` and ``fully_shard``: the
    layers then run one by one, through PyTorch's own ops.

    Raises:
        InputError: fewer than two sizes, an unknown activation or backend, a dtype that is not
            served. At a call: a child that is no plain linear layer, or one too many.

    >>> import torch, fastlinear as fl
    >>> net = fl.nn.MLP([3, 8, 2], activation="gelu")
    >>> net(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    >>> list(net.state_dict())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """

    __prepare_scriptable__ = script_layer
    skips: Mapping[int, str] = MappingProxyType({})  # of modules pickled before there were any

    def __init__(
        self,
        sizes: Sequence[int],
        activation: Activations = "relu",
        final_activation: str = "none",
        bias: bool = True,
        *,
        skips: Skips = (),
        backend: str | None = None,
        allow_fast_matmul: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_of(final_activation, "fastlinear.nn.MLP (final_activation)")
        check_backend(backend, "mlp", "fastlinear.nn.MLP")
        if allow_fast_matmul is not False:
            deprecated.fast_matmul(allow_fast_matmul, "fastlinear.nn.MLP")
        if not _are_sizes(sizes):
            raise InputError(
                "fastlinear.nn.MLP",
                "a list of at least two sizes",
                repr(sizes),
                "The first is the input's features, each other one a layer's.",
            )
        named = {f"sizes[{i}]": size for i, size in enumerate(sizes)}
        check_made("fastlinear.nn.MLP", dtype, **named)
        self._depth = len(sizes) - 1
        names = hidden(activation, self._depth, "fastlinear.nn.MLP")
        if isinstance(activation, (list, tuple)):
            several = len(set(names)) > 1
            activation = names if several else names[0] if names else "none"
        self.activation = activation
        self.final_activation = final_activation
        self.backend = backend
        self.skips = placed(skips, self._depth, "fastlinear.nn.MLP")
        for i, (k, n) in enumerate(pairwise(sizes)):
            taken = k + sizes[0] if i in self.skips else k
            self.add_module(str(2 * i), Layer(taken, n, bias, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The chain; x (..., n_0) → (..., n_L)."""
        modules: dict[str, Any] = self._modules  # type: ignore[assignment]
        if len(modules) > self._depth:
            check_layers(self, self._depth)
        weights, biases = [], []
        try:
            for layer in modules.values():
                if type(layer) is not Layer and check_layers(self, self._depth):
                    return by_layer(self, x)
                parameters = layer._parameters
                weights.append(parameters["weight"])
                biases.append(parameters["bias"])
        except KeyError:  # a parametrization holds one
            if check_layers(self, self._depth):
                return by_layer(self, x)
            weights = [layer.weight for layer in modules.values()]
            biases = [layer.bias for layer in modules.values()]
        names = self.activation, self.final_activation
        if self.skips or not isinstance(self.activation, str):
            return in_parts(call, (x, weights, biases, *names, self.backend), self.skips)
        return call(x, weights, biases, *names, self.backend)

    @property
    def sizes(self) -> tuple[int, ...]:
        """n_0, n_1, … n_L."""
        layers = list(self.layers())
        return (layers[0].in_features, *(layer.out_features for layer in layers))

    def layers(self) -> list[nn.Linear]:
        """The layers, first to last; one that stands twice in the chain comes twice."""
        check_layers(self, self._depth)
        return list(self._modules.values())  # type: ignore[arg-type]

    @classmethod
    def from_sequential(
        cls,
        sequential: nn.Sequential,
        *,
        backend: str | None = None,
        allow_fast_matmul: bool = False,
    ) -> MLP:
        """An MLP sharing the parameters of an ``nn.Sequential`` (the same tensors, not copies).

        The Sequential must consist of ``nn.Linear`` layers and activation modules, at most one
        behind each. Its ``state_dict`` keys are kept.

        Raises:
            InputError: it holds another module, dropout or hooks; a layer takes other features than
                the one before gives.
        """
        names, layers, activations = read(sequential)
        if allow_fast_matmul is not False:
            deprecated.fast_matmul(allow_fast_matmul, "fastlinear.nn.MLP.from_sequential")
        sizes = [1] * (len(layers) + 1)
        net = cls(sizes, activations[:-1], activations[-1], backend=backend, device="meta")
        net._modules.clear()
        for name, linear in zip(names, layers, strict=True):
            net.add_module(name, shared(Layer, linear))
        net.train(sequential.training)
        return net

    def to_sequential(self) -> nn.Sequential:
        """A plain ``nn.Sequential`` sharing this module's parameters, with the same keys.

        Raises:
            InputError: torch has no module for the activation (relu2, for one), a layer was
                replaced by one that does more, is parametrized or has hooks, or takes the input.
        """
        if self.skips:
            raise InputError(
                "fastlinear.nn.MLP.to_sequential",
                "a chain in which each layer takes what the one before gives",
                f"skips of {dict(self.skips)}",
                "Write a module with a forward of its own around .layers().",
            )
        for name, layer in zip(self._modules, self.layers(), strict=True):
            hooks = "hooks" if hooked(layer) else None
            reason = hooks or why_not_shared(layer)  # type: ignore[arg-type]
            if reason is not None:
                raise InputError(
                    "fastlinear.nn.MLP.to_sequential",
                    "layers with parameters of their own and no hooks",
                    f"layer {name} with {reason}",
                    "Remove the hooks; torch.nn.utils.parametrize.remove_parametrizations "
                    "removes parametrizations.",
                )
        sequential = nn.Sequential()
        names = list(self._modules)
        activations = (*hidden(self.activation, self._depth), self.final_activation)
        for name, layer, activation in zip(names, self.layers(), activations, strict=True):
            sequential.add_module(name, shared(nn.Linear, layer))
            if activation != "none":
                sequential.add_module(free_name(name, names), module_of(activation))
        sequential.train(self.training)
        return sequential

    def extra_repr(self) -> str:
        """The activations."""
        skips = f", skips={dict(self.skips)}" if self.skips else ""
        return f"activation={self.activation!r}, final_activation={self.final_activation!r}{skips}"


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) >= 2
