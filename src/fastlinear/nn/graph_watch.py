"""What a graphed callable reads besides its arguments, and whether it is still what was recorded.

A graph holds addresses. Values edited in place are seen by the next replay; a parameter that was
replaced, a layer swapped or frozen, a switch to ``eval()`` or a new hook is noticed here, at each
call, by a few passes in C over flat lists.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter, is_
from types import CellType, FunctionType, MethodType
from typing import Any

import torch.nn.modules.module as torch_module
from torch import Tensor, nn

PLAIN = (Tensor, nn.Parameter, nn.Buffer)
"""The tensor types that a graph can hold."""

_WRAPPERS = {
    "DistributedDataParallel": "its hooks fill gradient buckets; graph the module inside it",
    "DataParallel": "it moves tensors between devices; graph the module inside it",
    "FullyShardedDataParallel": "its hooks gather parameters; graph its layers before wrapping",
    "FSDPModule": "its hooks gather parameters; graph its layers before wrapping",
    "OptimizedModule": "torch.compile handles its tensors; graph the module it was made from",
}
_DEPTH = 4
_MAX_STATES = 64
_END = object()
_address, _shape, _stride = Tensor.data_ptr, Tensor.size, Tensor.stride
_training, _requires_grad = attrgetter("training"), attrgetter("requires_grad")
_contents = attrgetter("cell_contents")


class Watch:
    """The modules and tensors behind one callable.

    Args:
        target: an ``nn.Module``, a method of one, or a function. Modules and tensors are found in
            its closure, defaults, partial arguments, the globals it names, and attributes.
        extra: modules and tensors that cannot be found so.

    Attributes:
        tensors: every tensor found.
        trainable: those that require a gradient.
        token: a number for this state; a state met before has its number again.
    """

    def __init__(self, target: Callable[..., Any], extra: Sequence[Any] = ()) -> None:
        self._roots = (target, list(extra))
        self._tokens: dict[Hashable, int] = {}
        self._others: list[Any] = []
        self._generation = self._next = 0
        self.renew()

    def unchanged(self) -> bool:
        """Whether every tensor, module, mode and hook is what it was at the last ``renew``."""
        tensors = self.tensors
        return (
            all(map(is_, chain.from_iterable(self._views), self._kept))
            and list(map(_address, tensors)) == self._addresses
            and list(map(_shape, tensors)) == self._shapes
            and list(map(_stride, tensors)) == self._strides
            and list(map(_requires_grad, tensors)) == self._grads
            and list(map(_training, self._modules)) == self._modes
            and not self._hooked
            and not any(self._hooks)
        )

    def renew(self) -> None:
        """Take the state as it is now."""
        found = _Search()
        for root in self._roots:
            found.visit(root, _DEPTH)
        self._views, self._modules, self.tensors = found.views, found.modules, found.tensors
        self._places = found.places
        self._kept = list(chain.from_iterable(self._views))
        self._hooks = [h for m in self._modules for h in _hooks_of(m)] + _GLOBAL_HOOKS
        self._addresses = list(map(_address, self.tensors))
        self._shapes = list(map(_shape, self.tensors))
        self._strides = list(map(_stride, self.tensors))
        self._grads = list(map(_requires_grad, self.tensors))
        self._modes = list(map(_training, self._modules))
        self.trainable = [t for t in self.tensors if t.requires_grad]
        self._number()

    @contextmanager
    def swapped(self, others: dict[int, Tensor]) -> Iterator[None]:
        """Other tensors in place of those with these ids, wherever a callable looks them up."""
        put_back = []
        for holder, name in self._places:
            value = holder.cell_contents if isinstance(holder, CellType) else holder[name]
            if id(value) in others:
                put_back.append((holder, name, value))
        try:
            for holder, name, value in put_back:
                _place(holder, name, others[id(value)])
            yield
        finally:
            for holder, name, value in put_back:
                _place(holder, name, value)

    def reason_not(self, device_type: str) -> str | None:
        """Why no graph can follow this state, or None."""
        for m in self._modules:
            for cls in type(m).__mro__:
                if cls.__name__ in _WRAPPERS:
                    return f"{cls.__name__}: {_WRAPPERS[cls.__name__]}"
        if any(self._hooks):
            owner = next((m for m in self._modules if any(_hooks_of(m))), None)
            name = "every module" if owner is None else type(owner).__name__
            return f"hooks on {name}, which a replay would not call"
        for t in self.tensors:
            if type(t) not in PLAIN:
                return f"a {type(t).__name__}; only plain tensors have one address"
            if t._backward_hooks:
                return "a gradient hook on a parameter, which recording would call"
            if t.device.type != device_type and t.dim():
                return f"a {tuple(t.shape)} tensor on {t.device}"
        return None

    def _number(self) -> None:
        others = [v for v in self._kept if not isinstance(v, Tensor | nn.Module)]
        same = len(others) == len(self._others) and all(map(is_, others, self._others))
        if not same or len(self._tokens) >= _MAX_STATES:
            self._tokens.clear()
            self._generation += 1
        self._others = others
        # Modules stand for themselves: an id may be given to another module later.
        dtypes = tuple(t.dtype for t in self.tensors)
        layout = zip(self._addresses, self._shapes, self._strides, self._grads, strict=True)
        self._hooked = any(self._hooks)
        key = (self._hooked, tuple(self._modules), tuple(self._modes), dtypes, tuple(layout))
        if key not in self._tokens:
            self._next += 1
            self._tokens[key] = self._next
        self.token = self._tokens[key]


class _Search:
    """Finds tensors, modules and the containers and variables that hold them."""

    def __init__(self) -> None:
        self.views: list[Iterable[Any]] = []
        self.modules: list[nn.Module] = []
        self.tensors: list[Tensor] = []
        self.places: list[tuple[Any, Any]] = []  # (what holds a tensor, under which name)
        self._seen: dict[int, bool] = {}
        self._alive: list[Any] = []  # an id is good only while its object lives

    def visit(self, value: Any, depth: int) -> bool:
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
            return self._all((value.func, value.args, value.keywords), depth)
        elif isinstance(value, MethodType):
            return self._all((value.__self__, value.__func__), depth)
        elif isinstance(value, FunctionType):
            return self._function(value, depth)
        elif isinstance(value, list | tuple):
            if isinstance(value, list):
                self.places += [(value, i) for i in range(len(value))]
            return self._container(value, value, depth)
        elif isinstance(value, dict):
            self.places += [(value, k) for k in value]
            return self._container(value.values(), list(value.values()), depth)
        elif callable(value) and hasattr(value, "__dict__") and not isinstance(value, type):
            return self._slots(vars(value), list(vars(value)), depth)
        return False

    def _module(self, module: nn.Module, depth: int) -> None:
        self.modules.append(module)
        for held in (module._parameters, module._buffers, module._modules):
            if held:
                self.views += [held.values(), (_END,)]
                self.places += [(held, k) for k in held]
                for value in list(held.values()):
                    self.visit(value, _DEPTH if held is module._modules else 0)
        attributes = vars(module)
        self._slots(attributes, [k for k in attributes if k not in _OWN], depth)

    def _function(self, function: FunctionType, depth: int) -> bool:
        package = function.__globals__.get("__name__", "").partition(".")[0]
        if package in ("torch", "fastlinear"):  # their own caches are not the caller's tensors
            return False
        cells = [c for c in function.__closure__ or () if self._cell(c, depth)]
        if cells:
            self.views += [_Cells(cells), (_END,)]
            self.places += [(c, "cell_contents") for c in cells]
        names = [n for n in function.__code__.co_names if n in function.__globals__]
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
            self.views += [_Slots(names, held), (_END,)]
            self.places += [(names, k) for k in held]
        return bool(held)

    def _container(self, live: Iterable[Any], values: Sequence[Any], depth: int) -> bool:
        if not self._all(values, depth - 1):
            return False
        self.views += [live, (_END,)]
        return True


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


def _place(holder: Any, name: Any, value: Tensor) -> None:
    if isinstance(holder, CellType):
        holder.cell_contents = value
    else:
        holder[name] = value


def _hooks_of(m: nn.Module) -> tuple[Any, ...]:
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks


_GLOBAL_HOOKS = [
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
]
_OWN = frozenset(vars(nn.Module()))
