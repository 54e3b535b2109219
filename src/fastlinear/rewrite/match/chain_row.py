"""Linears that a parent's forward calls on one input, as one linear."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.ops.grouped_linear.selection import problem_of as grouped_problem
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.op import problem_of
from fastlinear.rewrite.exchange.grouped_forward import stacked
from fastlinear.rewrite.exchange.parts import side_by_side
from fastlinear.rewrite.exchange.row_forward import behind_one_another, together
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import Candidate, Chain
from fastlinear.rewrite.match.chain_lists import PARTS, SHARED, ListChain
from fastlinear.rewrite.match.parent import Fusable

_LAYOUT = "g ... k"


@dataclass(frozen=True, eq=False, kw_only=True)
class RowChain(Chain):
    """Linears on one input in the traced forward of a parent, the module whose forward is
    exchanged. An activation behind one of them stays what it is.

    Attributes:
        row: their names inside the parent.
        fusable: the parent's trace; it builds one forward for all that is fused in it.
    """

    row: tuple[str, ...]
    fusable: Fusable

    @property
    def rule(self) -> str:
        """grouped_linear."""
        return NAME

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        return f"its {len(self.members)} linears on one input"

    @property
    def eager_may_gain(self) -> bool:
        """One product may be faster than several, whoever computes it."""
        return True

    @property
    def alike(self) -> tuple[Any, ...]:
        """Rows of the same layers do the same."""
        named = zip(self._tensors()[0], self.members, strict=True)
        return tuple((len(w), c.activation) for w, c in named)

    def _problem(self, x: Tensor) -> Problem:
        dtype = self.calls.autocast
        with torch.no_grad():
            joined = behind_one_another(*self._tensors())
        assert joined is not None
        weight, bias = joined
        if dtype is not None:
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        return problem_of(x, weight, bias, "none", self.calls.grad)

    def _together(self, x: Tensor) -> tuple[Tensor, ...] | None:
        return together(x, *self._tensors())

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the model did with the input."""
        return self.layers(x, {})

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """The layers one by one, those in ``rewritten`` (by name) as it has them; all in the call
        of the list that they are, where it has that."""
        rival = self._rival(rewritten)
        if rival is not None:
            return rival.after(x)
        ys = []
        for c in self.members:
            known = rewritten.get(c.fqn)
            ys.append(c.before(x) if known is None else known.after(x))
        return tuple(ys)

    def _rival(self, rewritten: Mapping[str, Candidate]) -> ListChain | None:
        """The list that all these linears are one call of already, on the same input."""
        found = rewritten.get(self.key)
        rival = None if found is None else found.chain
        read = PARTS if isinstance(self, LoopChain) else SHARED
        if not isinstance(rival, ListChain) or rival.read != read:
            return None
        return rival if set(rival.names) == set(self.names) else None

    def after(self, x: Tensor) -> tuple[Tensor, ...]:
        """One product, and the activations there are."""
        ys = self._together(x)
        assert ys is not None
        named = zip(ys, self.members, strict=True)
        return tuple(activation_of(c.activation).value(y) for y, c in named)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        return tuple(
            reference.linear_act(x, parameters[f"{i}.dW"], parameters.get(f"{i}.db"), c.activation)
            for i, c in enumerate(self.members)
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class LoopChain(RowChain):
    """Linears of one size on the parts of one value (..., G·K) in a parent's traced forward."""

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        return f"its {len(self.members)} linears on parts of one tensor"

    @property
    def calls(self) -> SiteCalls:
        """How all were called: the value their inputs are parts of, of other numbers."""
        known, count = self.members[0].calls, len(self.members)
        generator = torch.Generator("cpu").manual_seed(0)

        def whole(x: Tensor) -> Tensor:
            drawn = torch.randn(
                (*x.shape[:-1], count * x.shape[-1]), generator=generator, device="cpu"
            )
            return drawn.to(x.device, x.dtype)

        return replace(known, kinds=tuple(replace(k, x=whole(k.x)) for k in known.kinds))

    def _problem(self, x: Tensor) -> Problem:
        weights, biases = self._tensors()
        with torch.no_grad():
            found = stacked(weights, biases)
        assert found is not None
        rows = layouts.blocks(self._parts(x), _LAYOUT, *found[0].shape[::2])
        return grouped_problem(rows, *found, "none", "groups", self.calls.grad)

    def _parts(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (len(self.members), -1)).movedim(-2, 0)

    def _together(self, x: Tensor) -> tuple[Tensor, ...] | None:
        return side_by_side(x, *self._tensors())

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """The layers one by one, those in ``rewritten`` (by name) as it has them."""
        rival = self._rival(rewritten)
        if rival is not None:
            return rival.after(x)
        ys = []
        for c, part in zip(self.members, x.chunk(len(self.members), -1), strict=True):
            known = rewritten.get(c.fqn)
            ys.append(c.before(part) if known is None else known.after(part))
        return tuple(ys)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        parts = x.chunk(len(self.members), -1)
        return tuple(
            reference.linear_act(
                parts[i], parameters[f"{i}.dW"], parameters.get(f"{i}.db"), c.activation
            )
            for i, c in enumerate(self.members)
        )
