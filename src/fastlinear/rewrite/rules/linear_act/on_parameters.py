"""The rule of linear_act for linears written on parameters in a forward, by ``F.linear``, say.

The trace of that forward says where their parameters are and what follows each; a run says what
they are given. It only matches; nothing here changes a model or measures anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.profile.observe import OTHER, Call, Observation
from fastlinear.profile.records import LinearSite
from fastlinear.profile.sites import ON_PARAMETERS
from fastlinear.rewrite.match.calls import calls_of
from fastlinear.rewrite.match.candidate import Candidate, problems_of
from fastlinear.rewrite.match.eligible import (
    Refusal,
    linear_kind,
    refuse_parameters,
    refuse_rewritten,
)
from fastlinear.rewrite.match.parent import Fusable, fusable
from fastlinear.rewrite.match.sites import FilterFn, activation_of_module, activations_of, inside
from fastlinear.rewrite.swap.functional_linear import AsLayer

_INSTEAD = "As an nn.Linear, or in fl.linear_act, fl.mlp or fl.nn.MLP, it would be one."


def match(
    model: nn.Module,
    sites: Sequence[LinearSite],
    seen: Observation,
    layers: list[Candidate],
    *,
    backend: str | None,
    filter_fn: FilterFn | None,
) -> tuple[list[Candidate], dict[str, Refusal]]:
    """``layers`` and the linears written on parameters as candidates, and why the others of these
    are left alone.

    Args:
        model, sites, seen, backend, filter_fn: as in ``linear_act.match``.
        layers: what that found; where they lie in the same forward they share its trace.
    """
    written = [s for s in sites if s.module_class == "Parameter"]
    weights = dict(model.named_parameters())
    traced: dict[str, Fusable | Refusal] = {
        c.parent_fqn: c.pairs for c in layers if c.parent_fqn is not None and c.pairs is not None
    }
    offers: dict[str, Fusable | Refusal] = {}
    found: list[Candidate] = []
    left: dict[str, Refusal] = {}
    for site in written:
        assert site.parent_fqn is not None
        parent = model.get_submodule(site.parent_fqn)
        if linear_kind(parent) is not None:
            continue  # a linear-shaped layer of a class of its own, which is a site itself
        calls = seen.products[id(weights[site.fqn])]
        refusal = _left_alone(model, site, parent, calls, seen, filter_fn)
        if refusal is None and site.parent_fqn not in offers:
            known = traced.get(site.parent_fqn)
            offers[site.parent_fqn] = _offer(model, sites, site.parent_fqn, seen, known)
        made = refusal or _candidate(model, site, parent, calls, offers[site.parent_fqn], backend)
        if isinstance(made, Refusal):
            left[site.fqn] = made
        else:
            found.append(made)
    shared = {c.parent_fqn: c.pairs for c in found}
    layers = [replace(c, pairs=shared.get(c.parent_fqn, c.pairs)) for c in layers]
    return [*layers, *found], left


def _left_alone(
    model: nn.Module,
    site: LinearSite,
    parent: nn.Module,
    calls: list[Call],
    seen: Observation,
    filter_fn: FilterFn | None,
) -> Refusal | None:
    refusal = refuse_rewritten(model, site.parent_fqn or "")
    if refusal is not None:
        return refusal
    if site.code != ON_PARAMETERS:
        return Refusal("several_callers", f"Several modules multiply by its weight. {_INSTEAD}")
    if filter_fn is not None and not filter_fn(parent, site.fqn):
        return Refusal("filtered", "filter_fn leaves it out.")
    if len(calls) != seen.module_calls[parent]:
        text = "Its weight is multiplied by more than once in a call of that forward, or not always"
        return Refusal("several_users", f"{text}. {_INSTEAD}")
    if any(c.layout == OTHER for c in calls):
        text = "Its input is a sparse or nested tensor, which only PyTorch's own path takes."
        return Refusal("odd_input", text)
    if any(c.dtype not in DTYPE_NAMES.values() for c in calls):
        return Refusal("dtype", f"Its input has dtype {calls[0].dtype}.")
    if all(c.sample is None or c.sample.numel() == 0 for c in calls):
        return Refusal("empty_input", "Its input holds no elements.")
    return None


def _offer(
    model: nn.Module,
    sites: Sequence[LinearSite],
    fqn: str,
    seen: Observation,
    known: Fusable | Refusal | None,
) -> Fusable | Refusal:
    """The trace of a forward, with every activation module that it calls."""
    parent = model.get_submodule(fqn)
    named = activations_of(sites)
    modules = {name: a for f, a in named.items() if (name := inside(fqn, f)) is not None}
    made = known or fusable(parent, seen.arguments[parent], modules)
    if isinstance(made, Refusal):
        return made
    called = {str(n.target) for n in made.graph.nodes if n.op == "call_module"}
    for name in called - modules.keys():
        activation = activation_of_module(parent.get_submodule(name))
        modules |= {} if activation is None else {name: activation}
    return made.flat({}, modules)


def _candidate(
    model: nn.Module,
    site: LinearSite,
    parent: nn.Module,
    calls: list[Call],
    offered: Fusable | Refusal,
    backend: str | None,
) -> Candidate | Refusal:
    parent_fqn = site.parent_fqn or ""
    if isinstance(offered, Refusal):
        return Refusal(offered.code, f"{offered.reason} {_INSTEAD}")
    name = inside(parent_fqn, site.fqn)
    written = None if name is None else offered.links.written.get(name)
    if name is None or written is None or _in_a_list_below(parent, name):
        text = f"The trace of the forward of {type(parent).__qualname__!r} does not show it as a "
        text += "linear: its parameters are read elsewhere as well, or are not its own, or are "
        return Refusal("not_shown", f"{text}computed with before. {_INSTEAD}")
    layer = AsLayer(written.linear, parent)
    refusal = refuse_parameters(model, f"{parent_fqn}.{name}".lstrip("."), layer)
    if refusal is not None:
        return refusal
    kind = "conv1d" if written.linear.turned else "linear"
    activation, more = "none", {"parent_fqn": parent_fqn, "parent": parent, "pairs": offered}
    if name in offered.links.pairs:
        node, activation = offered.links.pairs[name]
        if node.op == "call_module":
            more["activation_fqn"] = f"{parent_fqn}.{node.target}".lstrip(".")
            more["activation_module"] = parent.get_submodule(str(node.target))
    observed = calls_of([c for c in calls if c.sample is not None and c.sample.numel()])
    problems = problems_of(layer, kind, activation, observed)
    known: dict[str, Any] = {**more, "problems": problems, "backend": backend}
    return Candidate(site.fqn, layer, kind, activation, "parent", observed, **known)


def _in_a_list_below(parent: nn.Module, name: str) -> bool:
    """Whether it lies in a list that a module inside holds, whose length nothing watches."""
    home, _, _ = name.rpartition(".")
    listed = isinstance(parent.get_submodule(home), nn.ParameterList | nn.ParameterDict)
    return listed and "." in home
