"""The forward put in place of a module that computes a gated MLP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from fastlinear.nn.gated_match import Gated, weights_of
from fastlinear.ops.gated_mlp.op import call, gated_linear, gated_mlp
from fastlinear.ops.gated_mlp.stacking import Biases, Weights
from fastlinear.profile.graph import Observed
from fastlinear.rewrite.exchange.forwards import (
    PLAIN_LINEARS,
    Forward,
    hooked_globally,
    is_hooked,
)
from fastlinear.rewrite.exchange.guard import guarded


def gated_forward(
    module: nn.Module, gated: Gated, observed: Observed, backend: str | None
) -> Forward:
    """A forward that makes one call of ``gated_mlp`` while the module is as it was.

    Args:
        module: what computes it; the result holds no reference to it.
        gated: how.
        observed: its arguments: one tensor.
        backend: forced backend, or None.
    """
    layers = set(gated.names)
    passed_over = tuple(n for n, m in module._modules.items() if m is not None and n not in layers)
    return guarded(module, _one_call(gated, backend), observed, passed_over)


def call_gated(
    x: Tensor, weights: Weights, biases: Biases, gated: Gated, backend: str | None
) -> Tensor:
    """``gated_mlp`` or ``gated_linear`` as one of torch's functions: (..., K) → (..., N)."""
    name = "gated_linear" if gated.down is None else "gated_mlp"
    if not has_torch_function_unary(x):
        return call(x, weights, biases, gated.activation, gated.order, None, backend, name)
    how: dict[str, Any] = {
        "activation": gated.activation,
        "stacked": None if gated.order == "apart" else gated.order,
        "backend": backend,
    }
    function: Callable[..., Tensor] = gated_linear
    given: tuple[Any, ...] = (x, weights.gate, weights.up, biases.gate, biases.up)
    if gated.down is not None:
        function, given = gated_mlp, (x, *weights, *biases)
    y: Tensor = handle_torch_function(function, (x,), *given, **how)
    return y


def _one_call(gated: Gated, backend: str | None) -> Callable[..., Tensor]:
    def run(self: nn.Module, x: Tensor) -> Tensor:
        for name in gated.names:
            layer: Any = self._modules.get(name)
            if type(layer) not in PLAIN_LINEARS or is_hooked(layer.__dict__) or hooked_globally():
                y: Tensor = type(self).forward(self, x)
                return y
        return call_gated(x, *weights_of(self, gated), gated, backend)

    return run
