"""Linears that a forward calls with one tensor, where that forward cannot be traced.

Their results may be shared inside a call of it, whatever else the forward does. There are two ways
to compute them: one product of the weights laid behind one another, and one call of
``unequal_linear``, which reads them where they lie. Both are measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastlinear.core.problem import Problem
from fastlinear.families.grouped.problem import NAME
from fastlinear.families.grouped.unequal.op import explain
from fastlinear.families.linear.op import problem_of
from fastlinear.rewrite.fusion import Dispatch, Fusion, InCalls
from fastlinear.rewrite.match.candidate import (
    Candidate,
    all_different,
    one_pass,
    weights_and_biases,
)
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.rules.grouped.lists.fuse import SHARED, UNEQUAL
from fastlinear.rewrite.rules.grouped.parallel_mlps.fuse import exact_of
from fastlinear.rewrite.rules.grouped.rows.forward import behind_one_another, of_one_kind
from fastlinear.rewrite.rules.grouped.rows.observed import Row
from fastlinear.rewrite.rules.grouped.shared.code import why_not_shared, writes_nothing_between
from fastlinear.rewrite.rules.grouped.shared.forward import listed, together
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS
from fastlinear.rewrite.swap.shared_calls import Compute, Group, calling, shared_linear


def shared_of(
    session: Session, row: Row, candidates: Mapping[str, Candidate]
) -> list[Fusion] | str:
    """The ways to compute linears of one input at once, or why they are left alone. ``candidates``
    are those that no other fusion has."""
    parent = session.model.get_submodule(row.fqn)
    refusal = refuse_module(parent)
    if refusal is not None:
        return refusal.reason.rstrip(".")
    if not row.one_tensor:
        return "its linears are given different tensors of one memory"
    if (why := why_not_shared(parent)) is not None:
        return why
    called = (candidates[fqn] for fqn in row.members if fqn in candidates)
    members = tuple(c for c in called if _may_share(session, row.fqn, c))
    if len(members) < 2 or not one_pass(members) or not all_different(members):
        return "its linears are called differently often, or share a weight"
    if not of_one_kind(*weights_and_biases(members)):
        return "its linears differ in dtype or device"
    names = tuple(inside(row.fqn, c.fqn) or "" for c in members)
    made = _Shared(parent, members, names, writes_nothing_between(parent, names))
    found = [_fusion(row.fqn, made, NAME, together)]
    if NAME not in session.backends and made.listed():
        found.insert(0, _fusion(row.fqn, made, UNEQUAL, listed))
    return found


def _may_share(session: Session, fqn: str, c: Candidate) -> bool:
    """Whether a linear lies inside the module that alone calls it, with nothing fused behind it."""
    calls_it = session.sites[c.fqn].parent_fqn == fqn and inside(fqn, c.fqn) is not None
    return calls_it and type(c.module) in PLAIN_LINEARS and c.activation == "none"


@dataclass(frozen=True)
class _Shared:
    """Linears of one input, by their names inside the module that calls them."""

    parent: nn.Module
    members: tuple[Candidate, ...]
    names: tuple[str, ...]
    unwritten: bool

    def problem(self, x: Tensor) -> Problem:
        """Of one product of all weights."""
        calls = self.members[0].calls
        with torch.no_grad():
            weight, bias = behind_one_another(*weights_and_biases(self.members))
        if calls.autocast is not None:
            x, weight = x.to(calls.autocast), weight.to(calls.autocast)
            bias = None if bias is None else bias.to(calls.autocast)
        return problem_of(x, weight, bias, "none", calls.grad)

    def listed(self) -> bool:
        """Whether ``unequal_linear`` would compute them together."""
        calls = self.members[0].calls
        weights = [w.detach() for w in weights_and_biases(self.members)[0]]
        for kind in calls.kinds:
            dtype = calls.autocast or kind.x.dtype
            xs = [kind.x.detach().to(dtype)] * len(weights)
            known = explain(xs, [w.to(dtype) for w in weights], needs_grad=calls.grad)
            if known.choices[0].backend.name != "together":
                return False
        return True

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> tuple[Tensor, ...]:
        """One by one, or as the other one call that is in place."""
        found = rewritten.get(self.members[0].fqn)
        other = None if found is None else found.chain
        if other is not None and other.names == tuple(c.fqn for c in self.members):
            ys = other.after(x)
            assert isinstance(ys, tuple)
            return ys
        return tuple(
            rewritten[c.fqn].after(x) if c.fqn in rewritten else c.before(x) for c in self.members
        )

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        return tuple(exact_of(i, x, "none", parameters) for i in range(len(self.members)))


def _fusion(fqn: str, shared: _Shared, rule: str, compute: Compute) -> Fusion:
    members, calls = shared.members, shared.members[0].calls
    group = Group(shared.names, compute, shared.unwritten)
    forwards = [shared_linear(c.module) for c in members]
    unequal = rule == UNEQUAL

    def each(_: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(run(c.module, x) for run, c in zip(forwards, members, strict=True))

    def after(x: Tensor) -> tuple[Tensor, ...]:
        """Each in its turn, as the module's forward calls them."""
        ys: tuple[Tensor, ...] = calling((group,), each, shared.parent, x)
        return ys

    title = f"{members[0].fqn!r} to {members[-1].fqn!r}"
    return Fusion(
        rule=rule,
        fqn=fqn,
        module=shared.parent,
        members=members,
        calls=calls,
        problems=members[0].problems
        if unequal
        else tuple(shared.problem(k.x) for k in calls.kinds),
        dispatch=Dispatch(served={"forward": "together"}) if unequal else Dispatch(),
        layers=shared.layers,
        after=after,
        exact=shared.exact,
        forward=InCalls(group),
        alike=(rule, tuple(w.shape for w in weights_and_biases(members)[0])),
        reads=SHARED,
        what=f"its {len(members)} linears on {SHARED}",
        title=f"{title} as {UNEQUAL}" if unequal else title,
    )
