"""What a function may change of the process and of modules while it works, to be put back."""

from __future__ import annotations

import gc
import os
import random
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.modules import module as module_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode
from torch.utils import _python_dispatch as dispatching

_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (torch.is_grad_enabled, torch._C._set_grad_enabled),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (lambda: _matmul().fp32_precision, lambda was: setattr(_matmul(), "fp32_precision", was)),
    (torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled),
    (lambda: _autocast("cpu"), lambda was: _set_autocast("cpu", *was)),
    (lambda: _autocast("cuda"), lambda was: _set_autocast("cuda", *was)),
)
_STACKS: tuple[Callable[[], list[Any]], ...] = (
    _get_current_function_mode_stack,
    dispatching._get_current_dispatch_mode_stack,
)
_POPS: tuple[Callable[[], object], ...] = (_pop_mode, dispatching._pop_mode)


class ProcessState:
    """The state now: settings of torch and Python, random numbers, modes, hooks, and what every
    module among ``given`` holds (one level deep: tensors are kept, not copied)."""

    def __init__(self, given: Iterable[object]) -> None:
        self._settings = [read() for read, _ in _SETTINGS]
        self._random = random_state()
        self._warnings = warnings.filters, warnings.showwarning
        self._environment = dict(os.environ)
        self._modes = [len(stack()) for stack in _STACKS]
        self._nesting = _autocast_nesting()
        modules = [m for g in given if isinstance(g, nn.Module) for m in g.modules()]
        self._attributes = [(m.__dict__, dict(m.__dict__)) for m in modules]
        held = [d for m in (*modules, module_hooks) for d in _dicts(vars(m))]
        self._attributes += [(d, d.copy()) for d in held]
        parameters = {id(p): p for m in modules for p in m._parameters.values() if p is not None}
        self._parameters = [(p, p.grad, p.requires_grad) for p in parameters.values()]

    def put_back(self) -> None:
        """Give back everything that differs."""
        for stack, pop, depth in zip(_STACKS, _POPS, self._modes, strict=True):
            while len(modes := stack()) > depth:
                with suppress(Exception):
                    modes[-1].__exit__(None, None, None)
                if len(stack()) == len(modes):
                    pop()
        for (read, write), was in zip(_SETTINGS, self._settings, strict=True):
            if read() != was:
                write(was)
        while _autocast_nesting() > self._nesting:
            torch.autocast_decrement_nesting()
        restore_random_state(self._random)
        if (warnings.filters, warnings.showwarning) != self._warnings:
            warnings.filters, warnings.showwarning = self._warnings
            warnings._filters_mutated()  # type: ignore[attr-defined]
        if os.environ != self._environment:
            os.environ.clear()
            os.environ.update(self._environment)
        for now, before in self._attributes:
            put_back(now, before)
        for parameter, grad, needs in self._parameters:
            if parameter.requires_grad is not needs:
                parameter.requires_grad_(needs)
            if parameter.grad is not grad:
                parameter.grad = grad


def put_back(now: dict[Any, Any], before: dict[Any, Any]) -> None:
    """Make a dict hold what it held, if it does not."""
    if len(now) == len(before) and all(now.get(k, now) is v for k, v in before.items()):
        return
    now.clear()
    now.update(before)


def random_state() -> tuple[Any, ...]:
    """The generators of torch (on every initialised device), Python and numpy."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return torch.get_rng_state(), cuda, random.getstate(), np.random.get_state()


def restore_random_state(state: tuple[Any, ...]) -> None:
    """What ``random_state`` returned."""
    cpu, cuda, python, numpy = state
    torch.set_rng_state(cpu)
    if cuda is not None:
        torch.cuda.set_rng_state_all(cuda)
    random.setstate(python)
    np.random.set_state(numpy)


def _dicts(attributes: dict[str, Any]) -> list[dict[Any, Any]]:
    """Registries of parameters, buffers, children and hooks."""
    names = ("_parameters", "_buffers", "_modules")
    return [
        value
        for key, value in attributes.items()
        if isinstance(value, dict) and (key in names or "_hooks" in key)
    ]


def _autocast_nesting() -> int:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return int(depth)


def _matmul() -> Any:
    return torch.backends.cuda.matmul


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _set_autocast(kind: str, enabled: bool, dtype: torch.dtype) -> None:
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)
