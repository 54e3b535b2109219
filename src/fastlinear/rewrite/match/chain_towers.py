"""Towers that a parent's forward calls side by side, layer by layer as one call each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.ops.grouped_linear.selection import problem_of
from fastlinear.ops.linear_act import reference
from fastlinear.rewrite.exchange.grouped_forward import stacked
from fastlinear.rewrite.exchange.tower_forward import LISTS, Layers, Way, abreast
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import Candidate, Chain
from fastlinear.rewrite.match.chain_sequential import SequentialChain
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.towers import Abreast


@dataclass(frozen=True, eq=False, kw_only=True)
class TowerChain(Chain):
    """Towers in the traced forward of a parent, the module whose forward is exchanged.

    Its members are the linears, tower by tower; its input is the value that all towers read, or
    theirs in one tensor: (T, ..., K), of unequal sizes (..., K_0 + K_1 + …).

    Attributes:
        group: the towers.
        way: how a layer of all of them is one call.
        fusable: the parent's trace; it builds one forward for all that is fused in it.
    """

    group: Abreast
    way: Way
    fusable: Fusable

    @property
    def rule(self) -> str:
        """grouped_linear."""
        return NAME

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        layers = len(self.way.activations)
        return f"its {len(self.group.towers)} towers of {layers} linears, each layer"

    @property
    def eager_may_gain(self) -> bool:
        """One product may be faster than several, whoever computes it."""
        return True

    @property
    def alike(self) -> tuple[Any, ...]:
        """Towers of the same sizes do the same."""
        sizes = tuple(tower.sizes for tower in self.group.towers)
        return (sizes, self.way, self.group.shared)

    @property
    def served(self) -> dict[str, str] | None:
        """Lists of weights are served by one backend of unequal_linear."""
        return {"forward": "together"} if self.way.kind == LISTS else None

    @property
    def calls(self) -> SiteCalls:
        """How all were called."""
        known = self.members[0].calls
        if self.group.shared:
            return known
        firsts = [tower[0].calls.kinds for tower in self._towers()]
        kinds = [
            replace(
                same[0],
                x=self._joined([kind.x for kind in same]),
                input_grad=any(kind.input_grad for kind in same),
            )
            for same in zip(*firsts, strict=True)
        ]
        return replace(known, kinds=tuple(kinds))

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Of its first layer; of lists those of its first linear."""
        if self.way.kind == LISTS:
            return self.members[0].problems
        return tuple(self._layers(kind.x)[0] for kind in self.calls.kinds)

    @property
    def asked(self) -> tuple[Problem, ...]:
        """The Problems of every layer."""
        if self.way.kind == LISTS:
            return ()
        return tuple(dict.fromkeys(p for kind in self.calls.kinds for p in self._layers(kind.x)))

    def _layers(self, x: Tensor) -> list[Problem]:
        dtype, found = self.calls.autocast or x.dtype, []
        first = self._inputs(x)[0]
        h = first.to(dtype).expand(len(self.group.towers), *first.shape)
        for ws, bs, name in zip(*self._held(), self.way.activations, strict=True):
            with torch.no_grad():
                together = stacked(ws, bs)
            assert together is not None
            weight, bias = (None if t is None else t.to(dtype) for t in together)
            assert weight is not None
            rows = layouts.blocks(h, "g ... k", len(ws), weight.shape[-1])
            found.append(problem_of(rows, weight, bias, name, "groups", self.calls.grad))
            h = h.new_empty((*h.shape[:-1], weight.shape[1]))
        return found

    def _towers(self) -> list[tuple[Candidate, ...]]:
        depth = len(self.way.activations)
        return [self.members[i : i + depth] for i in range(0, len(self.members), depth)]

    def _held(self) -> tuple[Layers, Layers]:
        """Weights and biases by layer and tower."""
        weights, biases = self._tensors()
        depth = len(self.way.activations)
        layers = range(depth)
        return [weights[i::depth] for i in layers], [biases[i::depth] for i in layers]

    def _joined(self, xs: list[Tensor]) -> Tensor:
        return torch.stack(xs) if self.group.equal else torch.cat(xs, -1)

    def _inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each tower reads."""
        if self.group.shared:
            return (x,) * len(self.group.towers)
        if self.group.equal:
            return x.unbind(0)
        return x.split([tower.sizes[0][1] for tower in self.group.towers], -1)

    def before(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the model did with the inputs."""
        towers = [self.module.get_submodule(tower.name) for tower in self.group.towers]
        pairs = zip(towers, self._inputs(x), strict=True)
        return tuple(type(tower).forward(tower, part) for tower, part in pairs)

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """The towers one by one, linears in ``rewritten`` (by name) as it has them."""
        named = zip(self.group.towers, self._towers(), self._inputs(x), strict=True)
        return tuple(
            self._one(self.module.get_submodule(tower.name), members, part, rewritten)
            for tower, members, part in named
        )

    def _one(
        self,
        tower: nn.Module,
        members: tuple[Candidate, ...],
        x: Tensor,
        rewritten: Mapping[str, Candidate],
    ) -> Tensor:
        for member in members:
            chain = getattr(rewritten.get(member.fqn), "chain", None)
            if isinstance(chain, SequentialChain) and chain.module is tower:
                y: Tensor = chain.forward()(tower, x)
                return y
        for member, name in zip(members, self.way.activations, strict=True):
            found = rewritten.get(member.fqn)
            if found is None or found.chain is not None:
                x, done = type(member.module).forward(member.module, x), "none"
            else:
                x, done = found.after(x), found.activation
            if done != name:
                x = activation_of(name).value(x)
        return x

    def after(self, x: Tensor) -> tuple[Tensor, ...]:
        """One call a layer."""
        return abreast(self._inputs(x), *self._held(), way=self.way)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        depth, found = len(self.way.activations), []
        for g, part in enumerate(self._inputs(x)):
            y = part
            for i, name in enumerate(self.way.activations):
                at = g * depth + i
                y = reference.linear_act(
                    y, parameters[f"{at}.dW"], parameters.get(f"{at}.db"), name
                )
            found.append(y)
        return tuple(found)
