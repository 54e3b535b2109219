"""A module that computes a grouped linear layer, as one call of ``grouped_linear``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import reference
from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.ops.grouped_linear.selection import problem_of
from fastlinear.profile.graph import Observed
from fastlinear.rewrite.exchange.grouped_forward import (
    CHANNELS_LAST,
    LINEARS,
    Grouped,
    Parameters,
    call_grouped,
    grouped_forward,
    lies_channels_last,
)
from fastlinear.rewrite.exchange.swap import Swap
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import Candidate, Chain, named


@dataclass(frozen=True, eq=False, kw_only=True)
class GroupedChain(Chain):
    """A module whose forward is exchanged: a convolution, one with weights of its own (then its
    only member is itself), or a loop over linears (its members).

    Attributes:
        grouped: how the module computes a grouped linear layer.
        observed: its arguments in one call: one tensor.
        seen: how the module was called.
    """

    grouped: Grouped
    observed: Observed
    seen: SiteCalls

    @property
    def rule(self) -> str:
        """grouped_linear."""
        return NAME

    @property
    def route(self) -> str:
        """``"own"`` where the weight is the module's own."""
        return "chain" if self.grouped.kind == LINEARS else "own"

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        named = "linears" if self.grouped.kind == LINEARS else "groups"
        return f"its {self.grouped.groups} {named}"

    @property
    def title(self) -> str:
        """The module's name."""
        return named(self.fqn)

    @property
    def calls(self) -> SiteCalls:
        """How the module was called."""
        return self.seen

    @property
    def eager_may_gain(self) -> bool:
        """PyTorch's own batched product is not what the module runs."""
        return True

    @property
    def alike(self) -> tuple[Any, ...]:
        """Modules of one class and layout do the same beside the products."""
        return (type(self.module), self.grouped.kind, self.grouped.layout, self.grouped.turned)

    def _problem(self, x: Tensor) -> Problem:
        dtype, layout = self.calls.autocast, self.grouped.layout
        weight, bias = (None if t is None else t.detach() for t in self._parameters())
        assert weight is not None
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if lies_channels_last(x, self.grouped):
            x, layout = x.movedim(1, -1), CHANNELS_LAST
        rows = layouts.blocks(x, layout, self.grouped.groups, self.grouped.k)
        order = layouts.order_of(layout, x.shape)
        return problem_of(rows, weight, bias, self.grouped.activation, order, self.calls.grad)

    def swap(self) -> Swap:
        """The forward to exchange."""
        made = grouped_forward(self.module, self.grouped, self.observed, self.backend)
        return Swap(self.fqn, self.module, made)

    def parameters(self) -> dict[str, Tensor]:
        """Parameters by the names of their gradients."""
        if self.grouped.kind == LINEARS:
            return super().parameters()
        named = {"dW": self.grouped.weight, "db": self.grouped.bias}
        return {title: getattr(self.module, n) for title, n in named.items() if n is not None}

    def _parameters(self) -> Parameters:
        found = self.grouped.parameters(self.module)
        assert found is not None
        return found

    def before(self, x: Tensor) -> Tensor:
        """What the model did with the module's input."""
        y: Tensor = type(self.module).forward(self.module, x)
        return y

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        """The layers one by one, those in ``rewritten`` (by name) as it has them."""
        if self.grouped.kind != LINEARS:
            return self.before(x)
        layout, groups = layouts.LAYOUTS[self.grouped.layout], self.grouped.groups
        where = 1 if layout.order == "channels" else -1
        wide = x.unflatten(where, (groups, self.grouped.k)) if layout.merged else x
        axis = {"tokens": -2, "groups": 0, "channels": 1}[layout.order]
        value, found = activation_of(self.grouped.activation).value, []
        for member, part in zip(self.members, wide.unbind(axis), strict=True):
            known = rewritten.get(member.fqn)
            last = part if layout.order != "channels" else part.movedim(1, -1)
            if known is None:
                y, done = type(member.module).forward(member.module, last), "none"
            else:
                y, done = known.after(last), known.activation
            y = y if done != "none" else value(y)
            found.append(y if layout.order != "channels" else y.movedim(-1, 1))
        return torch.cat(found, where) if layout.merged else torch.stack(found, axis)

    def after(self, x: Tensor) -> Tensor:
        """One call of ``grouped_linear``."""
        return call_grouped(x, *self._parameters(), self.grouped, self.backend)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        if self.grouped.kind == LINEARS:
            count = range(len(self.members))
            weight = torch.stack([parameters[f"{i}.dW"] for i in count])
            bias = None
            if "0.db" in parameters:
                bias = torch.stack([parameters[f"{i}.db"] for i in count])
        else:
            weight, bias = self.grouped.views(parameters["dW"], parameters.get("db"))
        names = self.grouped.activation, self.grouped.layout
        return reference.grouped_linear(x, weight, bias, *names)
