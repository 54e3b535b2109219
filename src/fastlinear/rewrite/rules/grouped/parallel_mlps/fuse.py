"""Parallel MLPs that a forward calls side by side, each layer as one call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.problem import NAME
from fastlinear.families.grouped.selection import problem_of
from fastlinear.families.linear import reference
from fastlinear.rewrite.fusion import Dispatch, Fusion, InForward, InSequential
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import Candidate, weights_and_biases
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.rules.grouped.modules.forward import stacked
from fastlinear.rewrite.rules.grouped.parallel_mlps.edit import parallel_mlps
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import (
    LISTS,
    Layers,
    Way,
    parallel_layers,
)
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import ParallelGroup
from fastlinear.rewrite.swap.sequential_forward import sequential_forward


def fused_parallel_mlps(
    fqn: str,
    parent: nn.Module,
    members: tuple[Candidate, ...],
    group: ParallelGroup,
    way: Way,
    fusable: Fusable,
    backend: str | None,
) -> Fusion:
    """Parallel MLPs as one call a layer.

    Its input is the value that all of them read, or theirs in one tensor: (T, ..., K), of unequal
    sizes (..., K_0 + K_1 + …).

    Args:
        fqn, parent: the module whose forward calls them.
        members: the linears, MLP by MLP.
        group: the parallel MLPs.
        way: how a layer of all of them is one call.
        fusable: the parent's trace; it builds one forward for all that is fused in it.
        backend: a forced backend of grouped_linear, or None.
    """
    made = ParallelMLPs(parent, members, group, way)
    calls, lists = made.calls(), way.kind == LISTS
    problems = [made.problems(kind.x, calls) for kind in calls.kinds] if not lists else []
    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=parent,
        members=members,
        calls=calls,
        # of lists those of the first linear: one backend of unequal_linear serves them
        problems=members[0].problems if lists else tuple(found[0] for found in problems),
        dispatch=Dispatch(
            backend=backend,
            served={"forward": "together"} if lists else None,
            decided=tuple(dict.fromkeys(p for found in problems for p in found)),
        ),
        layers=made.layers,
        original=made.original,
        after=made.after,
        exact=made.exact,
        forward=InForward(fusable, parallel_mlps(group, way)),
        alike=(tuple(mlp.sizes for mlp in group.parallel_mlps), way, group.shared),
        what=f"its {len(group.parallel_mlps)} parallel MLPs of {len(way.activations)} linears, "
        "each layer",
    )


@dataclass(frozen=True)
class ParallelMLPs:
    """Parallel MLPs, and what they and one call of them compute."""

    parent: nn.Module
    members: tuple[Candidate, ...]
    group: ParallelGroup
    way: Way

    def calls(self) -> SiteCalls:
        """How all were called."""
        known = self.members[0].calls
        if self.group.shared:
            return known
        return replace(known, kinds=self._kinds([mlp[0] for mlp in self._parallel_mlps()]))

    def _kinds(self, members: Sequence[Candidate]) -> tuple[Any, ...]:
        """Their kinds of calls as those of one."""
        return tuple(
            replace(
                same[0],
                x=self._joined([kind.x for kind in same]),
                input_grad=any(kind.input_grad for kind in same),
            )
            for same in zip(*(c.calls.kinds for c in members), strict=True)
        )

    def problems(self, x: Tensor, calls: SiteCalls) -> list[Problem]:
        """Of every layer."""
        dtype, found = calls.autocast or x.dtype, []
        first = self.inputs(x)[0]
        h = first.to(dtype).expand(len(self.group.parallel_mlps), *first.shape)
        for ws, bs, name in zip(*self._held(), self.way.activations, strict=True):
            with torch.no_grad():
                together = stacked(ws, bs)
            assert together is not None
            weight, bias = (None if t is None else t.to(dtype) for t in together)
            assert weight is not None
            rows = layouts.blocks(h, "g ... k", len(ws), weight.shape[-1])
            found.append(problem_of(rows, weight, bias, name, "groups", calls.grad))
            h = h.new_empty((*h.shape[:-1], weight.shape[1]))
        return found

    def _parallel_mlps(self) -> list[tuple[Candidate, ...]]:
        depth = len(self.way.activations)
        return [self.members[i : i + depth] for i in range(0, len(self.members), depth)]

    def _held(self) -> tuple[Layers, Layers]:
        """Weights and biases by layer and parallel MLP."""
        weights, biases = weights_and_biases(self.members)
        depth = len(self.way.activations)
        layers = range(depth)
        return [weights[i::depth] for i in layers], [biases[i::depth] for i in layers]

    def _joined(self, xs: list[Tensor]) -> Tensor:
        return torch.stack(xs) if self.group.equal else torch.cat(xs, -1)

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each parallel MLP reads."""
        if self.group.shared:
            return (x,) * len(self.group.parallel_mlps)
        if self.group.equal:
            return x.unbind(0)
        return x.split([mlp.sizes[0][1] for mlp in self.group.parallel_mlps], -1)

    def original(self, x: Tensor) -> tuple[Tensor, ...]:
        """What the model did with the inputs."""
        parallel_mlps = [self.parent.get_submodule(mlp.name) for mlp in self.group.parallel_mlps]
        pairs = zip(parallel_mlps, self.inputs(x), strict=True)
        return tuple(type(mlp).forward(mlp, part) for mlp, part in pairs)

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """The parallel MLPs one by one."""
        named = zip(self.group.parallel_mlps, self._parallel_mlps(), self.inputs(x), strict=True)
        return tuple(
            self._one(self.parent.get_submodule(mlp.name), members, part, rewritten)
            for mlp, members, part in named
        )

    def _one(
        self,
        mlp: nn.Module,
        members: tuple[Candidate, ...],
        x: Tensor,
        rewritten: Mapping[str, Candidate],
    ) -> Tensor:
        for member in members:
            found = rewritten.get(member.fqn)
            chain = None if found is None else found.chain
            if chain is None or chain.module is not mlp:
                continue
            if isinstance(chain.forward, InSequential):
                segments = [(chain.forward.segment, chain.dispatch.backend)]
                y: Tensor = sequential_forward(segments, mlp)(mlp, x)
                return y
        for member, name in zip(members, self.way.activations, strict=True):
            x = alone(member, x, name, rewritten)
        return x

    def after(self, x: Tensor) -> tuple[Tensor, ...]:
        """One call a layer."""
        return parallel_layers(self.inputs(x), *self._held(), way=self.way)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        depth, found = len(self.way.activations), []
        for g, part in enumerate(self.inputs(x)):
            y = part
            for i, name in enumerate(self.way.activations):
                y = exact_of(g * depth + i, y, name, parameters)
            found.append(y)
        return tuple(found)


def alone(
    member: Candidate, x: Tensor, activation: str, rewritten: Mapping[str, Candidate]
) -> Tensor:
    """A linear and its activation by itself, rewritten or not."""
    found = rewritten.get(member.fqn)
    if found is None or found.chain is not None:
        y, done = type(member.module).forward(member.module, x), "none"
    else:
        y, done = found.after(x), found.activation
    return y if done == activation else activation_of(activation).value(y)


def exact_of(at: int, x: Tensor, activation: str, parameters: Mapping[str, Tensor]) -> Tensor:
    """Layer ``at`` and its activation by differentiable ops, with weights by their names."""
    weight, bias = parameters[f"{at}.dW"], parameters.get(f"{at}.db")
    return reference.linear_act(x, weight, bias, activation)
