"""Findings for gated MLPs that a run shows and no rewrite can reach."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable

from fastlinear.ops.gated_mlp.problem import NAME
from fastlinear.profile.records import Finding
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.trial.gates_flow import Flow
from fastlinear.rewrite.trial.parents import traced
from fastlinear.rewrite.work import Work


def findings(work: Work, flows: Iterable[Flow], told: Collection[str]) -> list[Finding]:
    """One for each gated MLP of a run that is told nowhere else, without numbers.

    Args:
        work: the optimization under way.
        flows: what ran.
        told: names of the weights of those that are told.
    """
    unseen = Counter(flow for flow in flows if flow.gate not in told and flow.up not in told)
    return [_finding(work, flow, calls) for flow, calls in unseen.items()]


def _finding(work: Work, flow: Flow, calls: int) -> Finding:
    fqn, why = _why(work, flow)
    name = "gated_linear" if flow.down is None else "gated_mlp"
    advice = f"fl.{name} on {', '.join(in_code(work.model, n) for n in flow.names)}"
    weights = dict(work.model.named_parameters())
    k = weights[flow.gate].shape[1]
    first = f"{k} → {flow.hidden} twice (gate, up)"
    if flow.up is None:
        first = f"{k} → 2·{flow.hidden} (gate and up stacked)"
    down = "" if flow.down is None else f", {flow.hidden} → {weights[flow.down].shape[0]} (down)"
    return Finding(
        code=NAME,
        fqn=fqn,
        title=f"gated MLP of {flow.hidden} hidden features, {flow.activation}",
        message=f"products {first}{down}; not measured. {advice}; optimize_ leaves it alone: {why}",
        measured_us=0.0,
        floor_us=0.0,
        predicted_gain_us=0.0,
        flops=0.0,
        bytes=0.0,
        bound="memory",
        details={
            "activation": flow.activation,
            "order": "apart" if flow.up is not None else "stacked",
            "linears": list(flow.names),
            "calls": calls,
            "advice": advice,
            "avoidable_bytes": 0,
        },
    )


def _why(work: Work, flow: Flow) -> tuple[str, str]:
    """The module whose forward computes it, as far as that is known, and why it is left alone."""
    sites = {f"{site.fqn}.weight" if site.fqn else "weight": site for site in work.profile.sites}
    raw = [name for name in flow.names if name not in sites]
    if raw:
        fqn = raw[0].rpartition(".")[0]
        names = ", ".join(repr(name) for name in raw)
        return (
            fqn,
            f"{names} are no linear layers' weights, and of these alone it makes such a call",
        )
    layers = [sites[name] for name in flow.names]
    fqn = layers[0].parent_fqn or ""
    offers = traced(work, fqn)
    if isinstance(offers, Refusal):
        return fqn, offers.reason.rstrip(".")
    able = {candidate.fqn for candidate in work.every}
    for layer in layers:
        outcome = work.outcomes.get(layer.fqn)
        if outcome is not None and layer.fqn not in able:
            reason = outcome.reason.rstrip(".")
            return fqn, f"its linear {layer.fqn!r} is left alone itself: {reason}"
    return fqn, "the trace of that forward does not show it: a view or a size between its products"
