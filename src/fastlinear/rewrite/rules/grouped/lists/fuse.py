"""Linears of a list, of any sizes, that a forward calls side by side, as one call."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.rewrite.fusion import Dispatch, Fusion, InForward
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.rules.grouped.parallel_mlps.edit import parallel_mlps
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import Way
from fastlinear.rewrite.rules.grouped.parallel_mlps.fuse import ParallelMLPs, alone, exact_of
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import ParallelGroup

UNEQUAL = "unequal_linear"
SHARED, PARTS, OWN_INPUTS = "one input", "parts of one tensor", "inputs of their own"


def fused_list(
    fqn: str,
    parent: nn.Module,
    members: tuple[Candidate, ...],
    group: ParallelGroup,
    way: Way,
    fusable: Fusable,
    reads: str,
    shapes: tuple[tuple[tuple[int, ...], ...], ...],
) -> Fusion:
    """Linears of a list, of any sizes, as one call.

    Its input is the value that all linears read; or theirs behind one another (..., K_0 + K_1 + …)
    where they lie in rows of a larger tensor; or all their numbers in one row.

    Args:
        fqn, parent, members, group, way, fusable: as of parallel MLPs.
        reads: what the linears read: ``SHARED``, ``PARTS`` or ``OWN_INPUTS``.
        shapes: of the inputs of each kind of call.
    """
    made = _List(parent, members, group, way, reads, shapes)
    fused, sizes = way.activations[0], tuple(mlp.sizes for mlp in group.parallel_mlps)
    return Fusion(
        rule=UNEQUAL,
        fqn=fqn,
        module=parent,
        members=members,
        calls=made.calls(),
        problems=members[0].problems,
        dispatch=Dispatch(served={"forward": "together"}),
        layers=made.layers,
        after=made.after,
        exact=made.exact,
        forward=InForward(fusable, parallel_mlps(group, way)),
        activation=None if fused == "none" else fused,
        alike=(sizes, way, group.shared, shapes, reads, made.activations),
        reads=reads,
        whole=True,
        what=f"its {len(members)} linears on {reads}",
        # the same linears may be another call as well
        title=f"{members[0].fqn!r} to {members[-1].fqn!r} as {UNEQUAL}",
    )


@dataclass(frozen=True)
class _List(ParallelMLPs):
    reads: str
    shapes: tuple[tuple[tuple[int, ...], ...], ...]

    def calls(self) -> SiteCalls:
        """How all were called; some may be frozen."""
        grad = any(c.calls.grad for c in self.members)
        known = replace(self.members[0].calls, grad=grad)
        if self.reads == SHARED:
            return known
        return replace(known, kinds=self._kinds(self.members))

    @property
    def activations(self) -> tuple[str, ...]:
        """Behind each: in the call, or as the forward has it."""
        fused = self.way.activations[0]
        return tuple(c.activation if fused == "none" else fused for c in self.members)

    def _joined(self, xs: list[Tensor]) -> Tensor:
        if self.reads == PARTS:
            return torch.cat(xs, -1)
        return torch.cat([x.reshape(-1) for x in xs])

    def inputs(self, x: Tensor) -> tuple[Tensor, ...]:
        """What each linear reads."""
        if self.reads == SHARED:
            return (x,) * len(self.members)
        if self.reads == PARTS:
            return x.split([mlp.sizes[0][1] for mlp in self.group.parallel_mlps], -1)
        for shapes in self.shapes:
            sizes = [math.prod(shape) for shape in shapes]
            if sum(sizes) == x.numel():
                pairs = zip(x.split(sizes), shapes, strict=True)
                return tuple(part.view(shape) for part, shape in pairs)
        raise AssertionError("an input of another kind of call")

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """The linears one by one."""
        named = zip(self.members, self.inputs(x), self.activations, strict=True)
        return tuple(alone(c, part, name, rewritten) for c, part, name in named)

    def after(self, x: Tensor) -> tuple[Tensor, ...]:
        """One call, and the activations that the forward keeps."""
        ys = super().after(x)
        if self.way.activations[0] != "none":
            return ys
        return tuple(activation_of(n).value(y) for y, n in zip(ys, self.activations, strict=True))

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        pairs = zip(self.inputs(x), self.activations, strict=True)
        return tuple(exact_of(i, part, name, parameters) for i, (part, name) in enumerate(pairs))
