"""Chains of linears that stop between modules, as findings: where, and what stands in the way."""

from __future__ import annotations

from fastlinear.profile.records import Finding
from fastlinear.rewrite.finding import Told
from fastlinear.rewrite.profiled import profiled
from fastlinear.rewrite.rules.mlp.blocks import Stopped
from fastlinear.rewrite.rules.mlp.find import match
from fastlinear.rewrite.rules.mlp.stops import Stop
from fastlinear.rewrite.session import Session


def findings(session: Session) -> list[Told]:
    """One for every module in whose forward a chain of linears stops that would go through several
    modules. Nothing is measured here."""
    return [Told(_finding(session, stopped)) for stopped in session.once(match)[1]]


def _finding(session: Session, stopped: Stopped) -> Finding:
    ends = {n for s in stopped.stops for n in (s.before, s.after)}
    linears = [name for name in session.sites if any(_in(name, end) for end in ends)]
    words = "; ".join(map(_words, stopped.stops))
    message = (
        f"{words}. One call of mlp computes a chain of linears that follow each other with one "
        "activation between them."
    )
    return profiled(
        session,
        code="chain_stopped",
        fqn=stopped.fqn,
        title="chain of linears stops between modules",
        message=lambda _: message,
        modules=linears,
        linears=linears,
        details={"stops": [[s.before, s.after, s.reason] for s in stopped.stops]},
    )


def _words(stop: Stop) -> str:
    return f"{stop.before!r} to {stop.after!r} is no one chain: {stop.reason}"


def _in(name: str, end: str) -> bool:
    return name == end or name.startswith(f"{end}.")
