"""Which attributes, globals and closure variables the code of a callable reads, by name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Hashable, Iterator
from enum import Enum
from numbers import Number
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from fastlinear.core.global_names import global_names

_DEPTH = 6  # calls into functions and methods that are followed
_OURS = frozenset({"torch", "fastlinear"})  # constants of theirs are not the caller's
_CONSTANTS = (
    *(type(None), bool, int, str, bytes, type(...)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType, functools.partial, type)
_ALWAYS = ("forward", "training")


def fact(value: Any) -> Hashable:
    """What stands for a value: equal for equal constants and for the same function, None for
    anything else."""
    kind = type(value)
    if kind in _CONSTANTS:
        return kind, value
    if isinstance(value, Number | str | bytes | Enum):
        return kind, repr(value)  # 0.0 == -0.0 and nan != nan: their text tells them apart
    if isinstance(value, _FUNCTIONS):
        return value  # functions are equal to themselves alone, methods to those of the same object
    if isinstance(value, tuple):
        parts = tuple(map(fact, value))
        return None if None in parts else (kind, parts)
    return None


class Reads:
    """Collects what functions read, and the functions and methods they name.

    Attributes:
        names: attributes that are mentioned, of whatever object.
        globals: (namespace, name) of numbers, texts and functions.
        cells: closure variables that hold such.
    """

    def __init__(self) -> None:
        self.names: set[str] = set(_ALWAYS)
        self.globals: list[tuple[dict[str, Any], str]] = []
        self.cells: list[CellType] = []
        self._seen: set[Any] = set()

    def module(self, kind: type) -> None:
        """The forward of a class of modules, or how objects of another class are called."""
        if kind in self._seen:
            return
        self._seen.add(kind)
        for name in ("forward", "__call__"):
            for found in _members(kind, name):
                self.function(found, kind)

    def function(self, function: Any, owner: type | None = None, depth: int = _DEPTH) -> None:
        """A function; ``owner``: the class whose methods it may call."""
        if isinstance(function, MethodType):
            function, owner = function.__func__, type(function.__self__)
        if not isinstance(function, FunctionType) or (function, owner) in self._seen or depth < 0:
            return
        self._seen.add((function, owner))
        mentioned = mentions(function.__code__)
        self.names.update(mentioned)
        if owner is not None:
            for name in mentioned:
                for member in _members(owner, name):
                    if isinstance(member, property):
                        member = member.fget
                    elif isinstance(member, staticmethod | classmethod):
                        member = member.__func__
                    self.function(member, owner, depth - 1)
        self.function(getattr(function, "__wrapped__", None), owner, depth - 1)
        space = function.__globals__
        package = str(space.get("__name__", "")).partition(".")[0]
        if package in _OURS or package in sys.stdlib_module_names - {"__main__"}:
            return
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            if self._counts(cell, value, owner, depth):
                self.cells.append(cell)
        for code in _codes(function.__code__):
            for name in global_names(code):
                key = id(space), name
                if key not in self._seen and name in space:
                    self._seen.add(key)
                    if self._counts(key, space[name], None, depth):
                        self.globals.append((space, name))

    def _counts(self, place: Any, value: Any, owner: type | None, depth: int) -> bool:
        if isinstance(place, CellType):
            if id(place) in self._seen:
                return False
            self._seen.add(id(place))
        if isinstance(value, FunctionType | MethodType):
            self.function(value, owner, depth - 1)
            return True
        return not isinstance(value, type) and fact(value) is not None


def _members(kind: type, name: str) -> Iterator[Any]:
    """What a class and those it inherits from have under this name, unless every module has it."""
    for base in kind.__mro__:
        if base is nn.Module or base is object:
            return
        if name in vars(base):
            yield vars(base)[name]


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of the functions written inside it."""
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


@functools.lru_cache(maxsize=4096)
def mentions(code: CodeType) -> frozenset[str]:
    """Every name but a local one that a function and those inside it mention, and their texts that
    are names, as for ``getattr``.

    >>> sorted(mentions((lambda m: getattr(m, "scale") * m.gain).__code__))
    ['gain', 'getattr', 'scale']
    """
    found: set[str] = set()
    for one in _codes(code):
        found.update(one.co_names)
        found.update(c for c in one.co_consts if isinstance(c, str) and c.isidentifier())
    return frozenset(found)
