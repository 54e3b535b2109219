"""What running a forward once more, on symbols, could do to objects outside the model.

A trace runs the forward's own Python code. It runs on a copy of the module (see ``graph.trace``),
so what it writes to attributes, lists and counters of the module is lost with the copy. What it
would write to globals, classes and enclosing functions is not, and such a forward is not traced.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Iterable, Iterator
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.global_names import global_names, names_of
from fastlinear.profile.own_calls import bypassing_child
from fastlinear.profile.reached import function_in, is_torchs, reached

# Packages whose instances, as globals of a forward's code, hold nothing that tracing would lose.
_STATELESS_HOMES = frozenset({"builtins", "types", "typing", "functools", "logging", "torch"})
_OUTSIDE_OPS = frozenset({"STORE_GLOBAL", "DELETE_GLOBAL"})
_ATTRIBUTE_OPS = frozenset({"STORE_ATTR", "DELETE_ATTR"})
_SPEAKING = frozenset({"print", "input", "open", "exec", "eval", "setattr", "delattr"})


def class_forward(module: nn.Module) -> Any:
    """The ``forward`` of the module's class; None for TorchScript, whose classes have none."""
    return None if isinstance(module, torch.jit.ScriptModule) else type(module).forward


def why_not_run(module: nn.Module) -> str | None:
    """Why the forward of this module's class must not be run on symbols, or None."""
    forward: Any = inspect.unwrap(class_forward(module))
    if not isinstance(forward, FunctionType):
        return "is no Python function"
    if str(forward.__module__).split(".")[0] == "torch":
        return _why_not_child(module, ())
    for function in functions_of(module, forward):
        reason = _why_not_child(module, names_of(function.__code__))
        reason = reason or _writes_outside(function.__code__) or _reads_state(module, function)
        if reason is not None:
            return reason
    return None


def _why_not_child(module: nn.Module, names: Iterable[str]) -> str | None:
    # a trace would take the code of its __call__ for the parent's, unread
    child = bypassing_child(module, names)
    return None if child is None else f"calls {child}, which defines __call__ itself"


def functions_of(parent: nn.Module, forward: FunctionType) -> tuple[FunctionType, ...]:
    """``forward``, the methods it uses, the functions that modules hold and the helpers it calls,
    directly or not."""
    return reached(parent, forward).functions


def has_state(value: Any) -> bool:
    """Whether a global is an object whose values may change, or that a call may change."""
    if isinstance(value, dict | list | set | Tensor | torch.Generator):
        return True
    owner = getattr(value, "__self__", None)  # of a bound method
    if owner is not None and not isinstance(owner, ModuleType | type):
        return has_state(owner)
    home = type(value).__module__.partition(".")[0]
    return home not in _STATELESS_HOMES and not isinstance(value, type | Enum)


def writes(module: nn.Module) -> str | None:
    """What the forward of this module's class writes besides tensors, as far as its code shows:
    attributes, of itself too, and globals. None for nothing, and for torch's own modules."""
    forward: Any = inspect.unwrap(class_forward(module))
    if not isinstance(forward, FunctionType) or str(forward.__module__).split(".")[0] == "torch":
        return None
    for function in functions_of(module, forward):
        for code in _codes(function.__code__):
            for step in dis.get_instructions(code):
                if step.opname in _ATTRIBUTE_OPS | _OUTSIDE_OPS:
                    return f"{function.__qualname__} writes {step.argval}"
    return None


def _codes(code: CodeType) -> tuple[CodeType, ...]:
    """A function's code and that of the functions right inside it."""
    return (code, *(c for c in code.co_consts if isinstance(c, CodeType)))


def _writes_outside(code: CodeType) -> str | None:
    for inner in _codes(code):
        own = inner.co_varnames[:1]  # self
        before: Any = None
        for step in dis.get_instructions(inner):
            if step.opname in _OUTSIDE_OPS:
                return f"writes the global {step.argval}"
            if step.opname == "STORE_DEREF" and step.argval in code.co_freevars:
                return f"writes {step.argval} of an enclosing function"
            if step.opname in _ATTRIBUTE_OPS and not _loads(before, own):
                return f"writes the attribute {step.argval}, perhaps of another object"
            before = step
        spoken = sorted(set(inner.co_names) & _SPEAKING)
        if spoken:
            return f"calls {spoken[0]}"
    return None


def _loads(step: Any, names: tuple[str, ...]) -> bool:
    """Whether the last value an instruction loads is a local variable of one of these names."""
    if step is None or not step.opname.startswith("LOAD_FAST"):
        return False
    loaded = step.argval[-1] if isinstance(step.argval, tuple) else step.argval
    return loaded in names


def _reads_state(module: nn.Module, function: FunctionType) -> str | None:
    for name, value in _named_outside(function):
        if has_state(value):
            return f"uses {name} ({type(value).__name__}), which cannot be watched"
    for name in names_of(function.__code__):
        if name in vars(module) or hasattr(nn.Module, name):
            continue
        value = inspect.getattr_static(type(module), name, None)
        if value is not None and not _is_descriptor(value) and has_state(value):
            return f"uses {name} of its class ({type(value).__name__}), which cannot be watched"
    return None


def _named_outside(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What a function names among its globals, in modules and classes among them, and what it
    takes from enclosing functions."""
    scope, names = function.__globals__, names_of(function.__code__)
    for name in global_names(function.__code__):
        value = scope.get(name)
        if value is None:
            continue
        yield name, value
        if isinstance(value, ModuleType | type) and not is_torchs(value):
            inside = vars(value)
            for n in names:
                if n in inside and (function_in(inside[n]) or not callable(inside[n])):
                    yield f"{name}.{n}", inside[n]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        if name != "__class__":
            yield name, value


def _is_descriptor(value: Any) -> bool:
    return isinstance(value, property | staticmethod | classmethod | FunctionType | type)
