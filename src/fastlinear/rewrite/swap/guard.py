"""A traced forward that runs only while everything the trace has frozen is as it was.

A trace keeps every value that is no tensor as it was: arguments, attributes of the parent, of the
modules inside it and of their classes, functions, and globals. Simple ones are watched: the guarded
forward compares them at every call and runs the class's own forward when one has changed. A forward
that depends on anything else is refused before (see ``rewrite.traceable``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from fastlinear.profile.graph import TENSOR, Observed
from fastlinear.profile.reached import MISSING, Path, function_in, reached
from fastlinear.rewrite.swap.forwards import (
    Forward,
    is_hooked,
    iterates_plainly,
    overridden,
)
from fastlinear.rewrite.swap.traceable import SEQUENCES, as_it_is, same, watchable

_Facts = tuple[tuple[str, Any], ...]


class Unlike(Exception):
    """What a trace holds for is found not to be so; nothing outside of it was written."""


def exactly(parts: Any, count: int) -> tuple[Any, ...]:
    """The parts of a tensor, or of a sequence, of which there are ``count``; raises Unlike where
    there are more or fewer."""
    if not isinstance(parts, Tensor | list | tuple) or len(parts) != count:
        raise Unlike
    return tuple(parts)


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
        if overridden():
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

    path: Path
    kind: type
    forward: Any
    settings: _Facts
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

    path: Path
    kind: type
    forward: Any
    watched: _Watched

    @staticmethod
    def of(parent: nn.Module, path: str) -> _Block:
        module = parent.get_submodule(path)
        kind: Any = type(module)
        watched = _watched(module, kind.forward)
        return _Block(tuple(path.split(".")), kind, kind.forward, watched)

    def unchanged(self, parent: nn.Module) -> bool:
        module = _found(parent, self.path, self.kind)
        if module is None or self.kind.forward is not self.forward:  # type: ignore[attr-defined]
            return False
        return self.watched.holds(module)


def _found(parent: nn.Module, path: Path, kind: type) -> nn.Module | None:
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

    Attributes:
        modules: of the parent, path ``()``, and of modules inside it: their attributes, what their
            classes hold, and members (name, which of their tables, as ``_member`` says).
        outside: dictionaries of modules and classes the code reads, never of instances.
        children: the names of the modules that a Sequential calls, None of any other.
    """

    modules: tuple[tuple[Path, _Facts, _Facts, tuple[tuple[str, str, Any], ...]], ...]
    outside: tuple[tuple[Mapping[str, Any], str, Any], ...]
    children: tuple[str, ...] | None

    def holds(self, module: nn.Module) -> bool:
        """Whether all of it is as it was."""
        if self.children is not None and not (
            tuple(module.__dict__["_modules"]) == self.children and iterates_plainly(module)
        ):
            return False
        for path, attributes, of_class, members in self.modules:
            found: Any = module
            for step in path:
                found = found.__dict__["_modules"].get(step)
                if found is None:
                    return False
            own = found.__dict__
            for name, value in attributes:
                if not same(own.get(name, MISSING), value):
                    return False
            for name, value in of_class:
                if name in own or not same(getattr(type(found), name, MISSING), value):
                    return False
            for name, table, value in members:
                if _member(own[table].get(name)) != value:
                    return False
        return all(same(scope.get(n, MISSING), value) for scope, n, value in self.outside)


def _watched(parent: nn.Module, forward: FunctionType) -> _Watched:
    code = reached(parent, forward)
    modules = []
    for path, module in code.modules.items():
        read = code.names if path else (*code.names, "training")
        own = vars(module)
        attributes = tuple((n, as_it_is(v)) for n, v in own.items() if n in read and watchable(v))
        of_class = tuple(
            (n, as_it_is(v))
            for at, n, v in code.of_classes()
            if at == path and (watchable(v) or function_in(v) is not None)
        )
        members = tuple(
            (n, table, _member(value))
            for table in ("_modules", "_parameters", "_buffers")
            for n, value in own[table].items()
            if n in read
        )
        if attributes or of_class or members:
            modules.append((path, attributes, of_class, members))
    outside = [
        (scope, n, as_it_is(v))
        for scope, n, v in (*code.outside(), *code.of_bases())
        if (watchable(v) or function_in(v) is not None) and not n.startswith("__")
    ]
    children = tuple(parent._modules) if forward is nn.Sequential.forward else None
    return _Watched(tuple(modules), tuple(outside), children)


def _member(value: Any) -> Any:
    """None when absent, the names or the number of what a container holds, else its kind."""
    if isinstance(value, nn.ModuleList | nn.ModuleDict):
        return tuple(value._modules)
    if isinstance(value, nn.ParameterDict):
        return tuple(value.keys())
    if isinstance(value, nn.ParameterList):
        return len(value)
    return value is not None
