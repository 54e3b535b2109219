"""What a traced forward must be guarded against, and which forwards no guard can make safe.

A trace keeps every value that is no tensor as it was: arguments, attributes of the parent, of its
children and of its class, and globals. Simple ones are watched: the guarded forward compares them
at every call and runs the class's own forward when one has changed. A forward that depends on
anything else is refused.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.profile.graph import TENSOR, Observed
from fastlinear.rewrite.forwards import Forward
from fastlinear.rewrite.swap import mark

_SIMPLE = (bool, int, float, str, type(None))
# Names whose value may differ from call to call and that tracing would freeze.
_UNTRACEABLE_TEXT = """
    isinstance hasattr type id len print is_tensor is_grad_enabled is_autocast_enabled
    is_autocast_cpu_enabled is_inference_mode_enabled is_compiling is_dynamo_compiling
    random environ requires_grad grad setattr __dict__ vars globals requires_grad_ data
    grad_fn children named_children modules named_modules parameters named_parameters
    buffers named_buffers get_default_dtype
"""
_UNTRACEABLE = frozenset(_UNTRACEABLE_TEXT.split())
_UNTRACEABLE_OPS_TEXT = """
    STORE_ATTR DELETE_ATTR STORE_SUBSCR DELETE_SUBSCR STORE_GLOBAL DELETE_GLOBAL STORE_DEREF
    BEFORE_WITH SETUP_WITH WITH_EXCEPT_START IMPORT_NAME YIELD_VALUE
"""
_UNTRACEABLE_OPS = frozenset(_UNTRACEABLE_OPS_TEXT.split())
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MISSING = object()


def guarded(
    parent: nn.Module,
    traced: Callable[..., Any],
    observed: Observed,
    passed_over: tuple[str, ...],
) -> Forward:
    """A forward that runs ``traced`` while all it depends on is as observed, else the class's own.

    Args:
        parent: the traced module; the result holds no reference to it.
        traced: (parent, tensors in order) → what the forward returns.
        observed: the arguments the trace holds for.
        passed_over: activation modules inside the parent that ``traced`` does not call. It is
            used only while they are of the same class, without hooks and set as now.
    """
    args, kwargs = observed.arguments()
    kinds = (*args, *kwargs.values())
    tensors = tuple(i for i, k in enumerate(kinds) if k is TENSOR)
    fixed = tuple((i, k) for i, k in enumerate(kinds) if k is not TENSOR)
    names, count = tuple(kwargs), len(args)
    original: Any = type(parent).forward
    watched = _watched(parent, original)
    activations = tuple(_Activation.of(parent, path) for path in passed_over)

    def fits(self: nn.Module, values: tuple[Any, ...]) -> bool:
        for i in tensors:
            if not isinstance(values[i], Tensor):
                return False
        for i, kind in fixed:
            if not _same(values[i], kind):
                return False
        attributes = self.__dict__
        for name, value in watched.attributes:
            if not _same(attributes.get(name, _MISSING), value):
                return False
        for name, value in watched.of_class:
            if name in attributes or not _same(getattr(self, name, _MISSING), value):
                return False
        for name, table, value in watched.members:
            if _member(attributes[table].get(name)) != value:
                return False
        for child, name, value in watched.of_children:
            found = attributes["_modules"].get(child)
            if found is None or not _same(found.__dict__.get(name, _MISSING), value):
                return False
        for activation in activations:
            if not activation.unchanged(self):
                return False
        return all(_same(scope.get(n, _MISSING), value) for scope, n, value in watched.outside)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == count and tuple(kwargs) == names:
            values = (*args, *kwargs.values()) if kwargs else args
            if fits(self, values):
                return traced(self, *[values[i] for i in tensors])
        return original(self, *args, **kwargs)

    return mark(forward)


@dataclass(frozen=True)
class _Activation:
    """An activation module that is not called any more, as it was when that was decided."""

    path: tuple[str, ...]
    kind: type
    settings: tuple[tuple[str, Any], ...]

    @staticmethod
    def of(parent: nn.Module, path: str) -> _Activation:
        module = parent.get_submodule(path)
        simple = ((n, v) for n, v in vars(module).items() if _watchable(v))
        settings = tuple((n, v) for n, v in simple if n != "training" and not n.startswith("_"))
        return _Activation(tuple(path.split(".")), type(module), settings)

    def unchanged(self, parent: nn.Module) -> bool:
        module: Any = parent
        for name in self.path:
            module = module._modules.get(name)
            if module is None:
                return False
        own = module.__dict__
        if type(module) is not self.kind or "forward" in own or any(own[h] for h in _HOOKS):
            return False
        return all(_same(own.get(n, _MISSING), v) for n, v in self.settings)


@dataclass(frozen=True)
class _Watched:
    """What a traced forward depends on besides its arguments, with the values seen then.

    ``outside`` holds dictionaries of modules and classes the code reads, never of instances.
    """

    attributes: tuple[tuple[str, Any], ...]
    of_class: tuple[tuple[str, Any], ...]
    members: tuple[tuple[str, str, int], ...]
    of_children: tuple[tuple[str, str, Any], ...]
    outside: tuple[tuple[Mapping[str, Any], str, Any], ...]


def _watched(parent: nn.Module, forward: FunctionType) -> _Watched:
    functions = _functions(parent, forward)
    named = {n for f in functions for n in f.__code__.co_names}
    read = named | {"training"}
    own = vars(parent)
    attributes = tuple((n, v) for n, v in own.items() if n in read and _watchable(v))
    of_class = tuple(
        (n, v)
        for n in sorted(named - set(own))
        if not hasattr(nn.Module, n)
        and _watchable(v := inspect.getattr_static(type(parent), n, _MISSING))
        and not _is_function(v)
    )
    members = tuple(
        (n, table, _member(value))
        for table in ("_modules", "_parameters", "_buffers")
        for n, value in own[table].items()
        if n in read
    )
    of_children = tuple(
        (child, n, v)
        for child, module in own["_modules"].items()
        if child in read and module is not None
        for n, v in vars(module).items()
        if n in named and _watchable(v)
    )
    outside = []
    for function in functions:
        scope = function.__globals__
        for name in function.__code__.co_names:
            value = scope.get(name, _MISSING)
            if type(value) in _SIMPLE and not name.startswith("__"):
                outside.append((scope, name, value))
            elif isinstance(value, ModuleType | type):
                inside = vars(value)
                found = (n for n in function.__code__.co_names if type(inside.get(n)) in _SIMPLE)
                outside += [(inside, n, inside[n]) for n in found if n in inside]
    return _Watched(attributes, of_class, members, of_children, tuple(outside))


def _member(value: Any) -> int:
    """-2 when absent, the length of a container, -1 for any other module or tensor."""
    if value is None:
        return -2
    return len(value) if isinstance(value, nn.ModuleList | nn.ModuleDict) else -1


def _watchable(value: Any) -> bool:
    return type(value) in _SIMPLE or _is_function(value)


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType | BuiltinFunctionType)


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and type(a) in _SIMPLE and a == b)


# --------------------------------------------------------------------------------------------
# What no guard can make safe


def why_not(parent: nn.Module) -> str | None:
    """Why the forward of this module's class must not be replaced by its trace, or None."""
    forward: Any = type(parent).forward
    if not isinstance(forward, FunctionType) or inspect.unwrap(forward) is not forward:
        return "is wrapped by a decorator"
    if isinstance(parent, _CONTAINERS):
        return "belongs to a container, whose members may change"
    for function in _functions(parent, forward):
        if set(function.__code__.co_freevars) - {"__class__"}:
            return "reads variables of an enclosing function"
        reason = _why_not_code(function.__code__) or _why_not_state(parent, function)
        if reason is not None:
            return reason
    return None


def why_not_arguments(observed: Observed) -> str | None:
    """Why a trace for these arguments could not be guarded, or None."""
    args, kwargs = observed.arguments()
    for value in (*args, *kwargs.values()):
        if value is not TENSOR and type(value) not in _SIMPLE:
            return f"takes an argument of type {type(value).__qualname__}"
    return None


def _why_not_code(code: CodeType) -> str | None:
    for instruction in dis.get_instructions(code):
        if instruction.opname in _UNTRACEABLE_OPS:
            return f"has a side effect or a block that tracing would lose ({instruction.opname})"
    frozen = sorted(set(code.co_names) & _UNTRACEABLE)
    if frozen:
        return f"depends on {frozen[0]}, which tracing would freeze"
    if code.co_exceptiontable:
        return "has a with or try block"
    nested = [c for c in code.co_consts if isinstance(c, CodeType)]
    return "defines inner functions" if nested else None


def _why_not_state(parent: nn.Module, function: FunctionType) -> str | None:
    for name in function.__code__.co_names:
        if name in ("_modules", "_parameters", "_buffers"):
            return f"reads self.{name}"
        value = vars(parent).get(name, _MISSING)
        if value is _MISSING and not hasattr(nn.Module, name):
            value = inspect.getattr_static(type(parent), name, _MISSING)
            if isinstance(value, property | staticmethod | classmethod):
                continue  # their functions are looked at themselves
        if value is not _MISSING and not _watchable(value) and not hasattr(nn.Module, name):
            return f"reads self.{name} ({type(value).__name__}), which cannot be watched"
        outside = function.__globals__.get(name)
        if isinstance(outside, dict | list | set | Tensor | torch.Generator):
            return f"reads the global {name} ({type(outside).__name__}), which cannot be watched"
    return None


def _functions(parent: nn.Module, forward: FunctionType) -> list[FunctionType]:
    """``forward``, the parent's own methods and the helpers it calls, directly or not."""
    found: list[FunctionType] = []
    waiting = [forward]
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        found.append(function)
        for name in function.__code__.co_names:
            value = inspect.getattr_static(type(parent), name, None)
            if isinstance(value, property):
                value = value.fget
            elif isinstance(value, staticmethod | classmethod):
                value = value.__func__
            if isinstance(value, FunctionType) and not hasattr(nn.Module, name):
                waiting.append(value)
            helper = function.__globals__.get(name)
            if isinstance(helper, FunctionType) and not helper.__module__.startswith("torch."):
                waiting.append(helper)
    return found
