"""What findings say of gated MLPs: what runs, what is fused, and what ``gated_mlp`` saves on a
model's inputs."""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.core.cost import floor_us, measure_ceilings, roofline
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.families.gated.problem import NAME, STEP
from fastlinear.families.gated.selection import choices_of
from fastlinear.profile.records import IN_PLACE, Finding
from fastlinear.profile.timeline import Timeline
from fastlinear.rewrite.finding import OFFERED, Told, in_words
from fastlinear.rewrite.rules.gated import passes
from fastlinear.rewrite.rules.gated.find import match, sites_of
from fastlinear.rewrite.rules.gated.modules import GatedSite
from fastlinear.rewrite.rules.gated.observe import Called, called, observed
from fastlinear.rewrite.rules.gated.saved_memory import told as kept_told
from fastlinear.rewrite.rules.gated.unseen import findings as unseen
from fastlinear.rewrite.rules.gated.watch import Watch, could_hold
from fastlinear.rewrite.session import Session, Times
from fastlinear.rewrite.site_outcome import SiteOutcome

_AS_FAST = 1.02  # a smaller gain is none
_SHOWN_US = 1e5  # a longer call is shown only where it can be shorter

_Ran = tuple[dict[str, Timeline], int | None]
"""What runs in a call as it is and as one, and the bytes that training keeps as it is."""


def findings(session: Session) -> list[Told]:
    """One for every gated MLP of the model, rewritten or not, faster or not; and for those that
    only a run shows. The model runs once more."""
    if not could_hold(session.model):
        return []
    sites, watch = sites_of(session), Watch(session.model)
    seen = observed(session, sites, watch)
    ran: dict[Any, _Ran] = {}
    found = []
    for i, site in enumerate(sites):
        if not seen[site].calls:
            continue
        one = called(session, site, seen[site])
        if one is None:
            why = "its input and parameters are no plain tensors of one dtype with kernels for it"
            found.append(Told(_unmeasured(session, site, seen[site].calls, why)))
            continue
        times: Times | str = "" if one.fusion is None else session.times(one.fusion, len(sites) - i)
        if isinstance(times, Times) and one.kind not in ran:
            ran[one.kind] = _ran(session, one, times)
        finding = _finding(session, one, times, ran.get(one.kind, ({}, None)))
        one_by_one = finding.predicted_gain_us and not _one_by_one(session, site)
        covers = site.names if _kept(session, site) or one_by_one else ()
        found.append(Told(finding, covers))
    known = {name for site in sites for name in site.weights}
    return found + [Told(one) for one in unseen(session, watch.found, known)]


def _ran(session: Session, one: Called, times: Times) -> _Ran:
    shown = times.faster or times.before_us < _SHOWN_US
    timelines = one.timelines(session.device) if shown else {}
    return timelines, one.saved_bytes() if session.train else None


def _kept(session: Session, site: GatedSite) -> SiteOutcome | None:
    """The outcome of its first linear, where the module is rewritten as one call."""
    return session.kept(site.names[0], (NAME,))


def _gain(session: Session, one: Called, times: Times | str) -> tuple[float, str]:
    """Microseconds a step that one call saves of the model as it is left, and what is to be said
    of those that are saved already."""
    if isinstance(times, str) or not times.faster:
        return 0.0, ""
    gain = (times.before_us - times.after_us) * one.calls
    already = _one_by_one(session, one.site)
    if not already:
        return max(0.0, gain), ""
    text = f"; of {gain:.1f} us a step its linears, rewritten one by one, save {already:.1f}"
    return max(0.0, gain - already), text


def _one_by_one(session: Session, site: GatedSite) -> float:
    """Microseconds a step that rewrites of its linears save already, where it is no one call."""
    known = [session.outcomes.get(name) for name in site.names]
    if _kept(session, site) is not None:
        return 0.0
    saved = ((o.before_us or 0.0) - (o.after_us or 0.0) for o in known if o and o.status == "kept")
    return max(0.0, sum(saved))


def _finding(session: Session, one: Called, times: Times | str, ran: _Ran) -> Finding:
    """``times``: of a call as it is and as one, or why there are none (``""``: it would not do the
    same)."""
    site, problem, calls = one.site, one.problem, one.calls
    measured = times if isinstance(times, Times) else None
    timelines, held = ran
    asked = problem.with_piece(STEP) if problem.needs_grad else problem
    cost = family(NAME).cost(asked)
    limits = measure_ceilings(str(session.device), problem.dtype, problem.precision)
    gated, (_, h, _) = site.gated, site.sizes
    backends = _backends(session, problem)
    per_number = problem.dim("M") * h * getattr(torch, problem.dtype).itemsize
    told, *numbers = _passes(site, backends)
    theirs, ours = (count * per_number for count in numbers)
    avoidable = max(0, theirs - ours)
    saved = f"{_size(avoidable)} or {avoidable / limits.bytes_per_s * 1e6:.1f} us are avoidable"
    before_us = 0.0 if measured is None else measured.before_us
    gain_us, already = _gain(session, one, times)
    worth = site.advised and (measured is None or gain_us > 0)
    memory = ""
    kept_bytes: dict[str, Any] = {}
    if one.fusion is not None:
        memory, kept_bytes = kept_told(problem, one.needs, backends, held)
    message = (
        f"products {site.products}; {told.format(_size(theirs), _size(ours))}: "
        f"{saved if avoidable else 'no pass is avoidable'}. "
        f"{memory}{_in_words(session, site, times)}{already}. {_remedy(session, site, worth)}"
    )
    return Finding(
        code=NAME,
        fqn=site.fqn,
        title=f"gated MLP of {h} hidden features, {gated.activation}",
        message=message,
        measured_us=before_us * calls,
        floor_us=floor_us(cost, limits) * calls,
        predicted_gain_us=gain_us,
        flops=cost.flops * calls,
        bytes=cost.bytes * calls,
        bound=roofline(cost, limits, before_us or 1.0).bound,
        details={
            **_facts(session, site, calls, site.advised and (not already or worth)),
            "backends": backends,
            "avoidable_bytes": avoidable * calls,
            **kept_bytes,
            "speedup": None if measured is None else measured.speedup.median,
            "timeline": {name: t.to_json() for name, t in timelines.items()},
        },
    )


def _backends(session: Session, problem: Problem) -> dict[str, str]:
    """Piece → backend that is chosen; a forced one only where it can serve."""
    try:
        found = choices_of(problem, session.backends.get(NAME))
    except UnsupportedError:
        found = choices_of(problem, None)
    return {choice.problem.piece: choice.backend.name for choice in found}


def _unmeasured(session: Session, site: GatedSite, calls: int, why: str) -> Finding:
    """A finding without numbers."""
    _, h, _ = site.sizes
    return Finding.untimed(
        code=NAME,
        fqn=site.fqn,
        title=f"gated MLP of {h} hidden features, {site.gated.activation}",
        message=f"products {site.products}; not measured: {why}. "
        f"{_remedy(session, site, site.advised)}",
        details={**_facts(session, site, calls, site.advised), "avoidable_bytes": 0},
    )


def _facts(session: Session, site: GatedSite, calls: int, advised: bool = True) -> dict[str, Any]:
    advice = site.advice(session.model) if advised else None
    return {
        "activation": site.gated.activation,
        "order": site.gated.order,
        "linears": list(site.gated.names),
        "calls": calls,
        "advice": IN_PLACE if _kept(session, site) else advice,
    }


def _passes(site: GatedSite, backends: dict[str, str]) -> tuple[Any, ...]:
    """What is fused as it is and by ``gated_mlp``, with room for two sizes; then both in numbers
    of hidden size a token. Where PyTorch's own path is chosen, the second is one fused pass's."""
    activation, train = site.gated.activation, "backward" in backends
    known: dict[str, Any] = {"train": train}
    own = dict.fromkeys(backends, passes.EAGER)
    down = site.gated.down is not None
    opened = None if site.opened is None else site.opened.moved
    laid = site.glu and site.gated.up is not None
    opened = passes.LAID_AND_GLU if laid else opened
    theirs = passes.moved(activation, own, **known, down=down, glu=site.glu, opened=opened)
    first = f"as PyTorch runs them {passes.words(activation, own, **known, glu=site.glu)}; "
    if site.opened is not None:
        first += f"{activation} and the product are written out as {len(site.opened.nodes)} ops; "
    first += "laying its halves together is another; " if laid else ""
    least = "at least " if opened is not None and train else ""
    first += least + "{} a call are written or read between them"
    chosen = backends
    if set(backends.values()) == {passes.EAGER}:
        chosen = dict.fromkeys(backends, "elementwise")
        second = "gated_mlp takes PyTorch's own path for it, one fused pass would leave {}"
    else:
        names = ", ".join(f"{piece} {name}" for piece, name in backends.items() if piece != STEP)
        fused = passes.words(activation, backends, **known)
        second = f"by gated_mlp ({names}) {fused}; {{}} are left"
    ours = passes.moved(activation, chosen, **known, down=down)
    return f"{first}; {second}", theirs, ours


def _in_words(session: Session, site: GatedSite, measured: Times | str) -> str:
    """What was measured of a call."""
    if isinstance(measured, str):
        return f"Not measured: {measured}" if measured else "Not measured here"
    ratio = measured.speedup
    text = (
        f"{measured.before_us:.1f} us a call, {measured.after_us:.1f} us by gated_mlp "
        f"({in_words(ratio)}{f'; {measured.said}' if measured.said else ''})"
    )
    if measured.faster:
        return text
    if _kept(session, site) is not None:
        return f"{text}: open by itself, decided on the whole step"
    if ratio.high < 1.0:
        return f"{text}: PyTorch's own path is faster"
    if ratio.median > _AS_FAST:
        return f"{text}: not beyond noise"
    return f"{text}: PyTorch's own path is as fast"


def _remedy(session: Session, site: GatedSite, worth: bool = True) -> str:
    """What to do about it where that is worth it, and why ``optimize_`` has not done it."""
    if _kept(session, site) is not None:
        return IN_PLACE
    outcomes = {name: session.outcomes.get(name) for name in site.names}
    first = outcomes[site.names[0]]
    why = session.once(match)[1].get(site.names[0]) or session.left_alone.get(site.names[0])
    if first is not None and (first.rule, first.status) == (NAME, "rejected"):
        why = first.reason.rstrip(".")
    for name, outcome in outcomes.items():
        if (
            outcome is not None
            and why is not None
            and why.endswith(f"{name!r} is left alone itself")
        ):
            why = f"{why}: {outcome.reason.rstrip('.')}"
    left = "" if why is None else f"optimize_ leaves it alone: {why}"
    left = OFFERED if site.names[0] in session.offered else left
    if not worth:
        return left or "optimize_ leaves it as it is"
    advice = site.advice(session.model)
    return f"{advice}; {left}" if left else advice


def _size(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
