"""A chain of linear layers as one module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import deprecated
from fastlinear.core.errors import InputError
from fastlinear.core.torchscript import script_layer
from fastlinear.dispatch.backend import check_backend
from fastlinear.families.mlp.op import call
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
        activation: after every layer but the last; a name ``fastlinear.mlp`` knows.
        final_activation: after the last layer.
        bias: whether the layers learn an additive bias.
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

    def __init__(
        self,
        sizes: Sequence[int],
        activation: str = "relu",
        final_activation: str = "none",
        bias: bool = True,
        *,
        backend: str | None = None,
        allow_fast_matmul: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_of(activation, "fastlinear.nn.MLP")
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
        self.activation = activation
        self.final_activation = final_activation
        self.backend = backend
        self._depth = len(sizes) - 1
        for i, (k, n) in enumerate(pairwise(sizes)):
            self.add_module(str(2 * i), Layer(k, n, bias, device=device, dtype=dtype))

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
        return call(
            x,
            weights,
            biases,
            self.activation,
            self.final_activation,
            self.backend,
        )

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

        The Sequential must consist of ``nn.Linear`` layers with one and the same activation module
        between them and, if any, one after the last. Its ``state_dict`` keys are kept.

        Raises:
            InputError: it holds another module, dropout, hooks, or differing activations; a layer
                takes other features than the one before gives.
        """
        names, layers, hidden, final = read(sequential)
        if allow_fast_matmul is not False:
            deprecated.fast_matmul(allow_fast_matmul, "fastlinear.nn.MLP.from_sequential")
        net = cls([1, 1], hidden, final, backend=backend)
        del net._modules["0"]
        net._depth = len(layers)
        for name, linear in zip(names, layers, strict=True):
            net.add_module(name, shared(Layer, linear))
        net.train(sequential.training)
        return net

    def to_sequential(self) -> nn.Sequential:
        """A plain ``nn.Sequential`` sharing this module's parameters, with the same keys.

        Raises:
            InputError: torch has no module for the activation (relu2, for one), or a layer was
                replaced by one that does more, is parametrized or has hooks.
        """
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
        layers = self.layers()
        for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
            sequential.add_module(name, shared(nn.Linear, layer))
            last = i == len(layers) - 1
            activation = self.final_activation if last else self.activation
            if activation != "none":
                sequential.add_module(free_name(name, names), module_of(activation))
        sequential.train(self.training)
        return sequential

    def extra_repr(self) -> str:
        """The activations."""
        return f"activation={self.activation!r}, final_activation={self.final_activation!r}"


def _are_sizes(sizes: Any) -> bool:
    return isinstance(sizes, Sequence) and not isinstance(sizes, str) and len(sizes) >= 2
