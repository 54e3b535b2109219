"""Rewriting an activation that is a function call in a parent's forward.

The parent's forward is traced with torch.fx, children kept as leaves; each linear → activation
pair becomes one fused call, and the graph becomes a plain function of the parent. Tracing fixes
everything that is not a tensor, so the new forward first checks that all of that is as it was when
traced, and otherwise runs the class's own forward.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch
import torch.fx
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlinear.profile.recognise import recognise
from fastlinear.rewrite.eligible import Refusal, linear_kind, refuse_module
from fastlinear.rewrite.forwards import Forward, call_fused
from fastlinear.rewrite.observe import TENSOR
from fastlinear.rewrite.swap import mark

SeenCall = tuple[tuple[Any, ...], dict[str, Any]]
_SIMPLE = (bool, int, float, str, type(None))
# Names whose value may differ from call to call and that tracing would freeze.
_UNTRACEABLE_TEXT = """
    isinstance hasattr type id len print is_tensor is_grad_enabled is_autocast_enabled
    is_autocast_cpu_enabled is_inference_mode_enabled is_compiling is_dynamo_compiling
    random environ requires_grad grad setattr __dict__ vars globals requires_grad_ data
    grad_fn
"""
_UNTRACEABLE = frozenset(_UNTRACEABLE_TEXT.split())
_UNTRACEABLE_OPS_TEXT = """
    STORE_ATTR DELETE_ATTR STORE_SUBSCR DELETE_SUBSCR STORE_GLOBAL DELETE_GLOBAL STORE_DEREF
    BEFORE_WITH SETUP_WITH WITH_EXCEPT_START IMPORT_NAME YIELD_VALUE
"""
_UNTRACEABLE_OPS = frozenset(_UNTRACEABLE_OPS_TEXT.split())


@dataclass(frozen=True)
class Fusable:
    """A parent whose forward holds linear → activation pairs.

    Attributes:
        pairs: the linear's name inside the parent → activation name.
        build: pairs to fuse → the new forward of the parent.
    """

    pairs: dict[str, str]
    build: Callable[[dict[str, str], str | None], Forward]


def fusable(parent: nn.Module, seen_call: SeenCall, modules: dict[str, str]) -> Fusable | Refusal:
    """The linear → activation pairs in the forward of ``parent``, or why it cannot be rewritten.

    Args:
        parent: the module whose forward calls linear and activation.
        seen_call: kinds of its arguments in one call, as ``observe`` records them.
        modules: names inside the parent of activation modules → activation name.
    """
    refusal = refuse_module(parent)
    if refusal is not None:
        return refusal
    forward = type(parent).forward
    reason = _why_not(parent, forward) or _why_not_arguments(seen_call)
    if reason is not None:
        return Refusal("untraceable", f"{type(parent).__qualname__}.forward {reason}.")
    attributes = dict(vars(parent))
    try:
        graph = _Tracer(seen_call).trace(parent)
    except Exception as error:  # noqa: BLE001  tracing runs the user's code on proxies
        line = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        return Refusal("untraceable", f"torch.fx cannot trace its parent's forward: {line}")
    finally:
        if vars(parent) != attributes:
            vars(parent).clear()
            vars(parent).update(attributes)
    pairs = {
        str(node.target): found[1]
        for node in graph.nodes
        if (found := _pair(parent, node, modules)) is not None
    }
    counts: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            counts[str(node.target)] = counts.get(str(node.target), 0) + 1
    once = {name: act for name, act in pairs.items() if counts[name] == 1}

    def build(chosen: dict[str, str], backend: str | None) -> Forward:
        return _build(parent, graph, chosen, modules, backend, seen_call)

    return Fusable(once, build)


class _Tracer(torch.fx.Tracer):
    """Children are leaves; tensors of the seen call become placeholders, the rest stays as is."""

    def __init__(self, seen_call: SeenCall) -> None:
        super().__init__(param_shapes_constant=False)
        self._seen_call = seen_call

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        args, kwargs = self._seen_call
        values = [self._value(f"arg_{i}", a) for i, a in enumerate(args)]
        named = {k: self._value(f"kw_{k}", v) for k, v in kwargs.items()}
        return (lambda root: root_fn(root, *values, **named)), [self.root]

    def _value(self, name: str, kind: Any) -> Any:
        return self.create_proxy("placeholder", name, (), {}) if kind == (TENSOR,) else kind


def _pair(
    parent: nn.Module, node: torch.fx.Node, modules: dict[str, str]
) -> tuple[torch.fx.Node, str] | None:
    """(activation node, activation name) when ``node`` is a linear with one user, an activation."""
    if node.op != "call_module" or len(node.users) != 1 or len(node.args) != 1 or node.kwargs:
        return None
    if linear_kind(parent.get_submodule(str(node.target))) not in ("linear", "conv1d"):
        return None
    user = next(iter(node.users))
    name = _activation_of_node(user, node, modules)
    return None if name is None else (user, name)


def _activation_of_node(
    user: torch.fx.Node, linear: torch.fx.Node, modules: dict[str, str]
) -> str | None:
    """The activation that ``user`` applies to the linear's output and to nothing else, or None."""
    if user.op == "call_module":
        alone = user.args == (linear,) and not user.kwargs
        return modules.get(str(user.target)) if alone else None
    rest = pytree.tree_leaves((user.args[1:], user.kwargs))
    first = user.args[:1] == (linear,)
    if not first or any(isinstance(v, torch.fx.Node) for v in rest):
        return None
    args, kwargs, target = tuple(user.args[1:]), dict(user.kwargs), user.target
    if user.op == "call_method":
        found = recognise(lambda t: getattr(t, str(target))(*args, **kwargs))
    elif user.op == "call_function" and callable(target):
        found = recognise(lambda t: target(t, *args, **kwargs))
    else:
        return None
    return None if found is None else found.name


def _build(
    parent: nn.Module,
    graph: torch.fx.Graph,
    chosen: dict[str, str],
    modules: dict[str, str],
    backend: str | None,
    seen_call: SeenCall,
) -> Forward:
    fused = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for node in graph.nodes:
        if node.op == "output":
            fused.output(torch.fx.node.map_arg(node.args[0], lambda n: copies[n]))
            continue
        found = _pair(parent, node, modules) if str(node.target) in chosen else None
        source = node.args[0] if node.args else None
        before = _linear_before(node, parent, chosen, modules)
        if found is not None and isinstance(source, torch.fx.Node):
            child = fused.create_node("get_attr", str(node.target))
            copies[node] = fused.call_function(
                call_fused, (child, copies[source], found[1], backend)
            )
        elif before is not None:
            copies[node] = copies[before]  # the activation happened inside the fused call
        else:
            copies[node] = fused.node_copy(node, lambda n: copies[n])
    return _guarded(parent, _function_of(fused), seen_call)


def _linear_before(
    node: torch.fx.Node, parent: nn.Module, chosen: dict[str, str], modules: dict[str, str]
) -> torch.fx.Node | None:
    if not node.args or not isinstance(node.args[0], torch.fx.Node):
        return None
    linear = node.args[0]
    if linear.op != "call_module" or str(linear.target) not in chosen:
        return None
    found = _pair(parent, linear, modules)
    return linear if found is not None and found[0] is node else None


def _function_of(graph: torch.fx.Graph) -> Callable[..., Any]:
    """The graph as a plain function (parent, tensors in placeholder order)."""
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<fastlinear rewrite>", "exec"), scope)
    function: Callable[..., Any] = scope["forward"]
    return function


def _guarded(
    parent: nn.Module,
    traced: Callable[..., Any],
    seen_call: SeenCall,
) -> Forward:
    args, kwargs = seen_call
    kinds = (*args, *kwargs.values())
    tensors = tuple(i for i, k in enumerate(kinds) if k == (TENSOR,))
    fixed = tuple((i, k) for i, k in enumerate(kinds) if k != (TENSOR,))
    names, count = tuple(kwargs), len(args)
    original: Any = type(parent).forward
    watched = _watched(parent, original)

    def fits(self: nn.Module, values: tuple[Any, ...]) -> bool:
        for i in tensors:
            if not isinstance(values[i], Tensor):
                return False
        for i, kind in fixed:
            if not _same(values[i], kind):
                return False
        attributes = self.__dict__
        for name, value in watched.attributes:
            if not _same(attributes.get(name, self), value):
                return False
        for name, table, value in watched.members:
            if _member(attributes[table].get(name)) != value:
                return False
        return all(_same(scope.get(name), value) for scope, name, value in watched.outside)

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) == count and tuple(kwargs) == names:
            values = (*args, *kwargs.values()) if kwargs else args
            if fits(self, values):
                return traced(self, *[values[i] for i in tensors])
        return original(self, *args, **kwargs)

    return mark(forward)


@dataclass(frozen=True)
class _Watched:
    """What a traced forward depends on besides tensors, with the values seen when tracing."""

    attributes: tuple[tuple[str, Any], ...]
    members: tuple[tuple[str, str, int], ...]
    outside: tuple[tuple[dict[str, Any], str, Any], ...]


def _watched(parent: nn.Module, forward: FunctionType) -> _Watched:
    functions = _functions(parent, forward)
    read = {n for f in functions for n in f.__code__.co_names} | {"training"}
    attributes = tuple((n, v) for n, v in vars(parent).items() if n in read and _watchable(v))
    members = tuple(
        (n, table, _member(value))
        for table in ("_modules", "_parameters", "_buffers")
        for n, value in vars(parent)[table].items()
        if n in read
    )
    outside = tuple(
        (f.__globals__, n, f.__globals__[n])
        for f in functions
        for n in f.__code__.co_names
        if n in f.__globals__ and type(f.__globals__[n]) in _SIMPLE and not n.startswith("__")
    )
    return _Watched(attributes, members, outside)


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
# What tracing would get wrong


def _why_not(parent: nn.Module, forward: Any) -> str | None:
    if not isinstance(forward, FunctionType) or inspect.unwrap(forward) is not forward:
        return "is wrapped by a decorator"
    for function in _functions(parent, forward):
        if set(function.__code__.co_freevars) - {"__class__"}:
            return "reads variables of an enclosing function"
        reason = _why_not_code(function.__code__) or _why_not_state(parent, function)
        if reason is not None:
            return reason
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
    allowed = (*_SIMPLE, Tensor)
    for name in function.__code__.co_names:
        if name in ("_modules", "_parameters", "_buffers"):
            return f"reads self.{name}"
        if name not in vars(parent) or isinstance(vars(parent)[name], allowed):
            continue
        value = vars(parent)[name]
        if _is_function(value):
            continue
        return f"reads self.{name} ({type(value).__name__}), which cannot be watched"
    return None


def _why_not_arguments(seen_call: SeenCall) -> str | None:
    args, kwargs = seen_call
    for kind in (*args, *kwargs.values()):
        if isinstance(kind, tuple) and kind != (TENSOR,):
            return f"takes an argument of type {kind[1]}"
    return None


def _functions(parent: nn.Module, forward: FunctionType) -> list[FunctionType]:
    """``forward`` and the parent's own methods it calls, directly or not."""
    found: list[FunctionType] = []
    waiting = [forward]
    while waiting:
        function = waiting.pop()
        if function in found:
            continue
        found.append(function)
        for name in function.__code__.co_names:
            value = inspect.getattr_static(type(parent), name, None)
            if isinstance(value, property) and isinstance(value.fget, FunctionType):
                value = value.fget
            defined = isinstance(value, FunctionType) and not hasattr(nn.Module, name)
            if defined and isinstance(value, FunctionType):
                waiting.append(value)
            helper = function.__globals__.get(name)
            if isinstance(helper, FunctionType) and not helper.__module__.startswith("torch."):
                waiting.append(helper)
    return found
