"""Finds the tensors and modules behind a callable, and every place that holds one."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from types import CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fastlinear.core.global_names import global_names
from fastlinear.cuda_graphs.code import Reads

_DEPTH = 4
END = object()
"""Follows the values of each container, so that one that grew or shrank does not line up."""

_contents = attrgetter("cell_contents")
_OWN = frozenset(vars(nn.Module()))


class Search:
    """Finds tensors, modules and the containers and variables that hold them."""

    def __init__(self) -> None:
        self.views: list[Iterable[Any]] = []
        self.tables: list[dict[str, Any]] = []  # whose values may be compared with ==
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.places: list[tuple[Any, Any]] = []  # (what holds a tensor, under which name)
        self.reads = Reads()
        self.namespaces: list[dict[str, Any]] = []  # attributes of what was found
        self._watched: set[int] = set()
        self._seen: dict[int, bool] = {}
        self._alive: list[Any] = []  # an id is good only while its object lives

    def visit(self, value: Any, depth: int = _DEPTH) -> bool:
        """Look at one value and what it holds; whether there is a tensor or module in it."""
        if isinstance(value, str | int | float | None) or depth < 0:
            return False
        if id(value) not in self._seen:
            self._seen[id(value)] = isinstance(value, Tensor | nn.Module)
            self._alive.append(value)
            self._seen[id(value)] |= self._look(value, depth)
        return self._seen[id(value)]

    def _all(self, values: Iterable[Any], depth: int) -> bool:
        return sum([self.visit(v, depth) for v in values]) > 0

    def _look(self, value: Any, depth: int) -> bool:
        if isinstance(value, Tensor):
            self.tensors.append(value)
        elif isinstance(value, nn.Module):
            self._module(value, depth)
        elif isinstance(value, functools.partial):
            self.namespaces.append(value.keywords)
            self.reads.names.update(value.keywords)
            return self._all((value.func, value.args, value.keywords), depth)
        elif isinstance(value, MethodType):
            self._object(value.__self__)
            self.reads.function(value)
            return self._all((value.__self__, value.__func__), depth)
        elif isinstance(value, FunctionType):
            self.reads.function(value)
            return self._function(value, depth)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):
                self.places += [(value, i) for i in range(len(value))]
            return self._container(value, value, depth)
        elif isinstance(value, dict):
            self.places += [(value, k) for k in value]
            return self._container(value.values(), list(value.values()), depth)
        elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
            self._object(value)
            self.reads.module(type(value))
            return self._slots(vars(value), list(vars(value)), depth)
        return False

    def _module(self, module: nn.Module, depth: int) -> None:
        self.modules.append(module)
        self._object(module)
        self.reads.module(type(module))
        for held in (module._parameters, module._buffers, module._modules):
            if held:
                if all(map(_comparable, held.values())):
                    self.tables.append(held)
                else:
                    self.views += [held.values(), (END,)]
                self.places += [(held, k) for k in held]
                for value in list(held.values()):
                    self.visit(value, _DEPTH if held is module._modules else 0)
        attributes = vars(module)
        self._slots(attributes, [k for k in attributes if k not in _OWN], depth)

    def _object(self, value: Any) -> None:
        """Have its attributes watched."""
        space = None if isinstance(value, type) else getattr(value, "__dict__", None)
        if isinstance(space, dict) and id(space) not in self._watched:
            self._watched.add(id(space))
            self.namespaces.append(space)

    def _function(self, function: FunctionType, depth: int) -> bool:
        package = function.__globals__.get("__name__", "").partition(".")[0]
        if package in ("torch", "fastlinear"):  # their own caches are not the caller's tensors
            return False
        cells = [c for c in function.__closure__ or () if self._cell(c, depth)]
        if cells:
            self.views += [_Cells(cells), (END,)]
            self.places += [(c, "cell_contents") for c in cells]
        names = [n for n in global_names(function.__code__) if n in function.__globals__]
        named = self._slots(function.__globals__, names, depth)
        defaults = self.visit(function.__defaults__, depth)
        return bool(cells) or named or defaults

    def _cell(self, cell: CellType, depth: int) -> bool:
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            return False
        return self.visit(value, depth - 1)

    def _slots(self, names: dict[str, Any], keys: list[str], depth: int) -> bool:
        held = [k for k in keys if self.visit(names[k], depth - 1)]
        if held:
            self.views += [_Slots(names, held), (END,)]
            self.places += [(names, k) for k in held]
        return bool(held)

    def _container(self, live: Iterable[Any], values: Sequence[Any], depth: int) -> bool:
        if not self._all(values, depth - 1):
            return False
        self.views += [live, (END,)]
        return True


def _comparable(value: Any) -> bool:
    """Whether ``==`` with another object is False or raises: a tensor of several values has none.

    ``==`` of dicts compares no object with itself, so that one that is unchanged costs nothing.
    """
    if isinstance(value, Tensor):
        return value.numel() > 1
    return value is None or type(value).__eq__ is object.__eq__


class _Cells:
    """The values of closure cells, as they are when iterated."""

    def __init__(self, cells: list[CellType]) -> None:
        self._cells = cells

    def __iter__(self) -> Iterator[Any]:
        return map(_contents, self._cells)


class _Slots:
    """The values of some names of a namespace, as they are when iterated."""

    def __init__(self, names: dict[str, Any], keys: list[str]) -> None:
        self._names, self._keys = names, keys

    def __iter__(self) -> Iterator[Any]:
        return map(self._names.get, self._keys)
