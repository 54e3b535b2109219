"""The rule of linear_act: which linears can be rewritten, by which route, and which cannot.

It only matches; nothing here changes a model or measures anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear import nn as fl_nn
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act.op import problem_of
from fastlinear.profile.records import LinearSite
from fastlinear.rewrite import forwards
from fastlinear.rewrite.eligible import (
    Refusal,
    linear_kind,
    linear_modules,
    refuse_linear,
    refuse_module,
)
from fastlinear.rewrite.observe import LinearCalls, Observation
from fastlinear.rewrite.parent import Fusable, fusable
from fastlinear.rewrite.swap import Swap, is_rewritten

RULE = "linear_act"
FilterFn = Callable[[nn.Module, str], bool]


@dataclass(frozen=True, eq=False)
class Candidate:
    """A linear that may be rewritten.

    Attributes:
        fqn, module: the linear.
        kind: ``"linear"`` or ``"conv1d"``.
        activation: fused activation; ``"none"`` changes the backend only.
        route: ``"plain"``, ``"instance"`` or ``"parent"``; see ``plan.Rewrite``.
        activation_fqn, activation_module: the activation's module on the instance route.
        parent_fqn, parent, pairs: the parent and what its trace offers, on the parent route.
        calls: what was observed.
        problem: the forward Problem of its most frequent call.
        backend: forced forward backend, or None.
        fallback: why its activation is left alone although there is one, or None.
    """

    fqn: str
    module: nn.Module
    kind: str
    activation: str
    route: str
    calls: LinearCalls
    problem: Problem
    backend: str | None = None
    activation_fqn: str | None = None
    activation_module: nn.Module | None = None
    parent_fqn: str | None = None
    parent: nn.Module | None = None
    pairs: Fusable | None = field(default=None, repr=False)
    fallback: Refusal | None = None

    @property
    def unit(self) -> str:
        """Candidates of one unit are kept or dropped together: those that share an activation."""
        return f"activation {self.activation_fqn}" if self.route == "instance" else self.fqn

    @property
    def group(self) -> tuple[Any, ...]:
        """Candidates of one group do the same work and are measured once."""
        kind = type(self.activation_module).__name__
        return (self.problem, self.route, self.kind, kind, self.calls.autocast, self.backend)

    def input(self) -> Tensor:
        """The sample of its most frequent input, (..., K), in the model's own strides."""
        key = max(self.calls.counts, key=lambda k: self.calls.counts[k])
        return self.calls.inputs[key]

    def before(self, x: Tensor) -> Tensor:
        """What the model did: the linear's own forward, then its activation. x (..., K)."""
        y = type(self.module).forward(self.module, x)
        if self.activation_module is not None:
            y = type(self.activation_module).forward(self.activation_module, y)
        elif self.activation != "none":
            y = activation_of(self.activation).value(y)
        return y  # type: ignore[no-any-return]

    def after(self, x: Tensor) -> Tensor:
        """What the rewritten model does. x (..., K) → (..., N)."""
        y: Tensor = self.forward()(self.module, x)
        return y

    def forward(self) -> forwards.Forward:
        """The linear's new forward."""
        make = forwards.fused_conv1d if self.kind == "conv1d" else forwards.fused_linear
        return make(self.activation, self.backend)


def activations_of(sites: Iterable[LinearSite]) -> dict[str, str]:
    """Activation modules that follow a linear: fully qualified name → activation name."""
    return {
        s.activation_fqn: s.activation
        for s in sites
        if s.how == "modules" and s.activation is not None and s.activation_fqn is not None
    }


def match(
    model: nn.Module,
    sites: Sequence[LinearSite],
    seen: Observation,
    *,
    backend: str | None,
    filter_fn: FilterFn | None,
) -> tuple[list[Candidate], dict[str, Refusal]]:
    """Candidates, and for every other linear of the model why it is left alone.

    Args:
        model: the model, unchanged.
        sites: what the profile says about each linear.
        seen: what one run showed.
        backend: a forced forward backend, or None.
        filter_fn: ``filter_fn(module, fqn)``; False leaves the site alone.
    """
    by_fqn = {s.fqn: s for s in sites}
    left: dict[str, Refusal] = {}
    plain: dict[str, Candidate] = {}
    for fqn, module in linear_modules(model).items():
        refusal = _left_alone(model, fqn, module, seen, filter_fn)
        if refusal is None:
            refusal = _refuse_activation(model, by_fqn.get(fqn))
        if refusal is not None:
            left[fqn] = refusal
        else:
            plain[fqn] = _plain(fqn, module, seen.linears[fqn], backend)
    routed = _fuse(model, plain, by_fqn, seen)
    return [routed[fqn] for fqn in plain], left


def complete(candidates: Iterable[Candidate], every: Iterable[Candidate]) -> list[Candidate]:
    """``candidates`` without those whose unit (among ``every``) is not wholly in it."""
    chosen = list(candidates)
    names = {c.fqn for c in chosen}
    broken = {c.unit for c in every if c.fqn not in names}
    return [c for c in chosen if c.unit not in broken]


def swaps(candidates: Iterable[Candidate]) -> list[Swap]:
    """The forwards to exchange for these candidates."""
    found: list[Swap] = []
    passing: set[str] = set()
    parents: dict[str, list[Candidate]] = {}
    for c in candidates:
        if c.route == "parent":
            assert c.parent_fqn is not None
            parents.setdefault(c.parent_fqn, []).append(c)
            continue
        found.append(Swap(c.fqn, c.module, c.forward()))
        if c.route == "instance" and c.activation_fqn not in passing:
            assert c.activation_fqn is not None
            assert c.activation_module is not None
            passing.add(c.activation_fqn)
            found.append(Swap(c.activation_fqn, c.activation_module, forwards.identity()))
    for fqn, members in parents.items():
        first = members[0]
        assert first.pairs is not None
        assert first.parent is not None
        chosen = {_inside(fqn, c.fqn): c.activation for c in members}
        found.append(Swap(fqn, first.parent, first.pairs.build(chosen, first.backend)))
    return found


# --------------------------------------------------------------------------------------------


def _left_alone(
    model: nn.Module, fqn: str, module: nn.Module, seen: Observation, filter_fn: FilterFn | None
) -> Refusal | None:
    if isinstance(module, fl_nn.Linear):
        return Refusal("already_fastlinear", "It is a fastlinear layer already.")
    if is_rewritten(module):
        return Refusal("already_rewritten", "optimize_ has rewritten it already.")
    refusal = refuse_linear(model, fqn, module)
    if refusal is not None:
        return refusal
    if filter_fn is not None and not filter_fn(module, fqn):
        return Refusal("filtered", "filter_fn leaves it out.")
    calls = seen.linears[fqn]
    if calls.calls == 0:
        return Refusal("not_called", "These inputs never call it.")
    if not calls.inputs:
        return Refusal("keyword_input", "It is called with a keyword argument only.")
    for _, _, dtype in calls.inputs:
        if dtype not in DTYPE_NAMES:
            return Refusal("dtype", f"Its input has dtype {dtype}.")
    if all(sample.numel() == 0 for sample in calls.inputs.values()):
        return Refusal("empty_input", "Its input holds no elements.")
    return None


def _refuse_activation(model: nn.Module, site: LinearSite | None) -> Refusal | None:
    """A hook (or the like) on the activation module sees its input: leave the pair alone."""
    if site is None or site.how != "modules" or site.activation_fqn is None:
        return None
    refusal = refuse_module(model.get_submodule(site.activation_fqn))
    if refusal is None:
        return None
    return Refusal(f"activation_{refusal.code}", f"Its activation: {refusal.reason}")


def _plain(fqn: str, module: nn.Module, calls: LinearCalls, backend: str | None) -> Candidate:
    kind = linear_kind(module)
    assert kind is not None
    candidate = Candidate(fqn, module, kind, "none", "plain", calls, _NO_PROBLEM, backend)
    return replace(candidate, problem=_problem(candidate))


_NO_PROBLEM = Problem(RULE, "forward", (), "float32", "cpu")


def _problem(c: Candidate) -> Problem:
    x = c.input()
    weight: Any = c.module.weight
    bias: Any = c.module.bias
    if c.kind == "conv1d":
        weight = weight.t()
    if c.calls.autocast is not None:
        x = x.to(c.calls.autocast)
    with torch.no_grad():
        problem: Problem = problem_of(x, weight, bias, c.activation, c.calls.grad)
    return problem


def _fuse(
    model: nn.Module,
    plain: dict[str, Candidate],
    sites: dict[str, LinearSite],
    seen: Observation,
) -> dict[str, Candidate]:
    """Candidates with their activations where these can be fused, by instance or by parent."""
    routed = dict(plain)
    names = activations_of(sites.values())
    for act_fqn, name in names.items():
        entry = seen.activations[act_fqn]
        members = list(entry.after)
        whole = sum(entry.after.values()) == entry.calls and all(
            fqn in plain and seen.linears[fqn].followed.get(act_fqn) == seen.linears[fqn].calls
            for fqn in members
        )
        if whole and not _read_elsewhere(members, sites):
            for fqn in members:
                module = model.get_submodule(act_fqn)
                routed[fqn] = _with_activation(
                    plain[fqn], name, "instance", activation_fqn=act_fqn, activation_module=module
                )
    traced: dict[str, Fusable | Refusal] = {}
    for fqn, candidate in plain.items():
        site = sites.get(fqn)
        if routed[fqn] is not candidate or site is None or site.activation is None:
            continue
        routed[fqn] = _by_parent(model, candidate, site, seen, names, traced)
    return routed


def _read_elsewhere(members: list[str], sites: dict[str, LinearSite]) -> bool:
    """Whether a parent's trace shows another reader of a pre-activation."""
    return any(fqn in sites and sites[fqn].code == "several_users" for fqn in members)


def _by_parent(
    model: nn.Module,
    candidate: Candidate,
    site: LinearSite,
    seen: Observation,
    names: dict[str, str],
    traced: dict[str, Fusable | Refusal],
) -> Candidate:
    callers = candidate.calls.callers
    if len(callers) != 1:
        why = Refusal("several_callers", "Several modules call it; its activation is left alone.")
        return replace(candidate, fallback=why)
    (parent_fqn,) = callers
    parent = model.get_submodule(parent_fqn)
    if parent_fqn not in traced:
        inside = {_inside(parent_fqn, f): a for f, a in names.items() if _is_inside(parent_fqn, f)}
        call = seen.parents.get(parent_fqn)
        if call is None:
            traced[parent_fqn] = Refusal("several_callers", "Its caller is not above it.")
        else:
            traced[parent_fqn] = fusable(parent, call, inside)
    found = traced[parent_fqn]
    if isinstance(found, Refusal):
        code = "shared_activation" if site.how == "modules" else found.code
        return replace(candidate, fallback=Refusal(code, found.reason))
    name = found.pairs.get(_inside(parent_fqn, candidate.fqn))
    if name is None:
        why = Refusal("no_pair", "Its output is read by more than its activation.")
        return replace(candidate, fallback=why)
    return _with_activation(
        candidate, name, "parent", parent_fqn=parent_fqn, parent=parent, pairs=found
    )


def _with_activation(candidate: Candidate, name: str, route: str, **more: Any) -> Candidate:
    fused = replace(candidate, activation=name, route=route, **more)
    return replace(fused, problem=_problem(fused))


def _is_inside(parent_fqn: str, fqn: str) -> bool:
    return parent_fqn == "" or fqn.startswith(parent_fqn + ".")


def _inside(parent_fqn: str, fqn: str) -> str:
    """``fqn`` as named inside its parent."""
    return fqn if parent_fqn == "" else fqn[len(parent_fqn) + 1 :]
