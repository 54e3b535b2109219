"""Many linear layers of one size as one module."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.torchscript import script_layer
from fastlinear.dispatch.backend import check_backend
from fastlinear.families.grouped.layout import NAMES, SHARED
from fastlinear.families.grouped.op import call
from fastlinear.nn.arguments import check_made
from fastlinear.nn.grouped_convert import check_convolution, check_own, fail, parameter
from fastlinear.nn.parameters import weight_and_bias
from fastlinear.nn.plain_linear import why_not_linear

_DEFAULT, _CHANNELS = "... (g k)", "b (g k) ..."


class GroupedLinear(nn.Module):
    """``y_g = act(x_g W_gᵀ + b_g)`` for each of G groups as one layer.

    Args:
        groups: G.
        in_features, out_features: K and N of each group.
        bias: whether to learn an additive bias of shape (G, N).
        activation: a name ``fastlinear.linear_act`` knows.
        layout: the shape of x, a name ``fastlinear.grouped_linear`` knows.
        backend: force a backend; None lets fastlinear choose.
        device, dtype: as for ``nn.Linear``.

    Every group starts as its own ``nn.Linear(in_features, out_features)`` would.

    State: ``weight`` (G, N, K) and ``bias`` (G, N); row g of each is the state of linear layer g:
    ``torch.stack([state[f"{g}.weight"] for g in range(G)])`` of a ``ModuleList``, and
    ``state["weight"].view(G, N, K)`` of a grouped convolution over one position.

    Raises:
        InputError: a size below 1 group or 0 features or no whole number, an unknown activation,
            layout or backend, a dtype that is not served.

    >>> import torch, fastlinear as fl
    >>> layer = fl.nn.GroupedLinear(2, 3, 4, activation="relu")
    >>> layer(torch.ones(5, 2 * 3)).shape
    torch.Size([5, 8])
    >>> [tuple(t.shape) for t in layer.state_dict().values()]
    [(2, 4, 3), (2, 4)]
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    positions: int | None = None  # dimensions of a convolution's positions

    __prepare_scriptable__ = script_layer

    def __init__(
        self,
        groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str = "none",
        *,
        layout: str = _DEFAULT,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        activation_of(activation, "fastlinear.nn.GroupedLinear")
        if layout not in NAMES:
            fail(
                "", f"layout in {', '.join(map(repr, NAMES))}", repr(layout), "It names x's shape."
            )
        served_by = "linear_act" if layout == SHARED else "grouped_linear"
        check_backend(backend, served_by, "fastlinear.nn.GroupedLinear")
        sizes = {"groups": groups, "in_features": in_features, "out_features": out_features}
        check_made("fastlinear.nn.GroupedLinear", dtype, **sizes)
        if groups < 1:
            fail("", "at least one group", f"groups={groups!r}", "One group is a linear layer.")
        self.groups, self.in_features, self.out_features = groups, in_features, out_features
        self.activation, self.layout, self.backend = activation, layout, backend
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features, **made))
        self.bias = nn.Parameter(torch.empty(groups, out_features, **made)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw weight and bias anew, as ``nn.Linear`` does for each group."""
        bound = 1 / math.sqrt(self.in_features) if self.in_features else 0.0
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        """act(x_g W_gᵀ + b_g); x in the layer's layout → y in the same. Made of a convolution, the
        layer takes x without a batch too."""
        if self.positions is not None and isinstance(x, Tensor) and x.dim() == self.positions + 1:
            return self.forward(x.unsqueeze(0)).squeeze(0)
        weight, bias = weight_and_bias(self)
        return call(x, weight, bias, self.activation, self.layout, self.backend)

    @classmethod
    def from_linears(
        cls,
        linears: Iterable[nn.Module],
        activation: str = "none",
        *,
        layout: str = _DEFAULT,
        backend: str | None = None,
    ) -> GroupedLinear:
        """A layer holding copies of the parameters of equal ``nn.Linear`` layers, one a group.

        Raises InputError where one is no ``nn.Linear`` or does more than that, where sizes, biases,
        dtypes or devices differ, and where layers share a parameter or only some are frozen.
        """
        layers: list[nn.Linear] = []
        if isinstance(linears, (nn.ModuleDict, Mapping, Set, str, Tensor)) or not hasattr(
            linears, "__iter__"
        ):
            fail(
                ".from_linears",
                "an nn.ModuleList, or a list or tuple, of nn.Linear layers",
                type(linears).__name__,
                "Give them in the order of the groups; of a dictionary its values().",
            )
        for i, linear in enumerate(linears):
            reason = why_not_linear(linear)
            if reason is not None or not isinstance(linear, nn.Linear):
                fail(
                    ".from_linears",
                    f"layer {i} to be an nn.Linear that computes x Wᵀ + b and nothing else",
                    str(reason),
                    "Leave other modules out, or remove what was added.",
                )
            if layers and _facts(linear) != _facts(layers[0]):
                fail(
                    ".from_linears",
                    f"layers like the first: {_facts(layers[0])}",
                    f"layer {i}: {_facts(linear)}",
                    "Group layers of one size, dtype and device, all with a bias or none.",
                )
            layers.append(linear)
        if not layers:
            fail(".from_linears", "at least one layer", "none", "Pass the ModuleList itself.")
        check_own(layers, ".from_linears")
        first = layers[0]
        made = cls(
            *(len(layers), first.in_features, first.out_features, first.bias is not None),
            activation,
            layout=layout,
            backend=backend,
            device="meta",
            dtype=first.weight.dtype,
        )
        made.weight = parameter([a.weight for a in layers])
        if first.bias is not None:
            made.bias = parameter([a.bias for a in layers])
        return made.train(first.training)

    def to_linears(self) -> nn.ModuleList:
        """One ``nn.Linear`` a group with copies of its parameters; the activation is left out."""
        layers = []
        for g in range(self.groups):
            linear = nn.Linear(
                self.in_features, self.out_features, self.bias is not None, device="meta"
            )
            linear.weight = parameter(self.weight, g)
            if self.bias is not None:
                linear.bias = parameter(self.bias, g)
            layers.append(linear)
        return nn.ModuleList(layers).train(self.training)

    @classmethod
    def from_conv1d(
        cls, conv: nn.Module, activation: str = "none", *, backend: str | None = None
    ) -> GroupedLinear:
        """A layer for x (B, G·K, L), or (G·K, L) without a batch, holding copies of the parameters
        of a convolution over one position: kernel size and stride 1, no padding, any number of
        groups.

        Raises InputError for any other module, or where it does more (hooks, another forward).
        """
        check_convolution(conv, nn.Conv1d, ".from_conv1d")
        return cls._from_convolution(conv, 1, activation, backend)

    @classmethod
    def from_conv2d(
        cls, conv: nn.Module, activation: str = "none", *, backend: str | None = None
    ) -> GroupedLinear:
        """``from_conv1d`` for an ``nn.Conv2d``: x is (B, G·K, H, W), or (G·K, H, W)."""
        check_convolution(conv, nn.Conv2d, ".from_conv2d")
        return cls._from_convolution(conv, 2, activation, backend)

    @classmethod
    def _from_convolution(
        cls, conv: Any, positions: int, activation: str, backend: str | None
    ) -> GroupedLinear:
        k, n = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        made = cls(
            *(conv.groups, k, n, conv.bias is not None, activation),
            layout=_CHANNELS,
            backend=backend,
            device="meta",
            dtype=conv.weight.dtype,
        )
        made.positions = positions
        made.weight = parameter(conv.weight, shape=(conv.groups, n, k))
        if conv.bias is not None:
            made.bias = parameter(conv.bias, shape=(conv.groups, n))
        return made.train(conv.training)

    def to_conv1d(self) -> nn.Conv1d:
        """An ``nn.Conv1d`` over one position with copies of the parameters, for x (B, G·K, L); the
        activation is left out.

        Raises InputError where all groups read the same features, as no grouped convolution does.
        """
        return self._to_convolution(nn.Conv1d, ".to_conv1d", 1)  # type: ignore[no-any-return]

    def to_conv2d(self) -> nn.Conv2d:
        """``to_conv1d`` as an ``nn.Conv2d``, for x (B, G·K, H, W)."""
        return self._to_convolution(nn.Conv2d, ".to_conv2d", 2)  # type: ignore[no-any-return]

    def _to_convolution(self, kind: Any, where: str, positions: int) -> Any:
        if self.layout == SHARED:
            fail(
                where,
                "groups with features of their own",
                f"layout={self.layout!r}, in which all read the same",
                "Take to_linears(), or a convolution of one group.",
            )
        groups, n, k = self.weight.shape
        conv = kind(
            groups * k, groups * n, 1, groups=groups, bias=self.bias is not None, device="meta"
        )
        conv.weight = parameter(self.weight, shape=(groups * n, k, *(1,) * positions))
        if self.bias is not None:
            conv.bias = parameter(self.bias, shape=(groups * n,))
        return conv.train(self.training)

    def extra_repr(self) -> str:
        """Sizes, bias, activation and layout."""
        return (
            f"groups={self.groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}, "
            f"activation={self.activation!r}, layout={self.layout!r}"
        )


def _facts(linear: nn.Linear) -> str:
    w = linear.weight
    bias = "bias" if linear.bias is not None else "no bias"
    return f"{linear.in_features} → {linear.out_features}, {bias}, {w.dtype}, {w.device}"
