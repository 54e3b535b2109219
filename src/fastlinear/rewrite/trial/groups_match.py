"""The grouped layers of a model that may become one call, and why the others may not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.chain import Chain
from fastlinear.rewrite.match.chain_row import RowChain
from fastlinear.rewrite.rules.grouped_chains import chain_of, row_of
from fastlinear.rewrite.trial.groups_watch import watched
from fastlinear.rewrite.trial.parents import traced
from fastlinear.rewrite.work import Work

_TAKEN = "another rewrite has one of its linears"
_NO_CANDIDATES = "its linears are left alone themselves"


def group_chains(
    work: Work, candidates: Mapping[str, Candidate], taken: Iterable[str]
) -> list[Chain]:
    """What may become one call of ``grouped_linear``; ``work.left_alone`` says why of the others.

    Args:
        work: the optimization under way.
        candidates: what the rule of linear_act found, by name.
        taken: the linears of other chains.
    """
    sites = {s.fqn: s for s in work.profile.sites}
    backend, gone = work.config.backends.get(NAME), set(taken)
    found: list[Chain] = []
    for whole, calls in watched(work).wholes:
        made: Chain | str = "filter_fn leaves it out"
        if work.filter_fn is None or work.filter_fn(whole.module, whole.fqn):
            observed = work.arguments.get(whole.module)
            made = chain_of(whole, calls, candidates, sites, observed, backend)
        if not isinstance(made, str) and gone & set(made.names):
            made = _TAKEN
        if isinstance(made, str):
            work.left_alone[(whole.members or (whole.fqn,))[0]] = made
        else:
            found.append(made)
    gone.update(name for chain in found for name in chain.names)
    return found + _rows(work, candidates, gone)


def _rows(work: Work, every: Mapping[str, Candidate], gone: set[str]) -> list[Chain]:
    """Linears on one input or on its parts, those of other chains (``gone``) left out."""
    candidates = {name: c for name, c in every.items() if name not in gone}
    sites = {s.fqn: s for s in work.profile.sites}
    found: list[Chain] = []
    for row in watched(work).rows:
        parent = work.model.get_submodule(row.fqn)
        left = [fqn for fqn in row.members if fqn in candidates]
        if len(left) < 2:
            made: list[RowChain] | str = _TAKEN if gone & set(row.members) else _NO_CANDIDATES
        else:
            made = row_of(row, candidates, sites, parent, traced(work, row.fqn))
        if isinstance(made, str):
            work.left_alone[row.members[0]] = made
        else:
            found += made
    return found
