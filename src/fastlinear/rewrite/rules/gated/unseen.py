"""Findings for gated MLPs that a run shows and no rewrite can reach."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable

from fastlinear.families.gated.problem import NAME
from fastlinear.profile.records import Finding
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.rules.gated.find import caller
from fastlinear.rewrite.rules.gated.values import Flow
from fastlinear.rewrite.session import Session

_OF_WEIGHT = ".parametrizations."


def findings(session: Session, flows: Iterable[Flow], told: Collection[str]) -> list[Finding]:
    """One for each gated MLP of a run that is told nowhere else, without numbers.

    Args:
        session: the optimization under way.
        flows: what ran.
        told: names of the weights of those that are told.
    """
    unseen = Counter(flow for flow in flows if flow.gate not in told and flow.up not in told)
    return [_finding(session, flow, calls) for flow, calls in unseen.items()]


def _finding(session: Session, flow: Flow, calls: int) -> Finding:
    fqn, why, hidden = _why(session, flow)
    name = "gated_linear" if flow.down is None else "gated_mlp"
    k, n = flow.sizes
    advice = None if flow.mixed or hidden else f"fl.{name} on {', '.join(_weights(session, flow))}"
    first = f"{k} → {flow.hidden} twice (gate, up)"
    if flow.up is None:
        first = f"{k} → 2·{flow.hidden} (gate and up stacked)"
    down = "" if flow.down is None else f", {flow.hidden} → {n} (down)"
    told = f"{advice}; optimize_" if advice is not None else "optimize_"
    return Finding.untimed(
        code=NAME,
        fqn=fqn,
        title=f"gated MLP of {flow.hidden} hidden features, {flow.activation}",
        message=f"products {first}{down}; not measured. {told} leaves it alone: {why}",
        details={
            "activation": flow.activation,
            "order": "apart" if flow.up is not None else "stacked",
            "linears": list(flow.names),
            "calls": calls,
            "advice": advice,
            "avoidable_bytes": 0,
        },
    )


def _why(session: Session, flow: Flow) -> tuple[str, str, bool]:
    """The module whose forward computes it, as far as that is known; why it is left alone, and
    whether that is what no result shows: one call would not do the same."""
    if flow.mixed:
        return *_why_mixed(session, flow), False
    called = [site for site in session.sites.values() if site.calls]
    sites = {f"{site.fqn}.weight" if site.fqn else "weight": site for site in called}
    sites |= {site.fqn: site for site in called if site.module_class == "Parameter"}
    raw = [name for name in flow.names if name not in sites]
    if raw:
        names = ", ".join(repr(name) for name in raw)
        why = f"no linear of {names} is seen in a run, nor in a trace"
        return raw[0].rpartition(".")[0], why, False
    layers = [sites[name] for name in flow.names]
    fqn = caller(session, layers[0].parent_fqn or "")
    offers = session.offers(fqn)
    if isinstance(offers, Refusal):
        return fqn, offers.reason.rstrip("."), offers.code == "gradients"
    for layer in layers:
        outcome = session.outcomes.get(layer.fqn)
        if outcome is not None and layer.fqn not in session.candidates:
            reason = outcome.reason.rstrip(".")
            return fqn, f"its linear {layer.fqn!r} is left alone itself: {reason}", False
    why = "the trace of that forward does not show it: a view or a size between its products"
    return fqn, why, False


def _why_mixed(session: Session, flow: Flow) -> tuple[str, str]:
    """The same where a projection is more than a product with one weight."""
    wrapped, parametrized = [], []
    for names in flow.mixed:
        if any(_OF_WEIGHT in name for name in names):
            layers = {name.partition(_OF_WEIGHT)[0] for name in names if _OF_WEIGHT in name}
            parametrized += [repr(layer) for layer in sorted(layers)]
        else:
            holder = _holder(name.rpartition(".")[0] for name in names)
            kind = type(session.model.get_submodule(holder)).__qualname__
            wrapped.append(f"{repr(holder) if holder else 'the model'} ({kind})")
    told = []
    if wrapped:
        first = ", ".join(repr(name) for name in flow.mixed[0])
        add = "adds" if len(wrapped) == 1 else "each add"
        text = f"{', '.join(wrapped)} {add} products of several weights ({first}"
        told.append(f"{text}{', …' if len(wrapped) > 1 else ''}); merged, they are one linear's")
    if parametrized:
        told.append(f"{', '.join(parametrized)}: parametrized, its weight is computed at each call")
    return caller(session, _holder(name.rpartition(".")[0] for name in flow.names)), "; ".join(told)


def _holder(names: Iterable[str]) -> str:
    """The module that holds all of these."""
    paths = [name.split(".") for name in names]
    shared = itertools.takewhile(lambda steps: len({*steps}) == 1, zip(*paths, strict=False))
    return ".".join(steps[0] for steps in shared)


def _weights(session: Session, flow: Flow) -> list[str]:
    """Its weights as code, each as (N, K)."""
    known = dict(session.model.named_parameters())
    k, _ = flow.sizes
    inputs = {flow.gate: k, flow.up: k, flow.down: flow.hidden}
    return [
        in_code(session.model, name) + ("" if known[name].shape[1] == inputs[name] else ".t()")
        for name in flow.names
    ]
