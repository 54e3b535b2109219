"""The forward put in place of a module that computes a gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.families.gated.op import call, gated_linear, gated_mlp
from fastlinear.families.gated.stacking import Biases, Weights, split_pre
from fastlinear.nn.recognised import Gated, weights_of
from fastlinear.profile.graph import Observed
from fastlinear.rewrite.swap.forwards import (
    PLAIN_LINEARS,
    Forward,
    is_hooked,
    overridden,
    weight_and_bias,
)
from fastlinear.rewrite.swap.functional_linear import FunctionalLinear
from fastlinear.rewrite.swap.guard import guarded

Path = Sequence[str] | FunctionalLinear
"""What leads to a linear."""


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
    return _call(x, weights, biases, gated.activation, gated.order, backend)


def call_gate(
    parent: nn.Module,
    paths: Sequence[Path | None],
    x: Tensor,
    activation: str,
    order: str,
    backend: str | None,
) -> Tensor:
    """The gated MLP in the forward of a rewritten parent: (..., K) → (..., N). ``paths`` lead from
    the parent to gate, up and down projection, None for one that is not there; those written on
    parameters say where these are.

    Only while every one is a plain linear without hooks; otherwise each is called by itself.
    """
    held = [(None, None) if path is None else _tensors(parent, path, x) for path in paths]
    if None not in held and not overridden():
        weights, biases = zip(*held, strict=True)  # type: ignore[arg-type]
        with suppress(InputError):  # the layers say what is wrong, or take it
            return _call(x, Weights(*weights), Biases(*biases), activation, order, backend)
    gate, up, down = (None if path is None else _linear(parent, path) for path in paths)
    assert gate is not None
    parts = split_pre((gate(x), None if up is None else up(x)), order)
    return _let_through(parts, activation, down)


def call_gate_of(ranks: Collection[int], apart: Callable[..., Any]) -> Callable[..., Tensor]:
    """``call_gate`` for a linear whose output's halves lie as the order says only where x has one
    of these ranks; else they are taken as the forward takes them.

    Args:
        ranks: of x.
        apart: (the linear's output, x) → gate and up.
    """

    def call_gate_of_rank(
        parent: nn.Module,
        paths: Sequence[Path | None],
        x: Tensor,
        activation: str,
        order: str,
        backend: str | None,
    ) -> Tensor:
        if x.dim() in ranks:
            return call_gate(parent, paths, x, activation, order, backend)
        gate, _, down = (None if path is None else _linear(parent, path) for path in paths)
        assert gate is not None
        return _let_through(apart(gate(x), x), activation, down)

    return call_gate_of_rank


def call_gate_on(
    call: Callable[..., Tensor], paths: Sequence[Path | None]
) -> Callable[..., Tensor]:
    """``call`` for linears some of which are written on parameters."""

    def call_gate_functional(parent: nn.Module, x: Tensor, *how: Any) -> Tensor:
        return call(parent, paths, x, *how)

    return call_gate_functional


def _let_through(
    parts: tuple[Tensor, Tensor], activation: str, down: Callable[[Tensor], Tensor] | None
) -> Tensor:
    gate, up = parts
    h: Tensor = activation_of(activation).value(gate) * up
    return h if down is None else down(h)


def _tensors(parent: nn.Module, path: Path, x: Tensor) -> tuple[Tensor, Tensor | None] | None:
    """Weight (N, K) and bias; None where it is no plain linear, or where others have a say."""
    if isinstance(path, FunctionalLinear):
        return path.tensors(parent, x)
    layer = _at(parent, path)
    plain = type(layer) in PLAIN_LINEARS and not is_hooked(layer.__dict__)
    return weight_and_bias(layer) if plain else None


def _linear(parent: nn.Module, path: Path) -> Callable[[Tensor], Tensor]:
    return partial(path.plain, parent) if isinstance(path, FunctionalLinear) else _at(parent, path)


def _at(parent: nn.Module, path: Sequence[str]) -> nn.Module:
    found: Any = parent
    for name in path:
        found = found._modules[name]
    return found  # type: ignore[no-any-return]


def _call(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, backend: str | None
) -> Tensor:
    name = "gated_linear" if weights.down is None else "gated_mlp"
    if not has_torch_function_unary(x):
        return call(x, weights, biases, activation, order, None, backend, name)
    how: dict[str, Any] = {
        "activation": activation,
        "stacked": None if order == "apart" else order,
        "backend": backend,
    }
    function: Callable[..., Tensor] = gated_linear
    given: tuple[Any, ...] = (x, weights.gate, weights.up, biases.gate, biases.up)
    if weights.down is not None:
        function, given = gated_mlp, (x, *weights, *biases)
    y: Tensor = handle_torch_function(function, (x,), *given, **how)
    return y


def _one_call(gated: Gated, backend: str | None) -> Callable[..., Tensor]:
    def run(self: nn.Module, x: Tensor) -> Tensor:
        layers: list[Any] = [self._modules.get(name) for name in gated.names]
        if all(type(m) in PLAIN_LINEARS and not is_hooked(m.__dict__) for m in layers):
            with suppress(InputError):  # the layers say what is wrong, or take it
                return call_gated(x, *weights_of(self, gated), gated, backend)
        y: Tensor = type(self).forward(self, x)
        return y

    return run
