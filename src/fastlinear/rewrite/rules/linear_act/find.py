"""The rule of linear_act: which linears can be rewritten, by which route, and which cannot.

It only matches; nothing here changes a model or measures anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fastlinear import nn as fl_nn
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.profile.effects import class_forward
from fastlinear.profile.observe import OTHER, Call, Observation
from fastlinear.profile.records import LinearSite
from fastlinear.profile.unfollowed import USED_ELSEWHERE
from fastlinear.rewrite.match.calls import calls_of
from fastlinear.rewrite.match.candidate import Candidate, problems_of
from fastlinear.rewrite.match.eligible import (
    Refusal,
    linear_kind,
    linear_modules,
    refuse_linear,
    refuse_module,
    refuse_rewritten,
)
from fastlinear.rewrite.match.parent import Fusable, fusable
from fastlinear.rewrite.match.sites import FilterFn, activations_of, inside
from fastlinear.rewrite.swap.sequential_forward import Segment

RULE = "linear_act"


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
        calls = seen.calls.get(module, [])
        refusal = _left_alone(model, fqn, module, calls, by_fqn.get(fqn), filter_fn)
        if refusal is None:
            refusal = _refuse_activation(model, by_fqn.get(fqn))
        if refusal is not None:
            left[fqn] = refusal
        else:
            plain[fqn] = _plain(fqn, module, calls, backend)
    routed = _fuse(model, plain, by_fqn, seen)
    return [routed[fqn] for fqn in plain], left


def complete(candidates: Iterable[Candidate], every: Iterable[Candidate]) -> list[Candidate]:
    """``candidates`` without those whose unit (among ``every``) is not wholly in it."""
    chosen = list(candidates)
    names = {c.fqn for c in chosen}
    broken = {c.unit for c in every if c.fqn not in names}
    return [c for c in chosen if c.unit not in broken]


# --------------------------------------------------------------------------------------------


def _left_alone(
    model: nn.Module,
    fqn: str,
    module: nn.Module,
    calls: list[Call],
    site: LinearSite | None,
    filter_fn: FilterFn | None,
) -> Refusal | None:
    if isinstance(module, fl_nn.Linear):
        return Refusal("already_fastlinear", "It is a fastlinear layer already.")
    refusal = refuse_rewritten(model, fqn) or refuse_linear(model, fqn, module)
    if refusal is not None:
        return refusal
    if filter_fn is not None and not filter_fn(module, fqn):
        return Refusal("filtered", "filter_fn leaves it out.")
    if not calls:
        used = site is not None and USED_ELSEWHERE & set(site.flags)
        text = site.reason if site is not None and used else "These inputs never call it."
        return Refusal("not_called", text)
    if not all(call.positional for call in calls):
        return Refusal("keyword_input", "It is called with its input as a keyword argument.")
    if any(call.layout == OTHER for call in calls):
        text = "Its input is a sparse or nested tensor, which only PyTorch's own path takes."
        return Refusal("odd_input", text)
    for call in calls:
        assert call.sample is not None
        if call.sample.dtype not in DTYPE_NAMES:
            return Refusal("dtype", f"Its input has dtype {call.sample.dtype}.")
    if all(call.sample is None or call.sample.numel() == 0 for call in calls):
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


def _plain(fqn: str, module: nn.Module, calls: list[Call], backend: str | None) -> Candidate:
    kind = linear_kind(module)
    assert kind is not None
    filled = [c for c in calls if c.sample is not None and c.sample.numel()]
    known = calls_of(filled)
    problems = problems_of(module, kind, "none", known)
    return Candidate(fqn, module, kind, "none", "plain", known, problems, backend)


def _fuse(
    model: nn.Module,
    plain: dict[str, Candidate],
    sites: dict[str, LinearSite],
    seen: Observation,
) -> dict[str, Candidate]:
    """Candidates with their activations where these can be fused, each in the module that calls
    the two."""
    routed = dict(plain)
    names = activations_of(sites.values())
    traced: dict[str, Fusable | Refusal] = {}
    for fqn, candidate in plain.items():
        site = sites.get(fqn)
        if site is not None and site.code == "untraceable":
            routed[fqn] = replace(candidate, fallback=Refusal("untraceable", site.reason))
        if site is None or site.activation is None:
            continue
        fused = _in_sequential(model, candidate, site)
        if fused is None:
            fused = _by_parent(model, candidate, site, seen, names, traced)
        routed[fqn] = fused
    return routed


def _in_sequential(model: nn.Module, candidate: Candidate, site: LinearSite) -> Candidate | None:
    """The candidate with its activation, where both are children of a Sequential; or None."""
    if site.parent_fqn is None or site.activation_fqn is None or site.activation is None:
        return None
    parent, act = model.get_submodule(site.parent_fqn), model.get_submodule(site.activation_fqn)
    if class_forward(parent) is not nn.Sequential.forward or refuse_module(parent) is not None:
        return None
    if not Segment.pairs(parent, candidate.module, act, site.activation):
        return None
    more: dict[str, Any] = {"activation_fqn": site.activation_fqn, "activation_module": act}
    more |= {"parent_fqn": site.parent_fqn, "parent": parent}
    return _with_activation(candidate, site.activation, **more)


def _by_parent(
    model: nn.Module,
    candidate: Candidate,
    site: LinearSite,
    seen: Observation,
    names: dict[str, str],
    traced: dict[str, Fusable | Refusal],
) -> Candidate:
    parent_fqn = site.parent_fqn
    assert parent_fqn is not None  # an activation was found behind it, in its caller
    parent = model.get_submodule(parent_fqn)
    name_inside = inside(parent_fqn, candidate.fqn)
    if name_inside is None:
        why = Refusal("foreign_caller", "The module that calls it does not hold it.")
        return replace(candidate, fallback=why)
    if parent_fqn not in traced:
        known = {name: a for f, a in names.items() if (name := inside(parent_fqn, f)) is not None}
        traced[parent_fqn] = fusable(parent, seen.arguments[parent], known)
    found = traced[parent_fqn]
    if isinstance(found, Refusal):
        return replace(candidate, fallback=found)
    name = found.pairs.get(name_inside)
    if name is None:
        why = Refusal("no_pair", "Its output is read by more than its activation.")
        return replace(candidate, fallback=why)
    more: dict[str, Any] = {"parent_fqn": parent_fqn, "parent": parent, "pairs": found}
    if site.activation_fqn is not None:
        more["activation_fqn"] = site.activation_fqn
        more["activation_module"] = model.get_submodule(site.activation_fqn)
    return _with_activation(candidate, name, **more)


def _with_activation(candidate: Candidate, name: str, **more: Any) -> Candidate:
    problems = problems_of(candidate.module, candidate.kind, name, candidate.calls)
    return replace(candidate, activation=name, route="parent", problems=problems, **more)
