"""What happens at linear sites during one run: who calls them, on what, and what follows.

An activation counts as following a linear only when it receives the very tensor object the
linear returned, unchanged since.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)


@dataclass
class LinearCalls:
    """The calls of one linear.

    Attributes:
        calls: how often it ran.
        callers: names of the modules whose forward called it.
        inputs: one detached copy of the input for each distinct (shape, stride, dtype).
        counts: (shape, stride, dtype) → calls.
        followed: activation module's name → how many calls it followed directly.
        autocast: the autocast dtype in force, or None.
        grad: whether a call was to be differentiated.
    """

    calls: int = 0
    callers: set[str] = field(default_factory=set)
    inputs: dict[tuple[Any, ...], Tensor] = field(default_factory=dict)
    counts: dict[tuple[Any, ...], int] = field(default_factory=dict)
    followed: dict[str, int] = field(default_factory=dict)
    autocast: torch.dtype | None = None
    grad: bool = False


@dataclass
class ActivationCalls:
    """The calls of one activation module: all of them, and those right after a linear."""

    calls: int = 0
    after: dict[str, int] = field(default_factory=dict)


@dataclass
class Observation:
    """What one run showed: linears, activation modules and how modules with linears were called.

    ``parents`` maps a module's name to the (args, kwargs) structure of its first call, tensors
    replaced by their shape-free kind; see ``kinds_of``.
    """

    linears: dict[str, LinearCalls] = field(default_factory=dict)
    activations: dict[str, ActivationCalls] = field(default_factory=dict)
    parents: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)


TENSOR = "tensor"
"""Stands for a tensor among the recorded arguments of a parent."""


def observe(
    model: nn.Module,
    linears: dict[str, nn.Module],
    activations: dict[str, nn.Module],
    run: Callable[[], object],
) -> Observation:
    """Run once and watch. Hooks are global ones, removed before returning: no instance changes.

    Args:
        model: the model that ``run`` calls.
        linears, activations: modules to watch, by fully qualified name.
        run: runs the model once.
    """
    names = {id(m): fqn for fqn, m in model.named_modules()}
    seen = Observation(
        {fqn: LinearCalls() for fqn in linears}, {fqn: ActivationCalls() for fqn in activations}
    )
    stack: list[str] = []
    produced: dict[int, tuple[weakref.ref[Tensor], int, str]] = {}
    samples: dict[tuple[Any, ...], Tensor] = {}

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        fqn = names.get(id(module))
        if fqn is None:
            return
        if fqn in seen.linears:
            entry = seen.linears[fqn]
            entry.calls += 1
            if stack:
                entry.callers.add(stack[-1])
            if args and isinstance(args[0], Tensor):
                _note_input(entry, args[0], samples)
                wanted = args[0].requires_grad or any(p.requires_grad for p in module.parameters())
                entry.grad = entry.grad or (torch.is_grad_enabled() and wanted)
        elif fqn in seen.activations:
            _note_activation(seen, fqn, args, produced)
        stack.append(fqn)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        fqn = names.get(id(module))
        if fqn is None:
            return
        stack.pop()
        if fqn in seen.linears and isinstance(output, Tensor):
            produced[id(output)] = (weakref.ref(output), _version(output), fqn)

    parents = {".".join(fqn.split(".")[:i]) for fqn in linears for i in range(fqn.count(".") + 1)}
    handles: list[Any] = [
        register_module_forward_pre_hook(before),
        register_module_forward_hook(after),
        *_watch_arguments(model, parents, seen),
    ]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _watch_arguments(model: nn.Module, parents: set[str], seen: Observation) -> list[Any]:
    """Global hooks carry no keyword arguments, so parents are watched by removable instance
    hooks."""
    handles = []
    for fqn in sorted(parents):

        def note(_: nn.Module, args: Any, kwargs: Any, fqn: str = fqn) -> None:
            if fqn not in seen.parents:
                seen.parents[fqn] = (
                    tuple(_kind(a) for a in args),
                    {k: _kind(v) for k, v in kwargs.items()},
                )

        module = model.get_submodule(fqn)
        if not isinstance(module, torch.jit.ScriptModule):
            handles.append(module.register_forward_pre_hook(note, with_kwargs=True))
    return handles


def _kind(value: Any) -> Any:
    """TENSOR for a tensor, simple values as they are, a one-tuple naming any other type."""
    if isinstance(value, Tensor):
        return (TENSOR,)
    if value is None or type(value) in (bool, int, float, str):
        return value
    return ("other", type(value).__qualname__)


def _note_input(entry: LinearCalls, x: Tensor, samples: dict[tuple[Any, ...], Tensor]) -> None:
    key = (tuple(x.shape), tuple(x.stride()), x.dtype)
    entry.counts[key] = entry.counts.get(key, 0) + 1
    if torch.is_autocast_enabled(x.device.type):
        entry.autocast = torch.get_autocast_dtype(x.device.type)
    if key not in entry.inputs:
        # one sample serves every site with such an input: memory stays that of a few activations
        if key not in samples:
            samples[key] = x.detach().clone()
        entry.inputs[key] = samples[key]


def _note_activation(
    seen: Observation,
    fqn: str,
    args: tuple[Any, ...],
    produced: dict[int, tuple[weakref.ref[Tensor], int, str]],
) -> None:
    entry = seen.activations[fqn]
    entry.calls += 1
    if not args or not isinstance(args[0], Tensor):
        return
    found = produced.get(id(args[0]))
    if found is None:
        return
    reference, version, linear = found
    if reference() is not args[0] or version != _version(args[0]):
        return
    entry.after[linear] = entry.after.get(linear, 0) + 1
    followed = seen.linears[linear].followed
    followed[fqn] = followed.get(fqn, 0) + 1


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
