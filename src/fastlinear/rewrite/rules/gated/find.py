"""The gated MLPs of a model that may become one call, and why the others may not."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from fastlinear.families.gated.problem import NAME
from fastlinear.profile.effects import class_forward
from fastlinear.profile.graph import Observed, Untraceable, trace
from fastlinear.rewrite.fusion import Fusion, InForward
from fastlinear.rewrite.match.candidate import Candidate, all_different, one_pass
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.links import Links
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.rules.gated import modules as rule
from fastlinear.rewrite.rules.gated.edit import gate as gate_edit
from fastlinear.rewrite.rules.gated.fuse import fused_gate
from fastlinear.rewrite.rules.gated.gates import Gate, Gates
from fastlinear.rewrite.rules.gated.modules import GatedSite
from fastlinear.rewrite.session import Session


@dataclass(frozen=True, eq=False)
class Part:
    """A gated MLP in the forward of a module that does more.

    Attributes:
        fqn, parent: the module whose forward computes it.
        gate: where it is in that forward.
        fusable: the parent's trace, or why its forward is not rewritten.
    """

    fqn: str
    parent: nn.Module
    gate: Gate
    fusable: Fusable | Refusal

    def names(self, gate: Gate) -> tuple[str, ...]:
        """Its linears, or those of its first half, by their names in the model."""
        return tuple(f"{self.fqn}.{n}" if self.fqn else n for n in gate.gated.names)


def sites_of(session: Session) -> list[GatedSite]:
    """Every gated MLP of the model that is seen, whether it may be rewritten or not: modules, and
    parts of forwards."""
    found = list(session.once(_modules))
    known = {site.names[0] for site in found}
    for part in session.once(parts):
        if part.names(part.gate)[0] in known:
            continue
        known.add(part.names(part.gate)[0])
        half = part.gate.half
        whole = half is None or not _kept(session, part.names(half)[0])
        gate = part.gate if whole or _kept(session, part.names(part.gate)[-1]) else half
        assert gate is not None
        glu = len((half or part.gate).end.all_input_nodes) == 1
        written = {name: one.linear for name, one in gate.written.items()}
        advised = gate.why is None
        how: dict[str, Any] = {"glu": glu, "opened": part.gate.opened, "written": written}
        found.append(GatedSite(part.fqn, part.parent, gate.gated, True, advised, **how))
    return found


def _kept(session: Session, name: str) -> bool:
    return session.kept(name, (NAME,)) is not None


def find(session: Session) -> list[Fusion]:
    """What may become one call of ``gated_mlp``."""
    return session.once(match)[0]


def match(session: Session) -> tuple[list[Fusion], dict[str, str]]:
    """The same, and why the other gated MLPs may not, by the first of their linears."""
    gone = session.taken()
    found: list[Fusion] = []
    left: dict[str, str] = {}
    for chain in rule.chains(session, session.once(_modules), left):
        if not gone & set(chain.names):
            found.append(chain)
            gone.update(chain.names)
    for part in session.once(parts):
        if part.names(part.gate)[0] in gone:
            continue
        made: Fusion | str = "its linears are left alone themselves"
        for gate in (part.gate, part.gate.half):
            if gate is not None:
                made = _chain(session, part, gate, gone)
            if not isinstance(made, str):
                break
        if isinstance(made, str):
            left[part.names(part.gate)[0]] = made
        else:
            found.append(made)
            gone.update(made.names)
            left.pop(made.names[0], None)
    return found, left


def _modules(session: Session) -> list[GatedSite]:
    return rule.match(session.model)


def parts(session: Session) -> list[Part]:
    """The gated MLPs that forwards compute beside other things."""
    callers: dict[str, None] = {}
    for site in session.sites.values():
        if site.parent_fqn is None:
            continue
        callers[caller(session, site.parent_fqn)] = None
    found = []
    for fqn in callers:
        parent = session.model.get_submodule(fqn)
        if parent not in session.arguments or _is_sequential(session, fqn):
            continue
        offers = session.offers(fqn)
        if isinstance(offers, Refusal):
            seen = _gates_seen(parent, session.arguments[parent])
        else:
            seen = offers.links.once(Gates).found
        found += [Part(fqn, parent, gate, offers) for gate in seen if _on(session, fqn, gate)]
    return found


def caller(session: Session, fqn: str) -> str:
    """The module of that name, or what holds it where that is a Sequential or a list."""
    while fqn and (_is_sequential(session, fqn) or _is_list(session, fqn)):
        fqn = fqn.rpartition(".")[0]
    return fqn


def _is_list(session: Session, fqn: str) -> bool:
    return isinstance(session.model.get_submodule(fqn), nn.ModuleList | nn.ModuleDict)


def _on(session: Session, fqn: str, gate: Gate) -> bool:
    """Whether it is a gated MLP of what these inputs give it."""
    first = f"{fqn}.{gate.gated.gate}" if fqn else gate.gated.gate
    shapes = next((s.shapes for s in session.sites.values() if s.fqn == first), ())
    return all(gate.holds_for(len(shape)) for shape in shapes)


def _is_sequential(session: Session, fqn: str) -> bool:
    return class_forward(session.model.get_submodule(fqn)) is nn.Sequential.forward


def _chain(session: Session, part: Part, gate: Gate, gone: set[str]) -> Fusion | str:
    """One call for it, or why it is left alone."""
    if isinstance(part.fusable, Refusal):
        return part.fusable.reason.rstrip(".")
    if gate.why is not None:
        return gate.why
    names = part.names(gate)
    for name in names:
        if name in gone:
            return f"another rewrite has its linear {name!r}"
        # called by the parent, or by a Sequential in it that holds the linear
        if (why := session.why_not(name, part.fqn, name.rpartition(".")[0])) is not None:
            return why
    members = tuple(session.candidates[name] for name in names)
    tied = _tied(members)
    if tied is not None:
        return f"its linears {tied[0]!r} and {tied[1]!r} have one weight"
    if gate.half is not None and members[-1].activation != "none":
        return f"an activation follows its linear {names[-1]!r}"  # that pair is one call already
    if not (one_pass(members) and all_different(members)):
        return "one of its linears is there twice, or is called by others as well"
    backend = session.backends.get(NAME)
    call = InForward(part.fusable, gate_edit(gate, backend))
    given = part.fqn, part.parent, members, gate.gated, call
    return fused_gate(*given, backend=backend, opened=gate.opened)


def _tied(members: tuple[Candidate, ...]) -> tuple[str, str] | None:
    """Two linears that share a weight."""
    known: dict[int, str] = {}
    for c in members:
        first = known.setdefault(id(c.module.weight), c.fqn)
        if first != c.fqn:
            return first, c.fqn
    return None


def _gates_seen(parent: nn.Module, observed: Observed) -> list[Gate]:
    """The gated MLPs in a forward that must not be rewritten; none where it cannot be traced."""
    try:
        graph = trace(parent, observed, runnable=True)
    except Untraceable:
        return []
    return Links(parent, graph, {}).once(Gates).found
