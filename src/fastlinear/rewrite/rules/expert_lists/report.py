"""Mixtures of experts as findings: equal layers on rows that data chose, which no trace follows."""

from __future__ import annotations

from fastlinear.profile.records import Finding
from fastlinear.rewrite.finding import Told
from fastlinear.rewrite.in_code import in_code_together
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.profiled import profiled
from fastlinear.rewrite.rules.expert_lists.lists import Experts, match
from fastlinear.rewrite.session import Session


def findings(session: Session) -> list[Told]:
    """One for every list of equal experts that ran on different numbers of rows in a forward that
    cannot be traced. Nothing is measured here."""
    found = []
    for one in match(session.model, session.sites.values()):
        if session.model.get_submodule(one.fqn) not in session.arguments:
            continue
        offers = session.offers(one.fqn)
        if isinstance(offers, Refusal):
            found.append(Told(_finding(session, one, offers.reason.rstrip("."))))
    return found


def _finding(session: Session, one: Experts, why: str) -> Finding:
    called = sorted(rows for rows in one.rows if rows)
    layers = len(one.layers)
    what = "linears" if one.layers[0] == one.names else f"experts of {layers} linears"
    advice = _advice(session, one)

    def message(measured_us: float) -> str:
        return (
            f"{len(called)} of {len(one.names)} equal {what} ran one after another, on "
            f"{called[0]} to {called[-1]} rows each: {measured_us:.1f} us. Which rows go where is "
            f"decided in a run, so optimize_ rewrites nothing: {why}. Sort the rows by expert and "
            f"make one call a layer: {advice}. Not measured."
        )

    return profiled(
        session,
        code="ragged_linear",
        fqn=one.fqn,
        title=f"{len(one.names)} equal {what} on rows of their own",
        message=message,
        modules={n for name in one.names for n in (name, *_below(session, name))},
        linears=one.linears,
        details={
            "kind": "experts",
            "experts": list(one.names),
            "rows": list(one.rows),
            "linears": list(one.linears),
            "advice": advice,
        },
    )


def _below(session: Session, fqn: str) -> list[str]:
    return [f"{fqn}.{n}" for n, _ in session.model.get_submodule(fqn).named_modules() if n]


def _advice(session: Session, one: Experts) -> str:
    """One call of ``ragged_linear``, of the first layer."""
    held = in_code_together(session.model, one.layers[0])
    first = session.model.get_submodule(one.layers[0][0])
    bias = "" if first.bias is None else f", torch.stack([m.bias for m in {held}])"
    return (
        f"fl.ragged_linear(x, torch.stack([m.weight for m in {held}]), group_sizes{bias}), "
        "the weights stacked once"
    )
