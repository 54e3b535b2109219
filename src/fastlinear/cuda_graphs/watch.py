"""What a graphed callable reads besides its arguments, and whether it is still what was recorded.

A graph holds addresses. Values edited in place are seen by the next replay; a parameter that was
replaced, a layer swapped or frozen, a switch to ``eval()``, a new hook, or a number or function
that the code reads (``facts``) is noticed here, at each call, by a few passes in C over flat
lists.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import chain
from operator import attrgetter, eq, is_
from types import CellType
from typing import Any

import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch._C._dynamo.guards import TensorGuards

from fastlinear.core.interrupts import whole
from fastlinear.core.wrappers import PLAIN, distributed_wrapper
from fastlinear.cuda_graphs.facts import Facts, Own
from fastlinear.cuda_graphs.modules import Modules, hooks_of
from fastlinear.cuda_graphs.results import all_at
from fastlinear.cuda_graphs.search import Search

_WRAPPERS = {
    "DataParallel": "DataParallel moves tensors between devices",
    "OptimizedModule": "torch.compile (OptimizedModule) handles its tensors",
}
_MAX_STATES = 64
_NO_ONE_TRUTH = (RuntimeError, TypeError, ValueError)  # raised by == with another tensor
_address, _shape, _stride = Tensor.data_ptr, Tensor.size, Tensor.stride
_inference_mode, _any_autocast = torch.is_inference_mode_enabled, torch._C._is_any_autocast_enabled
_requires_grad = attrgetter("requires_grad")


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
        self._own: Own = {}
        self._next = 0
        self.renew()

    def unchanged(self, grad: bool) -> bool:
        """Whether every tensor, module, mode and hook is what it was at the last ``renew``.

        Which tensors require a gradient matters with ``grad`` only.
        """
        return self.in_place() and self._laid_out(grad)

    def in_place(self) -> bool:
        """``unchanged``, but for the tensors' shapes, strides and ``requires_grad``."""
        try:
            same = all(map(eq, self._tables, self._held))
        except _NO_ONE_TRUTH:
            same = False
        return (
            same
            and all(map(is_, chain.from_iterable(self._views), self._kept))
            and all_at(self.tensors, self._addresses, self._every)
            and self._facts.unchanged()
            and self._modules.unchanged()
            and not self._hooked
            and not any(_GLOBAL_HOOKS)
        )

    def _laid_out(self, grad: bool) -> bool:
        """Whether shapes, strides and, with ``grad``, ``requires_grad`` are those of ``renew``.

        torch's own guards say yes in one pass; they look at the thread's modes as well, so there
        is one guard for each, and their no is not final.
        """
        tensors = self.tensors
        if not tensors:
            return True
        modes = _inference_mode(), _any_autocast()
        guard = self._guards.get(modes)
        if guard is not None and guard(*tensors):
            return True
        if (
            list(map(_shape, tensors)) != self._shapes
            or list(map(_stride, tensors)) != self._strides
        ):
            return False
        if list(map(_requires_grad, tensors)) != self._grads:
            return not grad
        self._guards[modes] = layout_guard(tensors)
        return True

    def renew(self) -> None:
        """Take the state as it is now."""
        found = Search()
        for root in self._roots:
            found.visit(root)
        self._views, self._modules = found.views, Modules(found.modules)
        # Others have no address to ask for; ``reason_not`` refuses them.
        self.tensors = [t for t in found.tensors if _has_address(t)]
        self._foreign = next((t for t in found.tensors if not _has_address(t)), None)
        self._places = found.places
        self._kept = list(chain.from_iterable(self._views))
        self._tables = found.tables
        self._held = list(map(dict, found.tables))
        self._hooked = self._modules.hooked or any(_GLOBAL_HOOKS)
        self._addresses = list(map(_address, self.tensors))
        self._every = list(range(len(self.tensors)))
        self._shapes = list(map(_shape, self.tensors))
        self._strides = list(map(_stride, self.tensors))
        self._grads = list(map(_requires_grad, self.tensors))
        self._read = found.reads, found.namespaces
        self._facts = Facts(*self._read, self._own)
        self._guards: dict[tuple[bool, bool], Callable[..., bool]] = {}
        self.trainable = [t for t in self.tensors if t.requires_grad]
        self._number()

    def settle(self) -> None:
        """The callable has been run to be recorded: numbers it has set itself are not watched."""
        if self._facts.settle():
            self._facts = Facts(*self._read, self._own)
            self._number(self.token)

    @whole
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
        for m in self._modules.modules:
            why = distributed_wrapper(m) or _WRAPPERS.get(type(m).__name__)
            if why is not None:
                return f"{why}; graph the module inside it, before it is wrapped"
        if self._foreign is not None:
            return f"a {_named(self._foreign)}; only plain tensors have one address"
        if self._hooked:
            owner = next((m for m in self._modules.modules if any(hooks_of(m))), None)
            name = "every module" if owner is None else type(owner).__name__
            return f"hooks on {name}, which a replay would not call"
        for t in self.tensors:
            if t._backward_hooks:
                return "a gradient hook on a parameter, which recording would call"
            if t.device.type != device_type and t.dim():
                return f"a {tuple(t.shape)} tensor on {t.device}"
        return None

    def _number(self, token: int | None = None) -> None:
        """Set ``token``, to the number given where the state has one already."""
        others = [v for v in self._kept if not isinstance(v, Tensor | nn.Module)]
        same = len(others) == len(self._others) and all(map(is_, others, self._others))
        if not same or len(self._tokens) >= _MAX_STATES:
            self._tokens.clear()
        self._others = others
        # Modules stand for themselves: an id may be given to another module later.
        dtypes = tuple(t.dtype for t in self.tensors)
        layout = zip(self._addresses, self._shapes, self._strides, self._grads, strict=True)
        found = self._modules
        code = tuple(found.modules), tuple(found.kinds), tuple(found.forwards)
        key = (self._hooked, code, self._facts.key, dtypes, tuple(layout))
        if token is not None:
            self._tokens[key] = token
        elif key not in self._tokens:
            self._next += 1
            self._tokens[key] = self._next
        self.token = self._tokens[key]


def layout_guard(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """Tells in one pass whether tensors are of these types, dtypes, devices, shapes and strides.

    Its yes also says that ``requires_grad`` and the thread's modes are the same.
    """
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [list(t.stride()) for t in tensors]
    check: Callable[..., bool] = TensorGuards(
        *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
    ).check
    return check


def _place(holder: Any, name: Any, value: Tensor) -> None:
    if isinstance(holder, CellType):
        holder.cell_contents = value
    else:
        holder[name] = value


def _has_address(t: Tensor) -> bool:
    return type(t) in PLAIN and torch._C._has_storage(t)


def _named(t: Tensor) -> str:
    return type(t).__name__ if type(t) not in PLAIN else f"{t.layout} tensor without storage"


_GLOBAL_HOOKS = [
    torch_module._global_forward_hooks,
    torch_module._global_forward_pre_hooks,
    torch_module._global_backward_hooks,
    torch_module._global_backward_pre_hooks,
]
