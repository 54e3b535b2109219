"""Linears that a module calls with one tensor: the first of them computes the results of all.

The module's own forward runs, whatever it does. A call of it is noted while it is under way, a
thread each. The first linear of a group then leaves the others' results there, and each takes its
own if it is given the same tensor, unwritten since, in the same state of PyTorch. Otherwise it
computes its own, as it does outside such a call, under ``torch.compile`` and where ops are watched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.calls import PLAIN, autocast_dtype, transforms_active, unlike_plain, watched
from fastlinear.core.errors import InputError
from fastlinear.rewrite.swap.forwards import (
    PLAIN_LINEARS,
    Forward,
    overridden,
    weight_as_is_and_bias,
)
from fastlinear.rewrite.swap.stand_in import is_ours

Compute = Callable[[Tensor, Sequence[Any], Sequence[Any]], Sequence[Tensor] | None]
"""(x, weights, biases) → the result of each linear; None where these are not of one kind."""

_Pair = tuple[Tensor, Tensor | None]
_saved_hooks = torch._C._autograd._top_saved_tensors_default_hooks


@dataclass(frozen=True)
class Group:
    """Linears that one call computes.

    Attributes:
        names: inside the module, in the order of its calls; the first one computes.
        compute: the one call.
        unwritten: whether the module's code writes nothing in place between their calls, so that
            tensors of inference mode, which count no writes, may be shared.
    """

    names: tuple[str, ...]
    compute: Compute
    unwritten: bool

    @cached_property
    def paths(self) -> tuple[tuple[str, ...], ...]:
        """The names in their parts."""
        return tuple(tuple(name.split(".")) for name in self.names)


class _Call:
    """A call of a module that is under way, and what its linears have left for each other."""

    __slots__ = ("groups", "hooks", "left", "module")

    def __init__(self, module: nn.Module, groups: Sequence[Group]) -> None:
        self.module, self.groups = module, groups
        self.left: dict[int, _Results] = {}
        self.hooks = _saved_hooks(True)

    def result(self, layer: nn.Module, x: Tensor) -> Tensor | None:
        """What this linear gives for x; None where it is to compute that itself."""
        for g, group in enumerate(self.groups):
            for i, path in enumerate(group.paths):
                if _inside(self.module, path) is not layer:
                    continue
                if transforms_active() or watched():
                    return None
                left = self.left.get(g)
                if left is not None and left.hold_for(x, i, layer):
                    return self._taken(g, left, i)
                # a checkpoint begun since then may run it again, alone
                return None if i > 0 or _saved_hooks(True) != self.hooks else self._first(g, x)
        return None

    def _taken(self, g: int, left: _Results, i: int) -> Tensor | None:
        """The result of linear ``i``, given once."""
        y, left.ys[i] = left.ys[i], None
        if y is not None:
            left.count -= 1
            if not left.count:
                del self.left[g]
        return y

    def _first(self, g: int, x: Tensor) -> Tensor | None:
        """The result of a group's first linear; those of the others are left."""
        self.left.pop(g, None)  # before there is more
        group = self.groups[g]
        if unlike_plain((x,)) or (x.is_inference() and not group.unwritten):
            return None
        pairs = _parameters(self.module, group)
        if pairs is None:
            return None
        try:
            ys = group.compute(x, [w for w, _ in pairs], [b for _, b in pairs])
        except InputError:  # the layers say what is wrong, or take it
            return None
        if ys is None:
            return None
        self.left[g] = _Results(x, pairs, ys)
        return ys[0]


class _Results:
    """Results of the linears behind the first, not yet taken, and what they hold for."""

    __slots__ = ("count", "facts", "pairs", "states", "x", "ys")

    def __init__(self, x: Tensor, pairs: Sequence[_Pair], ys: Sequence[Tensor]) -> None:
        self.x, self.pairs = x, pairs
        self.ys: list[Tensor | None] = [None, *ys[1:]]
        self.count = len(ys) - 1
        self.facts = _facts(x)
        self.states = [(_state(weight), _state(bias)) for weight, bias in pairs]

    def hold_for(self, x: Tensor, i: int, layer: nn.Module) -> bool:
        """Whether linear ``i`` would give this result for x now."""
        if x is not self.x:
            return False
        weight, bias = weight_as_is_and_bias(layer)
        known = self.pairs[i]
        if weight is not known[0] or bias is not known[1]:
            return False
        return (_state(weight), _state(bias)) == self.states[i] and self.facts == _facts(x)


def _facts(x: Tensor) -> tuple[Any, ...]:
    """What decides about results besides weights, as it is now."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast_dtype(x),
        _saved_hooks(True),
        _stream_of(x),
        _state(x),
    )


def _stream_of(x: Tensor) -> Any:
    """The stream in which a GPU would compute it."""
    return torch._C._cuda_getCurrentStream(x.device.index) if x.is_cuda else None


def _state(t: Tensor | None) -> tuple[int, bool] | None:
    """How often a tensor was written, and whether it wants a gradient."""
    if t is None:
        return None
    return 0 if t.is_inference() else t._version, t.requires_grad


class _UnderWay(threading.local):
    call: _Call | None = None


_under_way = _UnderWay()


def calling(
    groups: Sequence[Group], function: Callable[..., Any], module: nn.Module, *args: Any, **how: Any
) -> Any:
    """``function(module, *args, **how)`` as a call of the module under way."""
    before = _under_way.call
    _under_way.call = own = _Call(module, groups)
    try:
        return function(module, *args, **how)
    finally:
        _under_way.call = before
        own.left.clear()  # a traceback may keep this frame


def caller_forward(module: nn.Module, groups: Sequence[Group]) -> Forward:
    """The forward of a module that calls such linears; it holds no reference to the module."""
    original: Any = type(module).forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        own = type(self).forward
        if own is not original or torch.compiler.is_compiling():
            return own(self, *args, **kwargs)
        return calling(groups, own, self, *args, **kwargs)

    return forward


def shared_linear(linear: nn.Module) -> Forward:
    """The forward of one of these linears: (..., K) → (..., N)."""
    plain: Any = type(linear).forward

    def forward(self: Any, input: Tensor) -> Any:
        own = type(self).forward
        if own is plain and not torch.compiler.is_compiling():
            call = _under_way.call
            if call is not None and not overridden():
                y = call.result(self, input)
                if y is not None:
                    return y
        return own(self, input)

    return forward


def _inside(module: nn.Module, path: Sequence[str]) -> nn.Module | None:
    found: nn.Module | None = module
    for part in path:
        found = None if found is None else found.__dict__["_modules"].get(part)
    return found


def _parameters(module: nn.Module, group: Group) -> list[_Pair] | None:
    """Weights and biases, while all layers are plain and nobody else has a say in their calls."""
    found = []
    for path in group.paths:
        layer = _inside(module, path)
        if layer is None or type(layer) not in PLAIN_LINEARS:
            return None
        own: dict[str, Any] = layer.__dict__
        if "forward" in own and not is_ours(own["forward"]):
            return None
        if own.get("_compiled_call_impl") is not None or "_call_impl" in own:
            return None
        if (
            own["_forward_hooks"]
            or own["_forward_pre_hooks"]
            or own["_backward_hooks"]
            or own["_backward_pre_hooks"]
        ):
            return None
        pair = weight_as_is_and_bias(layer)
        for t in pair:
            if t is None:
                continue
            if type(t) not in PLAIN or t.layout is not torch.strided:
                return None
            if not group.unwritten and t.is_inference():
                return None
        found.append(pair)
    return found
