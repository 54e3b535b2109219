"""One more run of the model: where the inputs of its linears lie, and what modules that may be a
grouped layer are given."""

from __future__ import annotations

from collections.abc import Container, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlinear.core.tensor_kinds import is_odd
from fastlinear.profile.observe import own_copy
from fastlinear.profile.step import is_compiled
from fastlinear.rewrite.match.calls import Kind, SiteCalls
from fastlinear.rewrite.rules.grouped.lists.find import lists_of
from fastlinear.rewrite.rules.grouped.modules import recognise as modules
from fastlinear.rewrite.rules.grouped.modules.recognise import Whole
from fastlinear.rewrite.rules.grouped.parallel_mlps import find as parallel_mlps
from fastlinear.rewrite.rules.grouped.products import Product, Products
from fastlinear.rewrite.rules.grouped.rows import observed as rule
from fastlinear.rewrite.rules.grouped.rows.observed import LINEARS, Row, Seen
from fastlinear.rewrite.session import Session


@dataclass(frozen=True)
class Watched:
    """What one run shows.

    Attributes:
        rows: linears on parts of one tensor, or on one tensor.
        wholes: modules that are a grouped layer, each with its calls.
        linears: the model's plain linears.
        firsts: the first linear of each parallel MLP → its calls; their inputs were all kept
            meanwhile, so that no two lie in one place.
        products: products with a weight per group in modules that are no grouped layer.
    """

    rows: tuple[Row, ...] = ()
    wholes: tuple[tuple[Whole, SiteCalls], ...] = ()
    linears: dict[str, nn.Module] = field(default_factory=dict)
    firsts: dict[str, list[Seen]] = field(default_factory=dict)
    products: tuple[Product, ...] = ()


@dataclass
class _Given:
    """What one suspect was called with."""

    kinds: dict[Any, Kind] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    grad: bool = False
    plain: bool = True  # whether every call was one tensor by position

    def add(self, module: nn.Module, x: Tensor) -> None:
        device = x.device.type
        if torch.is_autocast_enabled(device):
            self.autocast = torch.get_autocast_dtype(device)
        wanted = x.requires_grad or any(p.requires_grad for p in module.parameters())
        self.grad |= torch.is_grad_enabled() and wanted
        key = tuple(x.shape), x.stride(), x.dtype
        known = self.kinds.get(key)
        grad = x.requires_grad or (known is not None and known.input_grad)
        if known is None:
            self.kinds[key] = Kind(own_copy(x), 1, grad)
        else:
            self.kinds[key] = Kind(known.x, known.count + 1, grad)

    @property
    def calls(self) -> SiteCalls:
        kinds = sorted(self.kinds.values(), key=lambda k: -k.count)
        return SiteCalls(tuple(kinds), self.autocast, self.grad)


def watched(session: Session) -> Watched:
    """What a run of the model shows, which is to be preserved by the caller; to be looked at once,
    by ``session.once``."""
    linears, suspects = rule.plain_linears(session.model), modules.suspects(session.model)
    cubes = any(p.dim() == 3 for p in session.model.parameters())
    if len(linears) < 2 and not suspects and not cubes:
        return Watched()
    return _watch(session, linears, suspects)


def parts(session: Session, fqn: str) -> int | None:
    """How many parts a loop in a module's forward finds: those of its input that linears read, or
    its parallel MLPs, or the linears of its longest list."""
    loops = (row for row in session.once(watched).rows if row.kind == LINEARS and row.fqn == fqn)
    found = next((len(row.members) for row in loops), None)
    lists = session.once(listed).get(fqn, ())
    return found or parallel_mlps.parts_of(session.model, fqn) or max(map(len, lists), default=None)


def listed(session: Session) -> dict[str, list[tuple[str, ...]]]:
    """The linears of lists, by the module whose forward calls them."""
    return lists_of(session.model, session.sites.values())


def _watch(
    session: Session, linears: dict[str, nn.Module], suspects: dict[str, nn.Module]
) -> Watched:
    """One run with hooks on the linears and the suspects."""
    lists = session.once(listed)
    some = parallel_mlps.firsts(session.model)
    some |= {n for names in lists.values() for group in names for n in group}
    firsts: dict[str, list[Seen]] = {name: [] for name in sorted(some) if name in linears}
    opaque = any(
        is_compiled(m) or isinstance(m, torch.jit.ScriptModule) for m in session.model.modules()
    )
    products = Products(session.model)
    with nullcontext() if opaque else products:
        calls, given = _run(session, linears, suspects, firsts, lists)
    wholes = []
    for fqn, seen in given.items():
        if not (seen.plain and seen.kinds):
            continue
        known = seen.calls
        match = modules.whole(fqn, suspects[fqn], known.kinds[0].x)
        if match is not None:
            wholes.append((match, known))
    inside = {name for match, _ in wholes for name in match.members}
    rows = [row for row in rule.rows(calls, linears) if not inside >= set(row.members)]
    for call in calls:
        if call.fqn in firsts:
            firsts[call.fqn].append(call)
    whole = {match.fqn for match, _ in wholes}
    others = [p for p in products.found.values() if p.fqn.rpartition(".")[0] not in whole]
    return Watched(tuple(rows), tuple(wholes), linears, firsts, tuple(others))


def _run(
    session: Session,
    linears: dict[str, nn.Module],
    suspects: dict[str, nn.Module],
    firsts: Container[str] = (),
    callers: Iterable[str] = (),
) -> tuple[list[Seen], dict[str, _Given]]:
    calls: list[Seen] = []
    given = {fqn: _Given() for fqn in suspects}
    open_: list[Tensor] = []  # keeps the last input's memory, and all its tensors, from new use
    kept: list[Tensor] = []  # and that of the parallel MLPs' inputs
    parents = {site.fqn: site.parent_fqn for site in session.sites.values()}
    handed: dict[str, set[tuple[int, int]]] = {}  # memory that the lists' callers are given

    def caller(fqn: str, _: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        found = (t for t in pytree.tree_leaves((args, kwargs)) if type(t) is Tensor)
        handed[fqn] = {_memory(t) for t in found if not is_odd(t)}

    def linear(fqn: str, module: Any, args: tuple[Any, ...]) -> None:
        if len(args) != 1 or type(args[0]) is not Tensor or args[0].dtype != module.weight.dtype:
            return
        x = args[0]
        if is_odd(x):
            return
        storage = x.untyped_storage().data_ptr()
        if open_ and open_[0].untyped_storage().data_ptr() != storage:
            open_.clear()
        open_.append(x)
        if fqn in firsts:
            kept.append(x)
        here, parent = _memory(x), parents.get(fqn)
        place = tuple(x.shape), tuple(x.stride()), int(x.storage_offset())
        given_it = here in handed.get(parent or "", ())
        calls.append(Seen(fqn, parent, here, *place, x.dtype, x.requires_grad, given_it, id(x)))

    def suspect(fqn: str, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        if kwargs or len(args) != 1 or type(args[0]) is not Tensor:
            given[fqn].plain = False
        elif args[0].is_floating_point() and not is_odd(args[0]):
            given[fqn].add(module, args[0])
        else:
            given[fqn].plain = False

    handles = [
        session.model.get_submodule(fqn).register_forward_pre_hook(
            partial(caller, fqn), with_kwargs=True
        )
        for fqn in callers
    ]
    handles += [m.register_forward_pre_hook(partial(linear, fqn)) for fqn, m in linears.items()]
    handles += [
        m.register_forward_pre_hook(partial(suspect, fqn), with_kwargs=True)
        for fqn, m in suspects.items()
    ]
    try:
        session.step("in the run that shows what its layers are given")
    finally:
        for handle in handles:
            handle.remove()
    return calls, given


def _memory(x: Tensor) -> tuple[int, int]:
    """The memory of a tensor, and how often it had been written."""
    return x.untyped_storage().data_ptr(), 0 if x.is_inference() else x._version
