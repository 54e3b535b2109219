"""The rule of parallel MLPs: Sequentials of linears side by side that may become one call a layer.

It only matches; nothing here changes a model or measures anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import widened
from fastlinear.families.grouped.problem import NAME
from fastlinear.families.grouped.unequal.op import explain
from fastlinear.profile.effects import class_forward
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import Candidate, all_different, one_pass
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.rules.grouped.parallel_mlps.forward import LISTS, STACKED, Way
from fastlinear.rewrite.rules.grouped.parallel_mlps.fuse import fused_parallel_mlps
from fastlinear.rewrite.rules.grouped.parallel_mlps.traced import (
    ParallelGroup,
    ParallelMLP,
    ParallelMLPs,
    is_parallel_mlp,
    parallel_mlp_of,
)
from fastlinear.rewrite.session import Session
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS

_LISTS = (nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True, eq=False)
class FoundGroup:
    """Parallel MLPs that stand side by side in one module.

    Attributes:
        fqn: the module.
        parallel_mlps: by their names inside it; empty where they are no parallel MLPs.
        names: of the Sequentials in the model.
        made: the chain they may become, or why they may not.
        unsure: whether nothing is known of what they read.
        way: how a layer of all of them is one call, where it may be one.
    """

    fqn: str
    parallel_mlps: tuple[ParallelMLP, ...]
    names: tuple[str, ...]
    made: Fusion | str
    unsure: bool = False
    way: Way | None = None

    @property
    def linears(self) -> tuple[str, ...]:
        """The parallel MLPs' linears, or where they are none of linears the Sequentials."""
        if not self.parallel_mlps:
            return self.names
        return tuple(_full(self.fqn, n) for mlp in self.parallel_mlps for n in mlp.linears)


def suspects(model: nn.Module) -> dict[str, list[str]]:
    """Module → the outermost Sequentials of linears in it, where it holds two or more."""
    found: dict[str, list[str]] = {}
    taken: set[str] = set()
    for fqn, module in model.named_modules():
        if not fqn or not is_parallel_mlp(module) or any(fqn.startswith(f"{t}.") for t in taken):
            continue
        holder = fqn.rpartition(".")[0]
        while holder and type(model.get_submodule(holder)) in _LISTS:
            holder = holder.rpartition(".")[0]
        taken.add(fqn)
        if class_forward(model.get_submodule(holder)) is not nn.Sequential.forward:
            found.setdefault(holder, []).append(fqn)
    return {fqn: names for fqn, names in found.items() if len(names) > 1}


def firsts(model: nn.Module) -> set[str]:
    """The first linear of every Sequential that may be a parallel MLP."""
    return {
        f"{name}.{next(n for n, m in model.get_submodule(name).named_modules() if _plain(m))}"
        for names in suspects(model).values()
        for name in names
    }


def _plain(module: nn.Module) -> bool:
    return type(module) in PLAIN_LINEARS


def parts_of(model: nn.Module, fqn: str) -> int | None:
    """How many parallel MLPs of one size a module holds: what a loop over their inputs finds."""
    alike = _alike(model, fqn, suspects(model).get(fqn, []))
    return max((len(parallel_mlps) for parallel_mlps in alike), default=None)


def _alike(model: nn.Module, fqn: str, names: Iterable[str]) -> list[list[ParallelMLP]]:
    """Parallel MLPs (names inside ``fqn``) with the same layers, two or more."""
    found: dict[object, list[ParallelMLP]] = {}
    for name in names:
        mlp = parallel_mlp_of(inside(fqn, name) or "", model.get_submodule(name), {})
        if isinstance(mlp, ParallelMLP):
            found.setdefault((mlp.activations, mlp.sizes), []).append(mlp)
    return [parallel_mlps for parallel_mlps in found.values() if len(parallel_mlps) > 1]


def found_groups(session: Session, fqn: str, names: Sequence[str]) -> list[FoundGroup]:
    """The parallel MLPs of one module, which holds Sequentials of these names: what they may
    become, or why they are left alone."""
    model, traced = session.model, session.offers(fqn)
    if isinstance(traced, Refusal):
        why = traced.reason.rstrip(".")
        alike = _alike(model, fqn, names)
        return [FoundGroup(fqn, tuple(t), _in(fqn, t), why, unsure=True) for t in alike]
    parallel_mlps = traced.links.once(ParallelMLPs)
    found = []
    for group in parallel_mlps.found:
        names = _in(fqn, group.parallel_mlps)
        made = _chain(session, fqn, group, traced)
        if isinstance(made, str):
            found.append(FoundGroup(fqn, group.parallel_mlps, names, made))
        else:
            found.append(FoundGroup(fqn, group.parallel_mlps, names, made[0], way=made[1]))
    for why, same in _by_reason(parallel_mlps.left).items():
        known = [
            parallel_mlp_of(name, model.get_submodule(fqn).get_submodule(name), {}) for name in same
        ]
        plain = [mlp for mlp in known if isinstance(mlp, ParallelMLP)]
        if len(plain) < len(same):
            found.append(FoundGroup(fqn, (), tuple(_full(fqn, name) for name in same), why))
        else:
            found.append(FoundGroup(fqn, tuple(plain), _in(fqn, plain), why))
    return found


def _by_reason(left: Mapping[str, str]) -> dict[str, list[str]]:
    """Parallel MLPs with one reason, two or more; where modules are named, those whose names
    agree."""
    found: dict[str, list[str]] = {}
    for name, why in left.items():
        found.setdefault(why.replace(f"'{name}.", "'"), []).append(name)
    return {why: names for why, names in found.items() if len(names) > 1}


def _full(fqn: str, name: str) -> str:
    return f"{fqn}.{name}" if fqn else name


def _in(fqn: str, parallel_mlps: Iterable[ParallelMLP]) -> tuple[str, ...]:
    return tuple(_full(fqn, mlp.name) for mlp in parallel_mlps)


def _chain(
    session: Session, fqn: str, group: ParallelGroup, traced: Fusable
) -> tuple[Fusion, Way] | str:
    """One call a layer and how, or why they are left alone."""
    full = [_full(fqn, name) for name in group.names]
    for name in full:
        if (why := session.why_not(name, name.rpartition(".")[0])) is not None:
            return why
    backend, members = session.backends.get(NAME), tuple(session.candidates[n] for n in full)
    if not (one_pass(members) and all_different(members)):
        return "its parallel MLPs are called with inputs of different shapes, or share a linear"
    way = _way(group, members, backend)
    if isinstance(way, str):
        return way
    return fused_parallel_mlps(fqn, traced.parent, members, group, way, traced, backend), way


def _way(group: ParallelGroup, members: Sequence[Candidate], backend: str | None) -> Way | str:
    """How a layer of all of them is one call, or why it is none."""
    first = members[0].calls
    name = None if first.autocast is None else widened(group.activations)
    if name is not None:
        return f"under autocast what {name} is cast to depends on the operations it is written in"
    modules = [c.module for c in members]
    depth = len(group.activations)
    firsts = [c.calls.kinds[0].x for c in members[::depth]]
    if len({(x.dtype, x.device) for x in firsts} | {_kind(m) for m in modules}) > 1 and (
        first.autocast is None
    ):
        return "its linears or their inputs differ in dtype or device"
    if backend is None and _together(firsts, modules, depth, first.autocast, first.grad):
        return Way(group.activations, LISTS)
    if not group.equal or len({x.shape for x in firsts}) > 1:
        return "linears of different sizes would be computed one by one here"
    biases = [[m.bias is None for m in modules[i::depth]] for i in range(depth)]
    if any(len(set(layer)) > 1 for layer in biases):
        return "some of its linears have a bias, others none"
    return Way(group.activations, STACKED, backend)


def _kind(module: nn.Module) -> tuple[torch.dtype, torch.device]:
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight.dtype, weight.device


def _together(
    xs: Sequence[Tensor],
    modules: Sequence[nn.Module],
    depth: int,
    autocast: torch.dtype | None,
    grad: bool,
) -> bool:
    """Whether ``unequal_linear`` computes every layer together."""
    dtype = autocast or xs[0].dtype
    hidden = [x.detach().to(dtype) for x in xs]
    for i in range(depth):
        layers = modules[i::depth]
        weights = [m.weight.detach().to(dtype) for m in layers]  # type: ignore[union-attr,operator]
        if explain(hidden, weights, needs_grad=grad).choices[0].backend.name != "together":
            return False
        hidden = [
            h.new_empty((*h.shape[:-1], len(w))) for h, w in zip(hidden, weights, strict=True)
        ]
    return True
