"""Linears of a list, of any sizes, that a parent's forward calls side by side, as one call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import reference
from fastlinear.rewrite.exchange.tower_forward import abreast
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.chain_towers import TowerChain

NAME = "unequal_linear"
SHARED, PARTS, OWN_INPUTS = "one input", "parts of one tensor", "inputs of their own"


@dataclass(frozen=True, eq=False, kw_only=True)
class ListChain(TowerChain):
    """Linears of a list in the traced forward of a parent, the module whose forward is exchanged.

    Its input is the value that all linears read; or theirs behind one another (..., K_0 + K_1 + …)
    where they lie in rows of a larger tensor; or all their numbers in one row.

    Attributes:
        read: what the linears read: ``SHARED``, ``PARTS`` or ``OWN_INPUTS``.
        shapes: of the inputs of each kind of call.
    """

    read: str
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def rule(self) -> str:
        """unequal_linear."""
        return NAME

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        return f"its {len(self.members)} linears on {self.read}"

    @property
    def title(self) -> str:
        """What it is called in notes: the same linears may be another chain as well."""
        return f"{super().title} as {NAME}"

    @property
    def alike(self) -> tuple[Any, ...]:
        """Linears of the same sizes on inputs of the same shapes do the same."""
        return (*super().alike, self.shapes, self.read, self._activations)

    @property
    def calls(self) -> SiteCalls:
        """How all were called."""
        known = replace(
            self.members[0].calls, grad=any(c.calls.grad for c in self.members)
        )  # some may be frozen
        if self.read == SHARED:
            return known
        kinds = []
        for same in zip(*(c.calls.kinds for c in self.members), strict=True):
            grad = any(kind.input_grad for kind in same)
            kinds.append(
                replace(same[0], x=self._joined([kind.x for kind in same]), input_grad=grad)
            )
        return replace(known, kinds=tuple(kinds))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Of its first linear, for each kind of call."""
        return self.members[0].problems

    @property
    def _activations(self) -> tuple[str, ...]:
        """Behind each: in the call, or as the forward has it."""
        fused = self.way.activations[0]
        return tuple(c.activation if fused == "none" else fused for c in self.members)

    def _joined(self, xs: list[Tensor]) -> Tensor:
        if self.read == PARTS:
            return torch.cat(xs, -1)
        return torch.cat([x.reshape(-1) for x in xs])

    def _inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each linear reads."""
        if self.read == SHARED:
            return (x,) * len(self.members)
        if self.read == PARTS:
            return x.split([tower.sizes[0][1] for tower in self.group.towers], -1)
        for shapes in self.shapes:
            sizes = [math.prod(shape) for shape in shapes]
            if sum(sizes) == x.numel():
                pairs = zip(x.split(sizes), shapes, strict=True)
                return tuple(part.view(shape) for part, shape in pairs)
        raise AssertionError("an input of another kind of call")

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the model did with the inputs."""
        return self.layers(x, {})

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """The linears one by one, those in ``rewritten`` (by name) as it has them."""
        ys = []
        for c, part, name in zip(self.members, self._inputs(x), self._activations, strict=True):
            found = rewritten.get(c.fqn)
            if found is None or found.chain is not None:
                y, done = type(c.module).forward(c.module, part), "none"
            else:
                y, done = found.after(part), found.activation
            ys.append(y if done == name else activation_of(name).value(y))
        return tuple(ys)

    def after(self, x: Tensor) -> tuple[Tensor, ...]:
        """One call, and the activations that the forward keeps."""
        weights, biases = self._tensors()
        ys = abreast(self._inputs(x), [weights], [biases], way=self.way)
        if self.way.activations[0] != "none":
            return ys
        return tuple(activation_of(n).value(y) for y, n in zip(ys, self._activations, strict=True))

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        pairs = zip(self._inputs(x), self._activations, strict=True)
        return tuple(
            reference.linear_act(part, parameters[f"{i}.dW"], parameters.get(f"{i}.db"), name)
            for i, (part, name) in enumerate(pairs)
        )
