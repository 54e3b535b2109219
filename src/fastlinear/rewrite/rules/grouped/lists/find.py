"""The rule of lists: linears of one list, of any sizes, that may become one call.

It only matches; nothing here changes a model or measures anything.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from torch import Tensor, nn

from fastlinear.activations.reference import widened
from fastlinear.families.grouped.unequal.op import explain
from fastlinear.profile.records import LinearSite
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import Candidate, all_different
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.rules.grouped.lists.fuse import OWN_INPUTS, PARTS, SHARED, fused_list
from fastlinear.rewrite.rules.grouped.lists.traced import LISTS, Lists
from fastlinear.rewrite.rules.grouped.parallel_mlps.find import FoundGroup
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import LISTS as BY_LISTS
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import Way
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import (
    ParallelGroup,
    ParallelMLP,
    parallel_mlp_of,
)
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS


def lists_of(model: nn.Module, sites: Iterable[LinearSite]) -> dict[str, list[tuple[str, ...]]]:
    """Module → the linears of each list that its forward calls, two or more."""
    found: dict[tuple[str, str], list[str]] = {}
    for site in sites:
        home = site.fqn.rpartition(".")[0]
        if site.parent_fqn is None or not site.calls or site.kind != "linear":
            continue
        path = inside(site.parent_fqn, site.fqn)
        if path is None or path.count(".") != 1 or not _is_list(model, home):
            continue
        if type(model.get_submodule(site.fqn)) in PLAIN_LINEARS:
            found.setdefault((site.parent_fqn, home), []).append(site.fqn)
    lists: dict[str, list[tuple[str, ...]]] = {}
    for (parent, _), names in found.items():
        if len(names) > 1:
            lists.setdefault(parent, []).append(tuple(names))
    return lists


def _is_list(model: nn.Module, fqn: str) -> bool:
    found: nn.Module | None = model
    for part in fqn.split(".") if fqn else ():
        found = None if found is None else found._modules.get(part)
    return type(found) in LISTS


def found_lists(session: Session, fqn: str, lists: Sequence[tuple[str, ...]]) -> list[FoundGroup]:
    """The linears of a module's lists: what they may become, or why they are left alone."""
    model, traced, found = session.model, session.offers(fqn), list[FoundGroup]()
    if isinstance(traced, Refusal):
        why = traced.reason.rstrip(".")
        return [_left(fqn, model, names, why, unsure=True) for names in lists]
    seen = traced.links.once(Lists)
    for group in seen.found:
        made = _chain(session, fqn, group, traced)
        names = tuple(_full(fqn, n) for n in group.names)
        way = None if isinstance(made, str) else Way(group.activations, BY_LISTS)
        found.append(FoundGroup(fqn, group.parallel_mlps, names, made, way=way))
    for names in lists:
        left = [seen.left[n] for n in (inside(fqn, name) or "" for name in names) if n in seen.left]
        if left:
            found.append(_left(fqn, model, names, left[0], unsure=True))
    return found


def _left(
    fqn: str, model: nn.Module, names: tuple[str, ...], why: str, *, unsure: bool
) -> FoundGroup:
    parallel_mlps = [
        parallel_mlp_of(inside(fqn, n) or "", model.get_submodule(n), {}) for n in names
    ]
    plain = tuple(mlp for mlp in parallel_mlps if isinstance(mlp, ParallelMLP))
    return FoundGroup(fqn, plain, names, why, unsure)


def _full(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _chain(session: Session, fqn: str, group: ParallelGroup, traced: Fusable) -> Fusion | str:
    """One call, or why they are left alone."""
    full = [_full(fqn, name) for name in group.names]
    for name in full:
        if (why := session.why_not(name, fqn)) is not None:
            return why
    members = tuple(session.candidates[name] for name in full)
    if not (_called_alike(members) and all_different(members)):
        return "its linears are called differently often, or share a weight"
    why = _why_not(group, members)
    if why is not None:
        return why
    shapes = tuple(
        tuple(tuple(kind.x.shape) for kind in same)
        for same in zip(*(c.calls.kinds for c in members), strict=True)
    )
    read = SHARED if group.shared else _read(members)
    totals = {sum(math.prod(shape) for shape in same) for same in shapes}
    if read == OWN_INPUTS and len(totals) < len(shapes):
        return "its calls differ in the shapes of their inputs, not in their numbers"
    way = Way(group.activations, BY_LISTS)
    return fused_list(fqn, traced.parent, members, group, way, traced, read, shapes)


def _called_alike(members: Sequence[Candidate]) -> bool:
    """Whether all ran as often; where that is on several kinds of input, on as many rows."""
    counts = [[k.count for k in c.calls.kinds] for c in members]
    rows = [[k.x.shape[:-1] for k in c.calls.kinds] for c in members]
    same = all(c == counts[0] for c in counts)
    return same and (len(counts[0]) == 1 or all(r == rows[0] for r in rows))


def _read(members: Sequence[Candidate]) -> str:
    """Whether the inputs lie in rows of larger tensors, as the parts of one do."""
    for same in zip(*(c.calls.kinds for c in members), strict=True):
        xs = [kind.x for kind in same]
        if all(x.is_contiguous() for x in xs) or len({x.shape[:-1] for x in xs}) > 1:
            return OWN_INPUTS
    return PARTS


def _why_not(group: ParallelGroup, members: Sequence[Candidate]) -> str | None:
    """Why ``unequal_linear`` would not compute them together, or None."""
    autocast = members[0].calls.autocast
    name = None if autocast is None else widened(group.activations)
    if name is not None:
        return f"under autocast what {name} is cast to depends on the operations it is written in"
    if any(c.calls.autocast != autocast for c in members):
        return "some of its linears are called under autocast, others not"
    grad = any(c.calls.grad for c in members)  # some may be frozen
    modules = [c.module for c in members]
    weights = [_weight(m) for m in modules]
    for same in zip(*(c.calls.kinds for c in members), strict=True):
        xs = [kind.x for kind in same]
        if any(not x.numel() for x in xs):
            return "one of its inputs is empty"
        kinds = {(w.dtype, w.device) for w in weights}
        if autocast is None:
            kinds |= {(x.dtype, x.device) for x in xs}
        if len(kinds) > 1:
            return "its linears or their inputs differ in dtype or device"
        dtype = autocast or xs[0].dtype
        hidden, cast = [x.detach().to(dtype) for x in xs], [w.to(dtype) for w in weights]
        if explain(hidden, cast, needs_grad=grad).choices[0].backend.name != "together":
            return "unequal_linear would compute them one by one here"
    return None


def _weight(module: nn.Module) -> Tensor:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.detach()
