"""A chain of linear layers as one module."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from fastlinear.core.errors import InputError
from fastlinear.ops.common.activations import LEAKY_RELU_SLOPE
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.mlp.op import call

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMEDY = "An MLP is nn.Linear layers with one activation behind each but the last."
_HOOKED = "Remove the hooks, or leave these layers as they are."


class _Layer(nn.Linear):
    """The weight and bias of one layer. Called by nobody: the chain runs as a whole."""

    def _refuse_hook(self, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            "fastlinear.nn.MLP",
            expected="no hooks on single layers: all of them run as one operation",
            received="a hook on a layer",
            remedy="Hook the MLP itself, or work on .to_sequential().",
        )

    register_forward_hook = _refuse_hook
    register_forward_pre_hook = _refuse_hook
    register_backward_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook


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
        allow_fast_matmul: permit fast matrix multiplication, as for ``fastlinear.mlp``.
        device, dtype: as for ``nn.Linear``.

    Shapes: input (..., n_0) → output (..., n_L).

    Raises:
        InputError: fewer than two sizes, or an activation is unknown.

    >>> import torch, fastlinear as fl
    >>> net = fl.nn.MLP([3, 8, 2], activation="gelu")
    >>> net(torch.ones(5, 3)).shape
    torch.Size([5, 2])
    >>> list(net.state_dict())
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """

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
        if len(sizes) < 2 or not all(isinstance(n, int) for n in sizes):
            raise InputError(
                "fastlinear.nn.MLP",
                expected="at least two whole sizes",
                received=repr(sizes),
                remedy="The first is the input's features, each other one a layer's.",
            )
        self.activation = activation
        self.final_activation = final_activation
        self.backend = backend
        self.allow_fast_matmul = allow_fast_matmul
        for i, (k, n) in enumerate(pairwise(sizes)):
            self.add_module(str(2 * i), _Layer(k, n, bias, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The chain; x (..., n_0) → (..., n_L)."""
        weights, biases = [], []
        try:
            for layer in self._modules.values():
                parameters: Any = layer._parameters  # type: ignore[union-attr]
                weights.append(parameters["weight"])
                biases.append(parameters["bias"])
        except KeyError:  # a parametrization holds the weight
            weights = [layer.weight for layer in self._modules.values()]  # type: ignore[union-attr]
            biases = [layer.bias for layer in self._modules.values()]  # type: ignore[union-attr]
        return call(
            x,
            weights,
            biases,
            self.activation,
            self.final_activation,
            self.backend,
            self.allow_fast_matmul,
        )

    @property
    def sizes(self) -> tuple[int, ...]:
        """n_0, n_1, … n_L."""
        layers = list(self.layers())
        return (layers[0].in_features, *(layer.out_features for layer in layers))

    def layers(self) -> list[nn.Linear]:
        """The layers, first to last; one that stands twice in the chain comes twice."""
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
            InputError: it holds another module, dropout, hooks, or differing activations.
        """
        names, layers, hidden, final = _read(sequential)
        net = cls([1, 1], hidden, final, backend=backend, allow_fast_matmul=allow_fast_matmul)
        del net._modules["0"]
        for name, linear in zip(names, layers, strict=True):
            net.add_module(name, _shared(_Layer, linear))
        net.train(sequential.training)
        return net

    def to_sequential(self) -> nn.Sequential:
        """A plain ``nn.Sequential`` sharing this module's parameters, with the same keys.

        Raises:
            InputError: torch has no module for the activation (relu2, quick_gelu).
        """
        sequential = nn.Sequential()
        names = list(self._modules)
        layers = self.layers()
        for i, (name, layer) in enumerate(zip(names, layers, strict=True)):
            sequential.add_module(name, _shared(nn.Linear, layer))
            last = i == len(layers) - 1
            activation = self.final_activation if last else self.activation
            if activation != "none":
                sequential.add_module(_free_name(name, names), _module(activation))
        sequential.train(self.training)
        return sequential

    def extra_repr(self) -> str:
        """The activations."""
        return f"activation={self.activation!r}, final_activation={self.final_activation!r}"


def _shared(kind: type[nn.Linear], linear: nn.Linear) -> nn.Linear:
    layer = kind(
        linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta"
    )
    layer.weight = linear.weight
    if linear.bias is not None:
        layer.bias = linear.bias
    layer.train(linear.training)
    return layer


def _read(sequential: nn.Sequential) -> tuple[list[str], list[nn.Linear], str, str]:
    """Names and layers of a Sequential, its hidden activation and the one after the last layer."""
    if type(sequential) is not nn.Sequential:
        _refuse("an nn.Sequential", type(sequential).__name__, _REMEDY)
    names: list[str] = []
    layers: list[nn.Linear] = []
    acts: list[str | None] = []
    for name, module in sequential._modules.items():
        if module is None:
            continue
        if any(getattr(module, hooks) for hooks in _HOOKS):
            _refuse(
                "modules without hooks",
                f"hooks on module {name} ({type(module).__name__})",
                _HOOKED,
            )
        if type(module) in (nn.Linear, _Layer):
            names.append(name)
            layers.append(module)  # type: ignore[arg-type]
            acts.append(None)
            continue
        activation = _name(module)
        if activation is None:
            _refuse(
                "nn.Linear and activation modules only",
                f"module {name}: {module}",
                "Dropout, normalisation and the like stay outside an MLP."
                if not isinstance(module, nn.Linear)
                else "A subclass may compute something else.",
            )
        if not acts or acts[-1] is not None:
            _refuse("each activation after a Linear", f"module {name}: {module}", _REMEDY)
        acts[-1] = activation
    if any(getattr(sequential, hooks) for hooks in _HOOKS):
        _refuse("a Sequential without hooks", "hooks on the Sequential itself", _HOOKED)
    if not layers:
        _refuse("at least one nn.Linear", "an nn.Sequential without one", _REMEDY)
    hidden = {a or "none" for a in acts[:-1]}
    if len(hidden) > 1:
        _refuse("one activation for all hidden layers", ", ".join(sorted(hidden)), _REMEDY)
    return names, layers, hidden.pop() if hidden else "none", acts[-1] or "none"


def _refuse(expected: str, received: str, remedy: str) -> NoReturn:
    raise InputError(
        "fastlinear.nn.MLP.from_sequential", expected=expected, received=received, remedy=remedy
    )


_MODULES: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
}


def _name(module: nn.Module) -> str | None:
    """fastlinear's name of an activation module, or None."""
    if type(module) is nn.GELU:
        return "gelu" if module.approximate == "none" else "gelu_tanh"
    if type(module) is nn.LeakyReLU:
        return "leaky_relu" if module.negative_slope == LEAKY_RELU_SLOPE else None
    return next((name for name, kind in _MODULES.items() if type(module) is kind), None)


def _module(name: str) -> nn.Module:
    if name == "gelu":
        return nn.GELU()
    if name == "gelu_tanh":
        return nn.GELU(approximate="tanh")
    if name == "leaky_relu":
        return nn.LeakyReLU(LEAKY_RELU_SLOPE)
    if name not in _MODULES:
        raise InputError(
            "fastlinear.nn.MLP.to_sequential",
            expected="an activation that torch has a module for",
            received=repr(name),
            remedy=f"torch has {', '.join((*_MODULES, 'gelu', 'gelu_tanh', 'leaky_relu'))}.",
        )
    return _MODULES[name]()


def _free_name(name: str, taken: Sequence[str]) -> str:
    """A name for the activation after layer ``name``: the next number where that is free."""
    following = str(int(name) + 1) if name.isdecimal() else f"{name}_activation"
    return following if following not in taken else f"{name}_activation"
