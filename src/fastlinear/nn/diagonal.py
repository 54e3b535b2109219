"""A linear layer whose weight is a diagonal."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.core.torchscript import script_layer
from fastlinear.dispatch.backend import check_backend
from fastlinear.families.diagonal.op import call
from fastlinear.nn.arguments import check_made
from fastlinear.nn.parameters import weight_and_bias
from fastlinear.nn.plain_linear import why_not_linear, why_not_shared
from fastlinear.nn.recognised import Scaling, is_hooked, recognised

_NAME = "fastlinear.nn.DiagonalLinear"
_BUILD_IT = "Build it directly: fastlinear.nn.DiagonalLinear(features)."


class DiagonalLinear(nn.Module):
    """``act(x ∘ w + b)``, plus a residual if one is given, in one pass over memory.

    Starts as the identity: weight 1, bias 0.

    Args:
        features: K; 0 makes a layer of no numbers, as ``nn.Linear`` does.
        bias: whether to learn an additive bias of shape (K,).
        activation: a name ``fastlinear.diagonal_linear`` knows.
        backend: force a backend; None lets fastlinear choose.
        device, dtype: as for ``nn.Linear``.

    Shapes: input (..., K) → output (..., K); a residual has the input's shape.

    Under autocast it computes as a linear layer does, in 16 bits; one from a LayerScale as that
    does: what PyTorch multiplies is not cast there, and a float32 scale gives float32.

    Raises:
        InputError: features is no whole number or negative, the activation or the backend is
            unknown, or the dtype is not served.

    >>> import torch, fastlinear as fl
    >>> layer = fl.nn.DiagonalLinear(3, activation="relu")
    >>> stream = torch.ones(2, 3)
    >>> layer(stream, residual=stream).detach()
    tensor([[2., 2., 2.],
            [2., 2., 2.]])
    """

    __prepare_scriptable__ = script_layer

    def __init__(
        self,
        features: int,
        bias: bool = True,
        activation: str = "none",
        *,
        backend: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        activation_of(activation, _NAME)
        check_backend(backend, "diagonal_linear", _NAME)
        check_made(_NAME, dtype, features=features)
        super().__init__()
        self.features = features
        self.activation = activation
        self.backend = backend
        self._scales = False  # in a LayerScale's place
        self.weight = nn.Parameter(torch.ones(features, device=device, dtype=dtype))
        zeros = torch.zeros(features, device=device, dtype=dtype) if bias else None
        self.bias: nn.Parameter | None
        self.register_parameter("bias", None if zeros is None else nn.Parameter(zeros))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """act(x ∘ w + b) + residual; x and residual (..., K) → (..., K)."""
        if self._scales and isinstance(x, Tensor):
            mixed = x.dtype is not self.weight.dtype
            if mixed or torch.is_autocast_enabled(x.device.type):
                return self._scaled(x, residual)
        weight, bias = weight_and_bias(self)
        return call(x, weight, (bias, residual), self.activation, self.backend)

    def _scaled(self, x: Tensor, residual: Tensor | None) -> Tensor:
        """The same of several dtypes, as PyTorch promotes; and under autocast, which casts no such
        operation."""
        with torch.autocast(x.device.type, enabled=False):
            given = (x, self.weight) if residual is None else (x, self.weight, residual)
            if len({t.dtype for t in given}) == 1:
                return call(x, self.weight, (None, residual), "none", self.backend)
            y = x * self.weight
            return y if residual is None else residual + y

    @classmethod
    def from_layer_scale(cls, scale: nn.Module, *, backend: str | None = None) -> DiagonalLinear:
        """A layer sharing the one parameter of a LayerScale, as timm and transformers have them.

        ``layer(branch, residual=stream)`` then also adds the branch to its stream. In its
        ``state_dict`` the parameter is ``weight``, whatever the module calls it: rename the key,
        ``gamma`` or ``lambda1``, of what was saved before.

        What the module computes is recognised as ``optimize_`` does: in the trace of its forward,
        and on a copy of it with other numbers, in training and not; those it holds do not matter.
        Inputs of another dtype than its parameter's are promoted, as by the module.

        Args:
            scale: a module with one parameter of shape (K,) and nothing else, whose forward
                multiplies its input by it.
            backend: as for the class.

        Raises:
            InputError: it holds anything else, computes anything else, cannot be traced, writes
                over its input, has hooks, which the layer would not have, or is on the meta device.
        """
        weight = _only_parameter(scale)
        kind = type(scale).__name__
        if is_hooked(scale):
            _fail(
                "a module without hooks of its own, which the layer would not have",
                f"a {kind} with hooks",
                "Remove them, convert, and register them on the result.",
            )
        if weight.is_meta:
            _fail(
                "a parameter with values",
                f"a {kind} on the meta device",
                "Convert it after module.to_empty(device=...) or after loading its state_dict.",
            )
        found = recognised(Scaling, scale)
        if isinstance(found, str) or found.activation != "none":
            why = found if isinstance(found, str) else f"it takes {found.activation} as well"
            _fail("a module that multiplies by its parameter, trained or not", f"{kind}: {why}")
        if found.in_place:
            _fail(
                "a module that leaves its input as it is, as the layer does",
                f"a {kind} that writes over it",
                "Have it multiply out of place (inplace=False) where nothing reads its input then.",
            )
        layer = cls(weight.numel(), bias=False, backend=backend, device="meta")
        layer.weight = weight
        layer._scales = True
        layer.train(scale.training)
        return layer

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, activation: str = "none", *, backend: str | None = None
    ) -> DiagonalLinear:
        """A layer for an ``nn.Linear`` whose weight is exactly diagonal: off it only zeros.

        The bias is shared, the weight is a copy of the diagonal.

        Raises:
            InputError: no ``nn.Linear`` or one that does more (hooks, a forward of its own), not
                square, or a number off the diagonal is not 0.
        """
        reason = why_not_linear(linear) or why_not_shared(linear)
        if reason is not None:
            _fail("an nn.Linear that computes x Wᵀ + b from its parameters", reason)
        full = linear.weight.detach()
        if full.shape[0] != full.shape[1]:
            _fail("a square weight", f"shape {tuple(full.shape)}")
        kept = full.diagonal()
        others = int(torch.count_nonzero(full)) - int(torch.count_nonzero(kept))
        if others:
            _fail("zeros off the diagonal", f"{others} other numbers")
        layer = cls(
            full.shape[0],
            bias=linear.bias is not None,
            activation=activation,
            backend=backend,
            device="meta",
        )
        layer.weight = nn.Parameter(kept.clone(), requires_grad=linear.weight.requires_grad)
        if linear.bias is not None:
            layer.bias = linear.bias
        layer.train(linear.training)
        return layer

    def to_linear(self) -> nn.Linear:
        """An ``nn.Linear`` with the diagonal written out; bias shared, activation left out."""
        linear = nn.Linear(self.features, self.features, self.bias is not None, device="meta")
        full = torch.diag(self.weight.detach())
        linear.weight = nn.Parameter(full, requires_grad=self.weight.requires_grad)
        if self.bias is not None:
            linear.bias = self.bias
        linear.train(self.training)
        return linear

    def extra_repr(self) -> str:
        """Sizes and options, as ``nn.Linear`` shows them."""
        bias = self.bias is not None
        return f"features={self.features}, bias={bias}, activation={self.activation!r}"


def _only_parameter(scale: nn.Module) -> nn.Parameter:
    if not isinstance(scale, nn.Module):
        _fail("an nn.Module", type(scale).__name__)
    parameters = list(scale.parameters())
    alone = not list(scale.children()) and not list(scale.buffers())
    if len(parameters) != 1 or parameters[0].dim() != 1 or not alone:
        shapes = [tuple(p.shape) for p in parameters]
        _fail("one parameter of shape (K,) and nothing else", f"parameters of shapes {shapes}")
    return parameters[0]


def _fail(expected: str, received: str, remedy: str = _BUILD_IT) -> NoReturn:
    raise InputError(_NAME, expected, received, remedy)
