"""Linears on one input, or on the parts of one, that may become one call.

One product is wider than each of theirs. An activation behind one of them stays what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.grouped import layout as layouts
from fastlinear.families.grouped.problem import NAME
from fastlinear.families.grouped.selection import problem_of as grouped_problem
from fastlinear.families.linear.op import problem_of
from fastlinear.rewrite.fusion import Fusion, InForward
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import (
    Candidate,
    all_different,
    one_pass,
    weights_and_biases,
)
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.rules.grouped.lists.fuse import PARTS, SHARED, UNEQUAL
from fastlinear.rewrite.rules.grouped.modules.forward import LINEARS, stacked
from fastlinear.rewrite.rules.grouped.parallel_mlps.fuse import exact_of
from fastlinear.rewrite.rules.grouped.rows.edit import row as row_edit
from fastlinear.rewrite.rules.grouped.rows.forward import behind_one_another, together
from fastlinear.rewrite.rules.grouped.rows.loop_forward import side_by_side
from fastlinear.rewrite.rules.grouped.rows.observed import Row
from fastlinear.rewrite.rules.grouped.rows.traced import loops_of
from fastlinear.rewrite.rules.grouped.rows.traced import rows_of as rows_in
from fastlinear.rewrite.session import Session

_LAYOUT = "g ... k"
FunctionalLinear = tuple[list[Tensor], list[Tensor | None]]
"""Weights and biases."""


def rows_of(session: Session, row: Row, candidates: Mapping[str, Candidate]) -> list[Fusion] | str:
    """Linears on one input, or on its parts, as one, or why they are left alone. ``candidates``
    are those that no other fusion has."""
    traced = session.offers(row.fqn)
    if isinstance(traced, Refusal):
        return traced.reason.rstrip(".")
    allowed = {
        name: candidates[fqn]
        for fqn in row.members
        if fqn in candidates
        and session.sites[fqn].parent_fqn == row.fqn
        and (name := inside(row.fqn, fqn)) is not None
    }
    found = []
    loop = row.kind == LINEARS
    links = traced.links
    parts = [one.names for one in loops_of(links, allowed)] if loop else rows_in(links, allowed)
    for names in parts:
        members = tuple(allowed[name] for name in names)
        if loop and (len(names) < len(row.members) or members[0].calls.autocast is not None):
            return "one of its linears is left alone, or autocast casts each of them"
        if one_pass(members) and all_different(members):
            made = _Loop(members) if loop else _Row(members)
            found.append(_fusion(row.fqn, traced.parent, made, InForward(traced, row_edit(names))))
    return found or "its code reads their input in more than one way, or writes to it between them"


@dataclass(frozen=True)
class _Row:
    """Linears on one input."""

    members: tuple[Candidate, ...]
    reads = SHARED

    def held(self) -> FunctionalLinear:
        return weights_and_biases(self.members)

    def inputs(self, x: Tensor) -> Sequence[Tensor]:
        """What each linear reads."""
        return (x,) * len(self.members)

    def calls(self) -> SiteCalls:
        return self.members[0].calls

    def problem(self, x: Tensor) -> Problem:
        calls = self.calls()
        with torch.no_grad():
            weight, bias = behind_one_another(*self.held())
        if calls.autocast is not None:
            x, weight = x.to(calls.autocast), weight.to(calls.autocast)
            bias = None if bias is None else bias.to(calls.autocast)
        return problem_of(x, weight, bias, "none", calls.grad)

    def together(self, x: Tensor) -> tuple[Tensor, ...] | None:
        return together(x, *self.held())


class _Loop(_Row):
    """Linears of one size on the parts of one value (..., G·K)."""

    reads = PARTS

    def inputs(self, x: Tensor) -> Sequence[Tensor]:
        return x.chunk(len(self.members), -1)

    def calls(self) -> SiteCalls:
        """The value their inputs are parts of, of other numbers."""
        known, count = self.members[0].calls, len(self.members)
        generator = torch.Generator("cpu").manual_seed(0)

        def whole(x: Tensor) -> Tensor:
            shape = (*x.shape[:-1], count * x.shape[-1])
            return torch.randn(shape, generator=generator, device="cpu").to(x.device, x.dtype)

        return replace(known, kinds=tuple(replace(k, x=whole(k.x)) for k in known.kinds))

    def problem(self, x: Tensor) -> Problem:
        with torch.no_grad():
            found = stacked(*self.held())
        assert found is not None
        parts = x.unflatten(-1, (len(self.members), -1)).movedim(-2, 0)
        rows = layouts.blocks(parts, _LAYOUT, *found[0].shape[::2])
        return grouped_problem(rows, *found, "none", "groups", self.members[0].calls.grad)

    def together(self, x: Tensor) -> tuple[Tensor, ...] | None:
        return side_by_side(x, *self.held())


def _fusion(fqn: str, parent: nn.Module, row: _Row, forward: InForward) -> Fusion:
    members, calls = row.members, row.calls()
    names = tuple(c.fqn for c in members)

    def layers(x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """All in the call of the list that they are, where that is rewritten."""
        found = rewritten.get(names[0])
        listed = None if found is None else found.chain
        alike = listed is not None and (listed.rule, listed.reads) == (UNEQUAL, row.reads)
        if listed is not None and alike and set(listed.names) == set(names):
            ys = listed.after(x)
            assert isinstance(ys, tuple)
            return ys
        runs: list[Callable[[Tensor], Tensor]] = [
            rewritten[c.fqn].after if c.fqn in rewritten else c.before for c in members
        ]
        return tuple(run(part) for run, part in zip(runs, row.inputs(x), strict=True))

    def after(x: Tensor) -> tuple[Tensor, ...]:
        ys = row.together(x)
        assert ys is not None
        pairs = zip(ys, members, strict=True)
        return tuple(activation_of(c.activation).value(y) for y, c in pairs)

    def exact(x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        pairs = zip(members, row.inputs(x), strict=True)
        return tuple(
            exact_of(i, part, c.activation, parameters) for i, (c, part) in enumerate(pairs)
        )

    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=parent,
        members=members,
        calls=calls,
        problems=tuple(row.problem(k.x) for k in calls.kinds),
        layers=layers,
        after=after,
        exact=exact,
        forward=forward,
        alike=tuple((len(w), c.activation) for w, c in zip(row.held()[0], members, strict=True)),
        what=f"its {len(members)} linears on {row.reads}",
        reads=row.reads,
    )
