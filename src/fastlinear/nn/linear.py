"""nn.Linear with its activation inside."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.torchscript import script_layer
from fastlinear.dispatch.backend import check_backend
from fastlinear.families.linear.op import call
from fastlinear.nn.arguments import check_made
from fastlinear.nn.parameters import weight_and_bias
from fastlinear.nn.plain_linear import why_not_linear, why_not_shared


class Linear(nn.Linear):
    """``act(x Wᵀ + b)`` as one layer; a subclass of ``nn.Linear`` with the same ``state_dict``.

    Args:
        in_features: K.
        out_features: N.
        bias: whether to learn an additive bias of shape (N,).
        activation: a name ``fastlinear.linear_act`` knows; ``"none"`` is a plain linear layer.
        backend: force a backend of the forward; None lets fastlinear choose.
        device, dtype: as for ``nn.Linear``.

    Shapes: input (..., K) → output (..., N).

    Raises:
        InputError: a size is no whole number or negative, the activation or the backend is
            unknown, or the dtype is not served.

    >>> import torch, fastlinear as fl
    >>> layer = fl.nn.Linear(3, 4, activation="gelu_tanh")
    >>> layer(torch.ones(2, 3)).shape
    torch.Size([2, 4])
    >>> sorted(layer.state_dict())
    ['bias', 'weight']
    """

    __prepare_scriptable__ = script_layer

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        activation_of(activation, "fastlinear.nn.Linear")
        check_backend(backend, "linear_act", "fastlinear.nn.Linear")
        sizes = {"in_features": in_features, "out_features": out_features}
        check_made("fastlinear.nn.Linear", dtype, **sizes)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = activation
        self.backend = backend

    def forward(self, x: Tensor) -> Tensor:
        """act(x Wᵀ + b); x (..., K) → (..., N)."""
        return call(x, *weight_and_bias(self), self.activation, self.backend)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, activation: str | None = None, *, backend: str | None = None
    ) -> Linear:
        """A layer sharing ``linear``'s parameters (the same tensors, not copies).

        Args:
            linear: an ``nn.Linear``, or a layer of this class.
            activation: None for the layer's own: that of a layer of this class, else none.
            backend: None for the layer's own.

        Raises:
            InputError: calling ``linear`` does anything else (a forward of its own, hooks), its
                parameters are computed from others, or it has another activation.
        """
        if not isinstance(linear, nn.Linear):
            raise InputError(
                "fastlinear.nn.Linear.from_linear",
                "an nn.Linear",
                type(linear).__name__,
                "Build it directly: fastlinear.nn.Linear(in_features, out_features).",
            )
        ours = isinstance(linear, Linear)
        _check_shared(linear, "from_linear", Linear.forward if ours else nn.Linear.forward)
        own = linear.activation if isinstance(linear, Linear) else "none"
        if activation not in (None, own) and own != "none":
            raise InputError(
                "fastlinear.nn.Linear.from_linear",
                f"activation={own!r} as in the layer, or None for it",
                f"activation={activation!r}",
                "Give .to_linear() of the layer, which is without its activation.",
            )
        if backend is None and isinstance(linear, Linear):
            backend = linear.backend
        layer = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            activation=own if activation is None else activation,
            backend=backend,
            device="meta",
        )
        layer.weight = linear.weight
        if linear.bias is not None:
            layer.bias = linear.bias
        layer.train(linear.training)
        return layer

    def to_linear(self) -> nn.Linear:
        """A plain ``nn.Linear`` sharing this layer's parameters; the activation is left out.

        Raises:
            InputError: calling this layer does more (a forward of a subclass, hooks), or its
                parameters are computed from others.
        """
        _check_shared(self, "to_linear", Linear.forward)
        linear = nn.Linear(
            self.in_features, self.out_features, bias=self.bias is not None, device="meta"
        )
        linear.weight = self.weight
        if self.bias is not None:
            linear.bias = self.bias
        linear.train(self.training)
        return linear

    def extra_repr(self) -> str:
        """nn.Linear's line plus the activation."""
        return f"{super().extra_repr()}, activation={self.activation!r}"


def _check_shared(linear: nn.Linear, method: str, forward: object) -> None:
    """Raise unless all that the layer does is ``forward`` on parameters that can be shared."""
    reason = why_not_linear(linear, forward) or why_not_shared(linear)
    if reason is not None:
        raise InputError(
            f"fastlinear.nn.Linear.{method}",
            "a layer that only computes x Wᵀ + b (and its activation) from its parameters",
            reason,
            "Remove what was added to it, or keep the layer as it is.",
        )
