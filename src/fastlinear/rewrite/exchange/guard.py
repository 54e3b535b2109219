"""A traced forward that runs only while everything the trace has frozen is as it was.

A trace keeps every value that is no tensor as it was: arguments, attributes of the parent, of its
children and of its class, and globals. Simple ones are watched: the guarded forward compares them
at every call and runs the class's own forward when one has changed. A forward that depends on
anything else is refused before (see ``rewrite.traceable``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn

from fastlinear.core.global_names import global_names, names_of
from fastlinear.profile.effects import functions_of
from fastlinear.profile.graph import TENSOR, Observed
from fastlinear.rewrite.exchange.forwards import (
    LINEAR_FORWARD,
    Forward,
    hooked_globally,
    is_hooked,
)
from fastlinear.rewrite.exchange.traceable import (
    MISSING,
    SEQUENCES,
    as_it_is,
    is_function,
    same,
    watchable,
)


class Unlike(Exception):
    """What a trace holds for is found not to be so; nothing outside of it was written."""


def guarded(
    parent: nn.Module,
    traced: Callable[..., Any],
    observed: Observed,
    passed_over: tuple[str, ...],
    counts: bool = False,
    blocks: tuple[str, ...] = (),
) -> Forward:
    """A forward that runs ``traced`` while all it depends on is as observed, else the class's own.

    Args:
        parent: the traced module; the result holds no reference to it.
        traced: (parent, tensors in order) → what the forward returns.
        observed: the arguments the trace holds for.
        passed_over: activations, sleeping dropouts and Sequentials inside the parent that
            ``traced`` does not call. It is used only while they are of the same class, without
            hooks, set as now and with children of the same names.
        counts: whether ``traced`` may raise ``Unlike``.
        blocks: modules inside the parent whose own code is part of ``traced``. It is used only
            while all their code depends on is as it is now as well.

    While a hook of every module's call is registered, the class's own forward runs: ``traced``
    makes fewer calls.
    """
    args, kwargs = observed.arguments()
    kinds = (*args, *kwargs.values())
    tensors = tuple(i for i, k in enumerate(kinds) if k is TENSOR)
    rows = tuple((i, type(k), len(k)) for i, k in enumerate(kinds) if type(k) in SEQUENCES)
    fixed = tuple(
        (i, k) for i, k in enumerate(kinds) if k is not TENSOR and type(k) not in SEQUENCES
    )
    lists = frozenset(i for i, _, _ in rows)
    taken = sorted((*tensors, *lists))
    names, count = tuple(kwargs), len(args)
    original: Any = type(parent).forward
    watched = _watched(parent, original)
    inside = tuple(_Block.of(parent, path) for path in blocks)
    parts: list[_Block | _PassedOver] = [
        *inside,
        *(_PassedOver.of(parent, path) for path in passed_over),
    ]

    def fits(self: nn.Module, values: tuple[Any, ...]) -> bool:
        for i in tensors:
            if not isinstance(values[i], Tensor):
                return False
        for i, kind, length in rows:
            held = values[i]
            if type(held) is not kind or len(held) != length:
                return False
            if not all(isinstance(t, Tensor) for t in held):
                return False
        for i, kind in fixed:
            if not same(values[i], kind):
                return False
        if nn.Linear.forward is not LINEAR_FORWARD or hooked_globally():
            return False
        if not watched.holds(self):
            return False
        return all(part.unchanged(self) for part in parts)

    def given(values: tuple[Any, ...]) -> list[Tensor]:
        if not rows:
            return [values[i] for i in tensors]
        return [t for i in taken for t in (values[i] if i in lists else (values[i],))]

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if type(self).forward is not original:
            return type(self).forward(self, *args, **kwargs)
        if len(args) == count and tuple(kwargs) == names:
            values = (*args, *kwargs.values()) if kwargs else args
            if fits(self, values):
                if not counts:
                    return traced(self, *given(values))
                try:
                    return traced(self, *given(values))
                except Unlike:
                    pass
        return original(self, *args, **kwargs)

    return forward


@dataclass(frozen=True)
class _PassedOver:
    """A module that is not called any more, as it was when that was decided."""

    path: tuple[str, ...]
    kind: type
    forward: Any
    settings: tuple[tuple[str, Any], ...]
    children: tuple[str, ...]

    @staticmethod
    def of(parent: nn.Module, path: str) -> _PassedOver:
        module = parent.get_submodule(path)
        simple = ((n, as_it_is(v)) for n, v in vars(module).items() if watchable(v))
        mode_counts = isinstance(module, nn.Dropout)
        settings = tuple(
            (n, v) for n, v in simple if n[0] != "_" and (n != "training" or mode_counts)
        )
        children = tuple(module._modules)
        kind = type(module)
        return _PassedOver(tuple(path.split(".")), kind, kind.forward, settings, children)

    def unchanged(self, parent: nn.Module) -> bool:
        module = _found(parent, self.path, self.kind)
        if module is None or self.kind.forward is not self.forward:  # type: ignore[attr-defined]
            return False
        own = module.__dict__
        if tuple(own["_modules"]) != self.children:
            return False
        return all(same(own.get(n, MISSING), v) for n, v in self.settings)


@dataclass(frozen=True)
class _Block:
    """A module whose code is part of a trace, as it was when that was made."""

    path: tuple[str, ...]
    kind: type
    watched: _Watched

    @staticmethod
    def of(parent: nn.Module, path: str) -> _Block:
        module = parent.get_submodule(path)
        watched = _watched(module, type(module).forward)  # type: ignore[arg-type]
        return _Block(tuple(path.split(".")), type(module), watched)

    def unchanged(self, parent: nn.Module) -> bool:
        module = _found(parent, self.path, self.kind)
        return module is not None and self.watched.holds(module)


def _found(parent: nn.Module, path: tuple[str, ...], kind: type) -> nn.Module | None:
    """The module at ``path`` if it is of this class, without hooks and with its class's forward."""
    module: nn.Module | None = parent
    for name in path:
        module = module.__dict__["_modules"].get(name)
        if module is None:
            return None
    if type(module) is kind and not is_hooked(module.__dict__):
        return module
    return None


@dataclass(frozen=True)
class _Watched:
    """What a traced forward depends on besides its arguments, with the values seen then.

    ``outside`` holds dictionaries of modules and classes the code reads, never of instances;
    ``children`` the names of the modules that a Sequential calls, None of any other.
    """

    attributes: tuple[tuple[str, Any], ...]
    of_class: tuple[tuple[str, Any], ...]
    members: tuple[tuple[str, str, int], ...]
    of_children: tuple[tuple[tuple[str, ...], str, Any], ...]
    outside: tuple[tuple[Mapping[str, Any], str, Any], ...]
    children: tuple[str, ...] | None

    def holds(self, module: nn.Module) -> bool:
        """Whether all of it is as it was."""
        attributes = module.__dict__
        if self.children is not None and tuple(attributes["_modules"]) != self.children:
            return False
        for name, value in self.attributes:
            if not same(attributes.get(name, MISSING), value):
                return False
        for name, value in self.of_class:
            if name in attributes or not same(getattr(module, name, MISSING), value):
                return False
        for name, table, value in self.members:
            if _member(attributes[table].get(name)) != value:
                return False
        for path, name, value in self.of_children:
            found: Any = module
            for step in path:
                found = found.__dict__["_modules"].get(step)
                if found is None:
                    return False
            if not same(found.__dict__.get(name, MISSING), value):
                return False
        return all(same(scope.get(n, MISSING), value) for scope, n, value in self.outside)


def _watched(parent: nn.Module, forward: FunctionType) -> _Watched:
    functions = functions_of(parent, forward)
    named = {n for f in functions for n in names_of(f.__code__)}
    read = named | {"training"}
    own = vars(parent)
    attributes = tuple((n, as_it_is(v)) for n, v in own.items() if n in read and watchable(v))
    of_class = tuple(
        (n, as_it_is(v))
        for n in sorted(named - set(own))
        if not hasattr(nn.Module, n)
        and watchable(v := inspect.getattr_static(type(parent), n, MISSING))
        and not is_function(v)
    )
    members = tuple(
        (n, table, _member(value))
        for table in ("_modules", "_parameters", "_buffers")
        for n, value in own[table].items()
        if n in read
    )
    of_children = tuple(
        (path, n, as_it_is(v))
        for path, module in _read(own["_modules"], read)
        for n, v in vars(module).items()
        if n in named and watchable(v)
    )
    outside = []
    for function in functions:
        scope = function.__globals__
        for name in global_names(function.__code__):
            value = scope.get(name, MISSING)
            if watchable(value) and not name.startswith("__"):
                outside.append((scope, name, as_it_is(value)))
            elif isinstance(value, ModuleType | type):
                inside = vars(value)
                names = (n for n in names_of(function.__code__) if n in inside)
                seen = ((n, inside[n]) for n in names)
                outside += [(inside, n, as_it_is(v)) for n, v in seen if watchable(v)]
    children = tuple(own["_modules"]) if forward is nn.Sequential.forward else None
    return _Watched(attributes, of_class, members, of_children, tuple(outside), children)


def _read(
    children: Mapping[str, nn.Module | None], names: Container[str]
) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    """The children of these names, with the members of those that are lists."""
    for name, child in children.items():
        if name not in names or child is None:
            continue
        yield (name,), child
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            for key, member in child._modules.items():
                if member is not None:
                    yield (name, key), member


def _member(value: Any) -> int:
    """-2 when absent, the length of a container, -1 for any other module or tensor."""
    if value is None:
        return -2
    return len(value) if isinstance(value, _CONTAINERS) else -1


_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
