"""The grouped layers of a model that may become one call, and why the others may not."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace

from fastlinear.families.grouped.problem import NAME
from fastlinear.rewrite.fusion import Fusion, InSequential
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.rules.grouped.lists.find import found_lists
from fastlinear.rewrite.rules.grouped.modules.find import module_fusion
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import FoundGroup, found_groups, suspects
from fastlinear.rewrite.rules.grouped.rows.find import rows_of
from fastlinear.rewrite.rules.grouped.rows.observed import SHARED as SHARED_INPUT
from fastlinear.rewrite.rules.grouped.rows.observed import Row
from fastlinear.rewrite.rules.grouped.shared.find import shared_of
from fastlinear.rewrite.rules.grouped.watch import listed, watched
from fastlinear.rewrite.session import Session

_TAKEN = "another rewrite has one of its linears"
_NO_CANDIDATES = "its linears are left alone themselves"


@dataclass
class Matched:
    """The grouped layers of a model.

    Attributes:
        fusions: what may become one call of ``grouped_linear``, or of ``unequal_linear``.
        parallel_mlps: the parallel MLPs of modules, those that are left alone too.
        lists: the same of the linears of lists.
    """

    fusions: list[Fusion] = field(default_factory=list)
    parallel_mlps: list[FoundGroup] = field(default_factory=list)
    lists: list[FoundGroup] = field(default_factory=list)


def find(session: Session) -> list[Fusion]:
    """What may become one call of ``grouped_linear``, or of ``unequal_linear``."""
    return session.once(match).fusions


def match(session: Session) -> Matched:
    """The grouped layers of a model; ``session.left_alone`` says why of those that are left alone.

    A chain of a parallel MLP competes with what becomes of all parallel MLPs.
    """
    gone = session.taken()
    matched = Matched()
    found = matched.fusions
    for whole, calls in session.once(watched).wholes:
        made: Fusion | str = "filter_fn leaves it out"
        if session.filter_fn is None or session.filter_fn(whole.module, whole.fqn):
            made = module_fusion(session, whole, calls)
        if not isinstance(made, str) and gone & set(made.names):
            made = _TAKEN
        if isinstance(made, str):
            session.left_alone[(whole.members or (whole.fqn,))[0]] = made
        else:
            found.append(made)
    others = [c for c in session.found if c.competes and not isinstance(c.forward, InSequential)]
    taken = {n for c in (*others, *found) for n in c.names}
    matched.parallel_mlps = _parallel_mlps(session, taken)
    found += _made(session, matched.parallel_mlps)
    gone.update(name for chain in found for name in chain.names)
    if NAME not in session.backends:
        matched.lists = _lists(session, gone)
        found += _made(session, matched.lists)
    found += _rows(session, gone)  # these compete with lists: the faster is kept
    return matched


def _made(session: Session, groups: Iterable[FoundGroup]) -> list[Fusion]:
    found: list[Fusion] = []
    for one in groups:
        if isinstance(one.made, str):
            session.left_alone.setdefault(one.linears[0], one.made)
        else:
            found.append(one.made)
    return found


def _lists(session: Session, gone: Container[str]) -> list[FoundGroup]:
    found = []
    for fqn, names in session.once(listed).items():
        if session.model.get_submodule(fqn) in session.arguments:
            every = found_lists(session, fqn, names)
            found += [one for one in every if not any(n in gone for n in one.linears)]
    return found


def _parallel_mlps(session: Session, gone: Container[str]) -> list[FoundGroup]:
    found = []
    for fqn, names in suspects(session.model).items():
        if session.model.get_submodule(fqn) not in session.arguments:
            continue
        for one in found_groups(session, fqn, names):
            if not isinstance(one.made, str) and any(n in gone for n in one.made.names):
                one = replace(one, made=_TAKEN)
            found.append(one)
    return found


def _rows(session: Session, gone: set[str]) -> list[Fusion]:
    """Linears on one input or on its parts, those of other chains (``gone``) left out."""
    candidates = {name: c for name, c in session.candidates.items() if name not in gone}
    found: list[Fusion] = []
    for row in session.once(watched).rows:
        left = [fqn for fqn in row.members if fqn in candidates]
        if len(left) < 2:
            made: list[Fusion] | str = _TAKEN if gone & set(row.members) else _NO_CANDIDATES
        else:
            made = _row(session, row, candidates)
        if isinstance(made, str):
            session.left_alone[row.members[0]] = made
        else:
            found += made
    return found


def _row(session: Session, row: Row, candidates: Mapping[str, Candidate]) -> list[Fusion] | str:
    traced = session.offers(row.fqn)
    if row.kind != SHARED_INPUT or not isinstance(traced, Refusal):
        return rows_of(session, row, candidates)
    made = shared_of(session, row, candidates)
    return f"{traced.reason.rstrip('.')}; {made}" if isinstance(made, str) else made
