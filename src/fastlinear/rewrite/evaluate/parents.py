"""The traced forwards of modules that call linears, one trace for each in an optimization."""

from __future__ import annotations

from fastlinear.rewrite import registry
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable, fusable, is_sequential
from fastlinear.rewrite.work import Work


def offers(work: Work, fqn: str) -> Fusable | Refusal:
    """What the trace of a module's forward offers, that of a Sequential as well, or why there is
    none.

    The trace that the rule of linear_act made of it comes first: one forward is built of all that
    is fused in it.
    """
    if fqn not in work.traces:
        own = (c.pairs for c in work.every if c.parent_fqn == fqn and c.pairs is not None)
        work.traces[fqn] = next(own, None) or _trace(work, fqn)
    return work.traces[fqn]


def _trace(work: Work, fqn: str) -> Fusable | Refusal:
    module = work.model.get_submodule(fqn)
    observed = work.arguments.get(module)
    if observed is None:
        return Refusal("not_called", "These inputs never call the module that holds it.")
    if is_sequential(module):
        return fusable(module, observed, {}, sequential=True)
    session, parts = work.session, None
    assert session is not None
    for rule in registry.RULES:
        if parts is None and work.allows(rule.family):
            parts = rule.parts(session, fqn)
    return fusable(module, observed, {}, parts)
