"""The grouped layers of a model that may become one call, and why the others may not."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.rewrite.evaluate.groups_watch import watched
from fastlinear.rewrite.evaluate.parents import traced
from fastlinear.rewrite.fusion import Fusion, InSequential
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.rules.grouped.lists.find import lists_of, standing_lists
from fastlinear.rewrite.rules.grouped.modules.find import chain_of
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import standing, suspects
from fastlinear.rewrite.rules.grouped.rows.find import rows_of
from fastlinear.rewrite.work import Work

_TAKEN = "another rewrite has one of its linears"
_NO_CANDIDATES = "its linears are left alone themselves"


def group_chains(
    work: Work, candidates: Mapping[str, Candidate], others: Iterable[Fusion]
) -> list[Fusion]:
    """What may become one call of ``grouped_linear``, or of ``unequal_linear``;
    ``work.left_alone`` says why of the others.

    Args:
        work: the optimization under way.
        candidates: what the rule of linear_act found, by name.
        others: the other chains; one of a parallel MLP competes with what becomes of all parallel
            MLPs.
    """
    sites = {s.fqn: s for s in work.profile.sites}
    others = tuple(others)
    backend = work.config.backends.get(NAME)
    gone = {name for chain in others for name in chain.names}
    found: list[Fusion] = []
    for whole, calls in watched(work).wholes:
        made: Fusion | str = "filter_fn leaves it out"
        if work.filter_fn is None or work.filter_fn(whole.module, whole.fqn):
            observed = work.arguments.get(whole.module)
            made = chain_of(whole, calls, candidates, sites, observed, backend)
        if not isinstance(made, str) and gone & set(made.names):
            made = _TAKEN
        if isinstance(made, str):
            work.left_alone[(whole.members or (whole.fqn,))[0]] = made
        else:
            found.append(made)
    elsewhere = {n for c in others if not isinstance(c.forward, InSequential) for n in c.names}
    found += _parallel_mlps(work, candidates, elsewhere | {n for c in found for n in c.names})
    gone.update(name for chain in found for name in chain.names)
    if backend is None:
        found += _lists(work, candidates, gone)
    return found + _rows(work, candidates, gone)  # these compete with lists: the faster is kept


def _lists(work: Work, candidates: Mapping[str, Candidate], gone: Container[str]) -> list[Fusion]:
    """Linears of lists; ``work.listed`` has those that are left alone too."""
    sites = {s.fqn: s for s in work.profile.sites}
    found: list[Fusion] = []
    work.listed = []
    for fqn, names in lists_of(work.model, work.profile.sites).items():
        if work.model.get_submodule(fqn) not in work.arguments:
            continue
        offers = traced(work, fqn)
        for one in standing_lists(fqn, work.model, names, offers, candidates, sites):
            if any(n in gone for n in one.linears):
                continue
            work.listed.append(one)
            if isinstance(one.made, str):
                work.left_alone.setdefault(one.linears[0], one.made)
            else:
                found.append(one.made)
    return found


def _parallel_mlps(
    work: Work, candidates: Mapping[str, Candidate], gone: Container[str]
) -> list[Fusion]:
    """Sequentials side by side; ``work.standing`` has those that are left alone too."""
    sites = {s.fqn: s for s in work.profile.sites}
    backend = work.config.backends.get(NAME)
    found: list[Fusion] = []
    work.standing = []
    for fqn, names in suspects(work.model).items():
        if work.model.get_submodule(fqn) not in work.arguments:
            continue
        offers = traced(work, fqn)
        for one in standing(fqn, work.model, names, offers, candidates, sites, backend):
            if not isinstance(one.made, str) and any(n in gone for n in one.made.names):
                one = replace(one, made=_TAKEN)
            work.standing.append(one)
            if isinstance(one.made, str):
                work.left_alone[one.linears[0]] = one.made
            else:
                found.append(one.made)
    return found


def _rows(work: Work, every: Mapping[str, Candidate], gone: set[str]) -> list[Fusion]:
    """Linears on one input or on its parts, those of other chains (``gone``) left out."""
    candidates = {name: c for name, c in every.items() if name not in gone}
    sites = {s.fqn: s for s in work.profile.sites}
    found: list[Fusion] = []
    for row in watched(work).rows:
        parent = work.model.get_submodule(row.fqn)
        left = [fqn for fqn in row.members if fqn in candidates]
        if len(left) < 2:
            made: list[Fusion] | str = _TAKEN if gone & set(row.members) else _NO_CANDIDATES
        else:
            made = rows_of(row, candidates, sites, parent, traced(work, row.fqn))
        if isinstance(made, str):
            work.left_alone[row.members[0]] = made
        else:
            found += made
    return found
