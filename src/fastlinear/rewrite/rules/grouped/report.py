"""What findings say of linears that could be one: what ``grouped_linear`` saves on a model's
inputs."""

from __future__ import annotations

from collections.abc import Iterator

from fastlinear.families.grouped.problem import NAME
from fastlinear.profile.records import Finding
from fastlinear.rewrite.finding import Told, not_measured, part_of, within
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.rules.grouped.advice import LIST
from fastlinear.rewrite.rules.grouped.find import match
from fastlinear.rewrite.rules.grouped.modules.report import of_module
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import FoundGroup
from fastlinear.rewrite.rules.grouped.products import WHY, of_product
from fastlinear.rewrite.rules.grouped.rows.report import of_row
from fastlinear.rewrite.rules.grouped.side_by_side import of_found
from fastlinear.rewrite.rules.grouped.watch import watched
from fastlinear.rewrite.session import Session


def findings(session: Session) -> list[Told]:
    """One for layers that ``grouped_linear`` computes faster as one, rewritten or not, and for
    those there was no time to measure."""
    groups = session.once(match).parallel_mlps
    found = [Told(_untold(one)) for one in groups if not one.parallel_mlps]
    fusions = [fusion for fusion in _fusions(session) if fusion is not None]
    for i, fusion in enumerate(fusions, 1):
        told = session.finding(fusion, len(fusions) - i)
        found += [] if told is None else [told]
    return _once(found)


def _fusions(session: Session) -> Iterator[Fusion | None]:
    seen, matched = session.once(watched), session.once(match)
    for row in seen.rows:
        yield of_row(session, row)
    made = {fusion.names: fusion for fusion in matched.fusions if fusion.rule == NAME}
    for whole, calls in seen.wholes:
        yield of_module(session, whole, calls, made.get(whole.members or (whole.fqn,)))
    for one in matched.parallel_mlps:
        yield of_found(session, one, seen.firsts, listed=False)
    known = [set(row.members) for row in seen.rows]
    known += [set(whole.members) for whole, _ in seen.wholes]
    for one in matched.lists:
        if set(one.linears) not in known:
            yield of_found(session, one, seen.firsts, listed=True)
    for product in seen.products:
        session.left_alone[product.fqn] = WHY
        yield of_product(session, product)


def _once(found: list[Told]) -> list[Told]:
    """Rows among the linears of a larger list claim no gain beside the list's, nor it beside
    theirs where that is larger."""
    for told in [t for t in found if t.finding.details["kind"] == LIST]:
        f = told.finding
        mine = set(f.details["linears"])
        others = [g.finding for g in found if g is not told]
        others = [g for g in others if mine & set(g.details.get("linears", ()))]
        if others and sum(g.predicted_gain_us for g in others) > f.predicted_gain_us:
            found = [t for t in found if t is not told]
        else:
            names = [n for g in others for n in g.details["linears"]]
            inside = [g for g in others if within(g, names)]
            found = [Told(part_of(t.finding, f)) if t.finding in inside else t for t in found]
    return found


def _untold(one: FoundGroup) -> Finding:
    """Sequentials side by side that are no parallel MLPs."""
    words = f"{len(one.names)} Sequentials side by side run one after another"
    first, *_, last = one.names
    title = f"{first!r} to {last!r}"
    return not_measured(NAME, one.fqn, title, words, str(one.made), {"kind": "parallel_mlps"})
