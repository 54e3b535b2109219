"""What a forward's own code reaches by the names in it: functions, modules, attributes, globals.

The code is not run. A name counts for every module that it may be said of, so more may be found
than is read, never less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fastlinear.core.global_names import global_names, names_of

MISSING = object()
"""Stands for an attribute that is not there."""
Path = tuple[str, ...]
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(frozen=True)
class Reached:
    """What running a forward's own code may read, but for tensors.

    Attributes:
        functions: the forward, methods, functions that modules hold, and helpers.
        names: every name in their code.
        modules: path from the parent, ``()`` itself → modules that the code may name.
    """

    functions: tuple[FunctionType, ...]
    names: tuple[str, ...]
    modules: Mapping[Path, nn.Module]

    def outside(self) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
        """Globals that the code names, and what it may name of modules and classes among them:
        (where, name, value)."""
        seen: set[int] = set()
        for function in self.functions:
            for name in global_names(function.__code__):
                value = function.__globals__.get(name, MISSING)
                yield function.__globals__, name, value
                yield from _inside(value, self.names, seen)

    def of_classes(self) -> Iterator[tuple[Path, str, Any]]:
        """What the modules' classes hold of these names: (path, name, value)."""
        for path, module in self.modules.items():
            for name in self.names:
                if name not in vars(module) and _is_own_name(module, name, path):
                    yield path, name, getattr(type(module), name)

    def of_bases(self) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
        """What the parent's classes hold of these names, for code that reads it by ``super``."""
        if "super" in self.names:
            for name in self.names:
                for kind, value in definitions(self.modules[()], name):
                    yield vars(kind), name, value


def reached(parent: nn.Module, forward: FunctionType) -> Reached:
    """What ``forward``, of the parent's class, reaches."""
    functions: list[FunctionType] = []
    names: dict[str, None] = {}
    modules: dict[Path, nn.Module] = {(): parent}
    waiting = [forward]
    while waiting:
        for function in waiting:
            if function not in functions:
                functions.append(function)
                names.update(dict.fromkeys(names_of(function.__code__)))
        modules = dict(_modules(parent, names))
        found = (f for m in modules.items() for f in _functions(*m, names))
        helpers = (f for function in functions for f in _helpers(function, names))
        waiting = [f for f in (*found, *helpers) if f not in functions]
    return Reached(tuple(functions), tuple(names), modules)


def definitions(module: nn.Module, name: str) -> Iterator[tuple[type, Any]]:
    """What the classes of a module define under a name, the most derived first, torch's apart."""
    for kind in type(module).__mro__:
        if name in vars(kind) and not is_torchs(kind):
            yield kind, vars(kind)[name]


def is_torchs(value: Any) -> bool:
    """Whether a module, class or function is PyTorch's own."""
    home = value.__name__ if isinstance(value, ModuleType) else value.__module__
    return str(home).split(".")[0] == "torch"


def function_in(value: Any) -> FunctionType | None:
    """The Python function that a method, property or function is, not one of PyTorch's."""
    if isinstance(value, property):
        value = value.fget
    elif isinstance(value, staticmethod | classmethod | MethodType):
        value = value.__func__
    return value if isinstance(value, FunctionType) and not is_torchs(value) else None


def _modules(
    module: nn.Module, names: Collection[str], path: Path = ()
) -> Iterator[tuple[Path, nn.Module]]:
    yield path, module
    every = isinstance(module, _CONTAINERS) and bool(path)
    for name, child in module._modules.items():
        if child is not None and (every or name in names):
            yield from _modules(child, names, (*path, name))


def _functions(path: Path, module: nn.Module, names: Collection[str]) -> Iterator[FunctionType]:
    for name in names:
        if name in vars(module):
            values: Iterable[Any] = (vars(module)[name],)
        elif _is_own_name(module, name, path) or (name == "forward" and "super" in names):
            values = (value for _, value in definitions(module, name))
        else:
            continue
        yield from (f for f in map(function_in, values) if f is not None)


def _is_own_name(module: nn.Module, name: str, path: Path) -> bool:
    """Whether its class gives that name a meaning of its own; what a tensor has as well is taken
    for the tensor's where a child is concerned."""
    if hasattr(nn.Module, name) or (path and hasattr(Tensor, name)):
        return False
    return next(definitions(module, name), None) is not None


def _helpers(function: FunctionType, names: Collection[str]) -> Iterator[FunctionType]:
    values = [function.__globals__.get(name) for name in global_names(function.__code__)]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            values += [] if name == "__class__" else [cell.cell_contents]
        except ValueError:  # not assigned yet
            continue
    for value in values:
        inside = (v for _, _, v in _inside(value, names, set()))
        yield from (f for f in map(function_in, (value, *inside)) if f is not None)


def _inside(
    value: Any, names: Collection[str], seen: set[int]
) -> Iterator[tuple[Mapping[str, Any], str, Any]]:
    """What a module or class holds of these names, and what modules and classes there do."""
    if not isinstance(value, ModuleType | type) or id(value) in seen:
        return
    seen.add(id(value))
    scope = vars(value)
    for name in names:
        if name in scope and not name.startswith("__"):
            yield scope, name, scope[name]
            yield from _inside(scope[name], names, seen)
