"""The rule of mlp for chains that go through several modules: nested Sequentials, and blocks that
a forward or a loop in it calls one after the other.

The traces of the modules are put together, and the linears followed in what comes of it. It only
matches; nothing here changes a model or measures anything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.fx import Graph

from fastlinear.families.mlp.problem import NAME
from fastlinear.profile.graph import TENSOR
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import Candidate, all_different, one_pass
from fastlinear.rewrite.match.composed import returned
from fastlinear.rewrite.match.eligible import Refusal, linear_kind, refuse_module
from fastlinear.rewrite.match.links import Run
from fastlinear.rewrite.match.parent import Fusable, is_sequential
from fastlinear.rewrite.match.sites import activation_of_module, activations_of, inside
from fastlinear.rewrite.rules.mlp.fuse import in_forward
from fastlinear.rewrite.rules.mlp.stops import Stop, stops_of
from fastlinear.rewrite.session import Session


@dataclass(frozen=True, eq=False)
class Stopped:
    """A module in whose forward a chain stops that would go through several modules.

    Attributes:
        fqn: the module.
        stops: where and why; linears and blocks by their names in the model.
    """

    fqn: str
    stops: tuple[Stop, ...]


@dataclass(eq=False)
class Blocks:
    """What is known of a model in which chains are looked for.

    Attributes:
        session: what is known of the model; a chain takes none but its candidates.
        shorter: the chains that lie in one module.
    """

    session: Session
    shorter: list[Fusion]
    _activations: dict[int, str | None] = field(default_factory=dict)

    @property
    def candidates(self) -> Mapping[str, Candidate]:
        """The linears that may take part."""
        return self.session.candidates

    def match(self) -> tuple[list[Fusion], list[Stopped]]:
        """The chains through several modules, those of outer modules last, with what else of the
        same forwards may become one call; and where one stops, and why."""
        chains: list[Fusion] = []
        stopped = []
        for fqn, module in reversed(list(self.session.model.named_modules())):
            inner = [name for name in self.candidates if inside(fqn, name) is not None]
            callers = {self.session.sites[name].parent_fqn for name in inner}
            if len(callers) < 2 or module not in self.session.arguments:
                continue
            own = self.session.offers(fqn)
            if isinstance(own, Fusable):
                found, stops = self._in_forward(fqn, module, own)
                chains += found
                stopped += [Stopped(fqn, stops)] if stops else []
        return chains, stopped

    # ---------------------------------------------------------------------------------------

    def _in_forward(
        self, fqn: str, module: nn.Module, own: Fusable
    ) -> tuple[list[Fusion], tuple[Stop, ...]]:
        blocks: dict[str, Fusable] = {}
        refused: dict[str, str] = {}
        self._collect(fqn, "", own.graph, blocks, refused)
        if not blocks and not refused:
            return [], ()
        while True:
            flat = own.flat(blocks, self._names(fqn, own, blocks))
            allowed = self._allowed(fqn, flat)
            runs = [run for run in flat.links.runs(allowed) if not _in_one(run.linears, blocks)]
            held = {block: why for run in runs for block, why in self._held(fqn, flat, run)}
            if not held:
                break
            refused |= held
            for block in held:
                blocks = {p: b for p, b in blocks.items() if p != block and not _in(p, block)}
        stops = [
            Stop(_join(fqn, s.before), _join(fqn, s.after), s.reason)
            for s in stops_of(flat.links, allowed, refused)
            if not _in_one((s.before, s.after), blocks)
            and not (s.before in allowed and s.after in allowed and _same_caller(s, flat))
        ]
        chains: list[Fusion] = [
            self._chain(fqn, module, flat, tuple(allowed[name] for name in run.linears), run)
            for run in runs
        ]
        found = [c for c in chains if one_pass(c.members) and all_different(c.members)]
        long = [c for c in found if c.blocks]
        return (found if long and is_sequential(module) else [*long]), tuple(stops)

    def _collect(
        self,
        fqn: str,
        path: str,
        graph: Graph,
        blocks: dict[str, Fusable],
        refused: dict[str, str],
    ) -> None:
        """The modules called in ``graph``, the forward of the one at ``path``, that hold
        candidates; those that may be part of the forward of ``fqn``, and why not the others that
        look like a part of a chain."""
        called = [str(n.target) for n in graph.nodes if n.op == "call_module"]
        for node in graph.nodes:
            name = _join(path, str(node.target))
            whole = _join(fqn, name)
            if node.op != "call_module" or not any(_in(c, whole) for c in self.candidates):
                continue
            module = self.session.model.get_submodule(whole)
            made: Fusable | str = f"its block {whole!r} is called more than once"
            if called.count(str(node.target)) == 1:
                made = self._block(whole, module)
            if isinstance(made, str):
                if _only_linears(module):
                    refused[name] = made
            else:
                blocks[name] = made
                self._collect(fqn, name, made.graph, blocks, refused)

    def _block(self, fqn: str, module: nn.Module) -> Fusable | str:
        """The trace of a block, or why the chain does not go through it."""
        refusal = refuse_module(module)
        if refusal is not None:
            return f"its block {fqn!r}: {refusal.reason.rstrip('.')}"
        if type(module).__call__ is not nn.Module.__call__:
            return f"its block {fqn!r} has a __call__ of its own"
        observed = self.session.arguments.get(module)
        if observed is None or observed.arguments() != ((TENSOR,), {}):
            return f"its block {fqn!r} is given more than one tensor, or it by name"
        offered = self.session.offers(fqn)
        if isinstance(offered, Refusal):
            return f"its block {fqn!r}: {offered.reason.rstrip('.')}"
        if returned(offered.graph) is None:
            return f"its block {fqn!r} returns more than one tensor"
        return offered

    def _names(self, fqn: str, own: Fusable, blocks: Mapping[str, Fusable]) -> dict[str, str]:
        """Activation modules called there: name inside the parent → activation name."""
        known = activations_of(self.session.sites.values())
        found = {name: a for f, a in known.items() if (name := inside(fqn, f)) is not None}
        for path, graph in (("", own.graph), *((p, b.graph) for p, b in blocks.items())):
            for node in graph.nodes:
                name = _join(path, str(node.target))
                if node.op == "call_module" and name not in found:
                    module = self.session.model.get_submodule(_join(fqn, name))
                    if id(module) not in self._activations:
                        self._activations[id(module)] = activation_of_module(module)
                    activation = self._activations[id(module)]
                    found |= {} if activation is None else {name: activation}
        return found

    def _allowed(self, fqn: str, flat: Fusable) -> dict[str, Candidate]:
        """The candidates that this forward, or that of a block in it, calls itself."""
        found = {}
        for name in flat.links.linears:
            whole = _join(fqn, name)
            if whole in self.candidates:
                around = _join(fqn, _caller(name, flat))
                if self.session.sites[whole].parent_fqn == around:
                    found[name] = self.candidates[whole]
        return found

    def _held(self, fqn: str, flat: Fusable, run: Run) -> Iterator[tuple[str, str]]:
        """Blocks of a chain that something else is rewritten in, and what."""
        names = {_join(fqn, name) for name in run.linears}
        for path in flat.around(run.linears):
            block = _join(fqn, path)
            for other in self.shorter:
                if other.fqn == block and not names.issuperset(other.names):
                    yield path, f"another chain of its block {block!r} is one call by itself"
            for c in self.candidates.values():
                if c.fqn in names:
                    continue
                if c.parent_fqn == block and c.pairs is not None:
                    yield path, f"another linear of its block {block!r} is rewritten in it"

    def _chain(
        self,
        fqn: str,
        module: nn.Module,
        flat: Fusable,
        members: tuple[Candidate, ...],
        run: Run,
    ) -> Fusion:
        blocks = tuple(_join(fqn, path) for path in flat.around(run.linears))
        return in_forward(fqn, module, members, run, flat, self.session.backends.get(NAME), blocks)


def replaced(shorter: list[Fusion], chains: list[Fusion]) -> list[Fusion]:
    """The chains of single modules without those of Sequentials whose forward is one trace for
    all that is fused in it."""
    traced = {c.fqn for c in chains}
    return [c for c in shorter if not (c.fqn in traced and is_sequential(c.module))]


def _only_linears(module: nn.Module) -> bool:
    """Whether nothing in it has parameters or buffers but linears."""
    own = (m for m in module.modules() if linear_kind(m) is None)
    return not any(
        t is not None for m in own for t in (*m._parameters.values(), *m._buffers.values())
    )


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _in(name: str, path: str) -> bool:
    return name.startswith(f"{path}.")


def _in_one(names: tuple[str, ...], blocks: Mapping[str, Fusable]) -> bool:
    """Whether one block holds all of these: it is looked at itself."""
    return any(all(_in(name, path) for name in names) for path in blocks)


def _caller(name: str, flat: Fusable) -> str:
    """The block whose own code calls the linear of this name, or ``""``."""
    for path, block in flat.blocks.items():
        if _in(name, path) and name[len(path) + 1 :] in block.called:
            return path
    return ""


def _same_caller(stop: Stop, flat: Fusable) -> bool:
    return _caller(stop.before, flat) == _caller(stop.after, flat)
