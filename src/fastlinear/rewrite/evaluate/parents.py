"""The traced forwards of modules that call linears, one trace for each in an optimization."""

from __future__ import annotations

from fastlinear.rewrite import registry
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable, fusable, is_sequential
from fastlinear.rewrite.work import Work

_NOT_CALLED = Refusal("not_called", "These inputs never call the module that holds it.")


def offers(work: Work, fqn: str) -> Fusable | Refusal:
    """What the trace of a module's forward offers, that of a Sequential as well, or why there is
    none."""
    module = work.model.get_submodule(fqn)
    if not is_sequential(module):
        return _traced(work, fqn)
    if fqn not in work.sequentials:
        observed = work.arguments.get(module)
        if observed is None:
            work.sequentials[fqn] = _NOT_CALLED
        else:
            work.sequentials[fqn] = fusable(module, observed, {}, sequential=True)
    found: Fusable | Refusal = work.sequentials[fqn]
    return found


def _traced(work: Work, fqn: str) -> Fusable | Refusal:
    """The same of one that is no Sequential.

    The trace that the rule of linear_act made of it comes first: one forward is built of all that
    is fused in it.
    """
    known: dict[str, Fusable | Refusal] = work.traces
    if fqn not in known:
        own = (c.pairs for c in work.every if c.parent_fqn == fqn and c.pairs is not None)
        known[fqn] = next(own, None) or _trace(work, fqn)
    return known[fqn]


def _trace(work: Work, fqn: str) -> Fusable | Refusal:
    module = work.model.get_submodule(fqn)
    observed = work.arguments.get(module)
    if observed is None:
        return _NOT_CALLED
    session, parts = work.session, None
    assert session is not None
    for rule in registry.RULES:
        if parts is None and work.allows(rule.family):
            parts = rule.parts(session, fqn)
    return fusable(module, observed, {}, parts)
