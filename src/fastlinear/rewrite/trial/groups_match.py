"""The grouped layers of a model that may become one call, and why the others may not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.chain import Chain
from fastlinear.rewrite.rules.grouped_chains import chain_of
from fastlinear.rewrite.trial.groups_watch import watched
from fastlinear.rewrite.work import Work

_TAKEN = "another rewrite has one of its linears"


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
            work.left_alone[whole.fqn] = made
        else:
            found.append(made)
    return found
