"""Which grouped layers may become one call of ``grouped_linear``, and why the others may not."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.families.grouped.problem import NAME
from fastlinear.profile.graph import TENSOR, Observed, Untraceable, trace
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.candidate import OWN, Candidate, all_different, one_pass
from fastlinear.rewrite.rules.grouped.modules.forward import CONVOLUTION, LINEARS
from fastlinear.rewrite.rules.grouped.modules.fuse import fused_group
from fastlinear.rewrite.rules.grouped.modules.recognise import Whole
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.swap.modules import is_rewritten
from fastlinear.rewrite.swap.traceable import is_straight, unseen_by_trying, why_not


def module_fusion(session: Session, whole: Whole, calls: SiteCalls) -> Fusion | str:
    """A module that is called so as one call, or why it is left alone."""
    observed = session.arguments.get(whole.module)
    reason = _why_not(whole, calls, observed)
    if reason is not None:
        return reason
    assert observed is not None
    backend, members = session.backends.get(NAME), _members(session, whole, calls)
    if isinstance(members, str):
        return members
    made = fused_group(whole.fqn, whole.module, members, whole.grouped, observed, calls, backend)
    if whole.grouped.kind == LINEARS:
        return made
    return replace(made, members=(replace(members[0], problems=made.problems),))


def _why_not(whole: Whole, calls: SiteCalls, observed: Observed | None) -> str | None:
    module, grouped = whole.module, whole.grouped
    if is_rewritten(module):
        return "optimize_ has rewritten it already"
    if observed is None or observed.arguments() != ((TENSOR,), {}):
        return "it is called with its input as a keyword argument, or with more than that"
    reason = _why_not_tensors(whole, calls)
    if reason is not None or grouped.kind == CONVOLUTION:
        return reason
    reason = why_not(module) or why_not_traced(module, observed, grouped.groups)
    return None if reason is None else f"its forward {reason}"


def _why_not_tensors(whole: Whole, calls: SiteCalls) -> str | None:
    held = [p for p in whole.module.parameters() if p is not None]
    for t in held:
        if type(t) is not nn.Parameter or type(t.data) is not Tensor:
            return f"it holds a {type(t).__qualname__}"
        if t.is_meta or t.layout is not torch.strided or t.device.type not in ("cpu", "cuda"):
            return "a weight of it is no strided tensor with values"
    for kind in calls.kinds:
        if kind.x.dtype not in DTYPE_NAMES:
            return f"its input has dtype {kind.x.dtype}"
        if not whole.grouped.takes(kind.x, whole.parameters()[0]) and calls.autocast is None:
            return "its inputs differ in dtype from its weights, or in shape from each other"
    if calls.autocast is not None and whole.grouped.kind not in (CONVOLUTION, LINEARS):
        return "under autocast what is cast depends on the operations it is written in"
    return None


def why_not_traced(module: nn.Module, observed: Observed, parts: int | None = None) -> str | None:
    """Why what it does may depend on more than it was recognised by: a branch on a shape or on
    values, say. ``parts`` as for ``trace``."""
    unseen = unseen_by_trying(module)
    if unseen is not None:
        return unseen
    if is_straight(module):
        return None
    try:
        trace(module, observed, runnable=True, parts=parts)
    except Untraceable as error:
        return f"cannot be traced: {error}"
    return None


def _members(session: Session, whole: Whole, calls: SiteCalls) -> tuple[Candidate, ...] | str:
    if whole.grouped.kind != LINEARS:
        return (Candidate(whole.fqn, whole.module, OWN, whole.grouped.activation, "own", calls),)
    names, candidates = whole.members, session.candidates
    if not all(n in candidates and session.sites[n].parent_fqn == whole.fqn for n in names):
        return "one of its linears is left alone, or is called by another module"
    members = tuple(candidates[n] for n in names)
    count = sum(kind.count for kind in calls.kinds)
    if not (one_pass(members) and all_different(members) and members[0].calls.calls == count):
        return "one of its linears is there twice, or is called by others as well"
    return members
