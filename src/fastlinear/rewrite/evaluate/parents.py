"""The traced forwards of modules that call linears, one trace for each in an optimization."""

from __future__ import annotations

from fastlinear.ops.grouped_linear.problem import NAME as GROUPED
from fastlinear.rewrite.evaluate.groups_watch import watched
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable, fusable, is_sequential
from fastlinear.rewrite.rules.grouped.lists.find import lists_of
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import parts_of
from fastlinear.rewrite.rules.grouped.rows.observed import LINEARS
from fastlinear.rewrite.work import Work

_NOT_CALLED = Refusal("not_called", "These inputs never call the module that holds it.")


def traced(work: Work, fqn: str) -> Fusable | Refusal:
    """What the trace of a module's forward offers, or why there is none.

    The trace that the rule of linear_act made of it comes first: one forward is built of all that
    is fused in it.
    """
    known: dict[str, Fusable | Refusal] = work.traces
    if fqn not in known:
        own = (c.pairs for c in work.every if c.parent_fqn == fqn and c.pairs is not None)
        known[fqn] = next(own, None) or _trace(work, fqn)
    return known[fqn]


def offers(work: Work, fqn: str) -> Fusable | Refusal:
    """The same, of a Sequential as well."""
    module = work.model.get_submodule(fqn)
    if not is_sequential(module):
        return traced(work, fqn)
    if fqn not in work.sequentials:
        observed = work.arguments.get(module)
        if observed is None:
            work.sequentials[fqn] = _NOT_CALLED
        else:
            work.sequentials[fqn] = fusable(module, observed, {}, sequential=True)
    found: Fusable | Refusal = work.sequentials[fqn]
    return found


def _trace(work: Work, fqn: str) -> Fusable | Refusal:
    module = work.model.get_submodule(fqn)
    observed = work.arguments.get(module)
    if observed is None:
        return _NOT_CALLED
    parts = None
    if work.allows(GROUPED):
        loops = (row for row in watched(work).rows if row.kind == LINEARS and row.fqn == fqn)
        parts = next((len(row.members) for row in loops), None) or parts_of(work.model, fqn)
        lists = lists_of(work.model, work.profile.sites).get(fqn, ())
        parts = parts or max(map(len, lists), default=None)
    return fusable(module, observed, {}, parts)
