"""The rule of mlp: runs of linears with their activations, in an ``nn.Sequential`` or in a forward.

It only matches; nothing here changes a model or measures anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise

from torch import nn

from fastlinear.profile.effects import class_forward
from fastlinear.profile.records import LinearSite
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import Candidate, all_different, one_pass
from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.rules.mlp.blocks import Blocks, Stopped, replaced
from fastlinear.rewrite.rules.mlp.fuse import in_forward, in_sequential
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS
from fastlinear.rewrite.swap.sequential_forward import Segment

RULE = "mlp"
_PASSING = (nn.Identity, nn.Dropout)  # dropout only where it does nothing


def find(session: Session) -> list[Fusion]:
    """The chains of a model."""
    return session.once(match)[0]


def match(session: Session) -> tuple[list[Fusion], list[Stopped]]:
    """The chains of a model: in every Sequential the longest run of two or more linears, the
    runs in the forwards of modules that hold linears themselves, and those that go through several
    modules, which may hold some of the others. Then where one of these stops, and why."""
    found = [*_in_sequentials(session), *_in_parents(session)]
    found = [c for c in found if one_pass(c.members) and all_different(c.members)]
    longer, stopped = Blocks(session, found).match()
    return [*replaced(found, longer), *longer], stopped


def _in_sequentials(session: Session) -> Iterator[Fusion]:
    candidates, sites, backend = session.candidates, session.sites, session.backends.get(RULE)
    names = {id(module): fqn for fqn, module in session.model.named_modules()}
    for fqn, module in session.model.named_modules():
        if class_forward(module) is not nn.Sequential.forward or refuse_module(module) is not None:
            continue
        segment = _longest(module, names, candidates, sites)
        if segment is None:
            continue
        children = list(module._modules.values())
        members = tuple(candidates[names[id(children[i])]] for i in segment.linears)
        if all(sites[c.fqn].parent_fqn == fqn for c in members):
            yield in_sequential(fqn, module, members, segment, backend)


def _in_parents(session: Session) -> Iterator[Fusion]:
    """Runs in the forwards that the rule of linear_act has traced."""
    candidates, sites, backend = session.candidates, session.sites, session.backends.get(RULE)
    traced = {c.parent_fqn: c for c in candidates.values() if c.pairs is not None}
    for parent_fqn, one in traced.items():
        fusable, parent = one.pairs, one.parent
        assert parent_fqn is not None
        assert fusable is not None
        assert parent is not None
        members = {
            name: c
            for fqn, c in candidates.items()
            if sites[fqn].parent_fqn == parent_fqn and (name := inside(parent_fqn, fqn)) is not None
        }
        for run in fusable.links.runs(members):
            run_of = tuple(members[name] for name in run.linears)
            yield in_forward(parent_fqn, parent, run_of, run, fusable, backend)


def _longest(
    module: nn.Module,
    names: Mapping[int, str],
    candidates: Mapping[str, Candidate],
    sites: Mapping[str, LinearSite],
) -> Segment | None:
    children = [c for c in module._modules.values() if c is not None]
    runs = [
        segment
        for start in range(len(children))
        if (segment := _run(module, children, start, names, candidates, sites)) is not None
    ]
    return max(runs, key=lambda r: len(r.linears), default=None)


def _run(
    module: nn.Module,
    children: list[nn.Module],
    start: int,
    names: Mapping[int, str],
    candidates: Mapping[str, Candidate],
    sites: Mapping[str, LinearSite],
) -> Segment | None:
    """The longest chain that begins with child ``start``, or None for fewer than two linears."""
    linears: list[int] = []
    activations: list[str] = []
    ends: list[int] = []
    i = start
    while i < len(children):
        child = children[i]
        fqn = names.get(id(child), "")
        if (
            type(child) in PLAIN_LINEARS
            and fqn in candidates
            and not _widths_differ(children, linears, i)
        ):
            linears.append(i)
            activations.append("none")
            ends.append(i + 1)
        elif linears and isinstance(child, _PASSING) and _passes(child, module.training):
            ends[-1] = i + 1
        elif (
            linears
            and activations[-1] == "none"
            and _follows(children[linears[-1]], child, names, sites)
        ):
            if refuse_module(child) is not None:
                break
            activations[-1] = sites[names[id(children[linears[-1]])]].activation or "none"
            ends[-1] = i + 1
        else:
            break
        i += 1
    # one activation between all layers, any after the last
    count = len(linears)
    for j, (a, b) in enumerate(pairwise(activations[:-1])):
        if a != b:
            count = j + 2
            break
    if count < 2:
        return None
    return Segment.of(
        module,
        start,
        ends[count - 1],
        tuple(linears[:count]),
        activations[0],
        activations[count - 1],
    )


def _widths_differ(children: list[nn.Module], linears: list[int], i: int) -> bool:
    if not linears:
        return False
    before, here = children[linears[-1]], children[i]
    return bool(before.out_features != here.in_features)


def _passes(child: nn.Module, training: bool) -> bool:
    return refuse_module(child) is None and (type(child) is nn.Identity or not training)


def _follows(
    linear: nn.Module, child: nn.Module, names: Mapping[int, str], sites: Mapping[str, LinearSite]
) -> bool:
    site = sites.get(names[id(linear)])
    return (
        site is not None
        and site.how == "modules"
        and site.activation is not None
        and site.activation_fqn is not None
        and names.get(id(child)) == site.activation_fqn
    )
