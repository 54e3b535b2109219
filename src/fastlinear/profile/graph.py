"""Who reads a Linear's output, according to the code of the module that calls it."""

from __future__ import annotations

import copy
import dataclasses
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from fastlinear.core.interrupts import hold
from fastlinear.profile.effects import why_not_run
from fastlinear.profile.not_followed import in_words
from fastlinear.profile.positional import positional

_FAILURES = (  # what tracing a forward that FX cannot follow may raise
    fx.proxy.TraceError,
    RuntimeError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    NameError,
    AssertionError,
    ArithmeticError,
    ImportError,
)


@dataclass(frozen=True)
class Use:
    """One reader of a value.

    Attributes:
        what: ``"module"``, ``"function"`` or ``"output"`` (returned by the forward).
        name: readable: the module's path inside the parent, or the function's name.
        module: the module, if it is one.
        call: the reader as a function of that value alone, if it reads no other tensor.
    """

    what: str
    name: str
    module: nn.Module | None = None
    call: Callable[[Tensor], Any] | None = None


class Untraceable(Exception):
    """The forward cannot be followed symbolically; the text says why."""


class Ungraded(Untraceable):
    """A part of the forward runs without gradients, or by an autograd function of its own."""


@dataclass(frozen=True)
class Observed:
    """Arguments of a module call with every tensor replaced by a mark."""

    leaves: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Observed:
        """Keep the arguments' structure and their values that are no tensors."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        return Observed(tuple(TENSOR if isinstance(v, Tensor) else v for v in leaves), spec)

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``(args, kwargs)`` with ``TENSOR`` in place of every tensor."""
        args, kwargs = pytree.tree_unflatten(list(self.leaves), self.spec)
        return args, kwargs


class _Tensor:
    def __repr__(self) -> str:
        return "TENSOR"


TENSOR = _Tensor()
"""Stands for a tensor among observed arguments."""


def trace(
    parent: nn.Module,
    observed: Observed,
    *,
    runnable: bool = False,
    parts: int | None = None,
    exactly: Callable[[Any, int], Any] | None = None,
) -> fx.Graph:
    """The graph of ``parent.forward`` for arguments like the observed ones, children as leaves.

    Tensors become placeholders ``x0, x1, …`` in order; other arguments keep their values, and
    the graph holds for those values only. By default the graph returns a flat tuple of all
    proxies in the result, enough to see who reads what; a ``runnable`` one returns what the
    forward returns.

    The forward's own code runs once on symbols, on a copy of the parent that shares its tensors and
    on copies of the other arguments: neither sees what it writes to attributes, lists or counters.

    ``parts``: what a loop over a tensor, or over the parts of one, finds; by default such a loop
    cannot be followed. The graph holds only where that is so; ``exactly(value, parts)`` is put into
    it before the loop, to see to that.

    Raises:
        Untraceable: the forward branches on tensor values, is patched on the instance, uses what
            FX cannot follow, computes a part without gradients or by an autograd function of its
            own, or what it does would reach objects outside the model. In the last case none of
            its code has run.
    """
    if "forward" in parent.__dict__:
        raise Untraceable("its forward is replaced on the instance")
    reason = why_not_run(parent)
    if reason is not None:
        raise Untraceable(f"it {reason}")
    copied, observed = stand_in(parent, observed)
    try:
        with warnings.catch_warnings(), torch.inference_mode(False), torch.enable_grad():
            warnings.simplefilter("ignore")
            with hold():  # torch.fx patches nn.Module meanwhile
                graph = _ParentTracer(observed, runnable, parts, exactly).trace(copied)
    except Untraceable:
        raise
    except _FAILURES as error:
        raise Untraceable(in_words(error)) from error
    for node in graph.nodes:
        if node.op in ("call_function", "call_method") and node.kwargs:
            node.args, node.kwargs = positional(node.target, node.args, node.kwargs)
    if runnable:
        own = vars(parent)
        known = {*own, *own["_modules"], *own["_parameters"], *own["_buffers"]}
        for node in graph.nodes:
            if node.op == "get_attr" and str(node.target).partition(".")[0] not in known:
                # computed while tracing, from no input: random numbers, a constant, …
                raise Untraceable("it makes a tensor that a trace would keep as it is now")
    return graph


def stand_in(parent: nn.Module, observed: Observed) -> tuple[nn.Module, Observed]:
    """Copies of the parent, tensors shared, and of the arguments, as if nobody else held them.

    Raises Untraceable where they cannot be copied.
    """
    held = (v for m in parent.modules() for v in vars(m).values())
    found = [v for v in pytree.tree_leaves(list(held)) if isinstance(v, Tensor)]
    tensors = [*parent.parameters(), *parent.buffers(), *found]
    memo: dict[int, Any] = {id(t): t for t in (*tensors, TENSOR)}
    try:
        copied, leaves = copy.deepcopy((parent, observed.leaves), memo)
    except Exception as error:  # whatever the objects it holds may raise
        raise Untraceable(
            f"it holds what cannot be copied ({type(error).__name__}: {error})"
        ) from error
    return copied, Observed(leaves, observed.spec)


def uses_of(graph: fx.Graph, parent: nn.Module, module: nn.Module) -> list[tuple[Use, ...]]:
    """For every call of ``module`` in the graph, the readers of its output."""
    return [
        tuple(_use(user, node, parent) for user in node.users)
        for node in graph.nodes
        if node.op == "call_module" and parent.get_submodule(str(node.target)) is module
    ]


def _use(user: fx.Node, value: fx.Node, parent: nn.Module) -> Use:
    if user.op == "output":
        return Use("output", "output")
    if user.op == "call_module":
        path = str(user.target)
        alone = user.args == (value,) and not user.kwargs
        module = parent.get_submodule(path)
        return Use("module", path, module, module.forward if alone else None)
    name = user.target if isinstance(user.target, str) else _function_name(user.target)
    rest = (user.args[1:], user.kwargs)
    alone = user.args[:1] == (value,) and not _nodes(rest)
    if not alone:
        return Use("function", str(name))
    args, kwargs, target = tuple(user.args[1:]), dict(user.kwargs), user.target
    if user.op == "call_method":
        return Use("function", str(name), call=lambda t: getattr(t, str(target))(*args, **kwargs))
    assert callable(target)
    return Use("function", str(name), call=lambda t: target(t, *args, **kwargs))


def _nodes(value: Any) -> list[fx.Node]:
    return [v for v in pytree.tree_leaves(value) if isinstance(v, fx.Node)]


def _function_name(function: Any) -> str:
    return getattr(function, "__name__", None) or type(function).__name__


class _ParentTracer(fx.Tracer):
    """Traces one module with all its children as leaves, for one kind of call."""

    proxy_buffer_attributes = True  # a branch on a buffer's value must not be followed silently

    def __init__(
        self,
        observed: Observed,
        runnable: bool,
        parts: int | None = None,
        exactly: Callable[[Any, int], Any] | None = None,
    ) -> None:
        super().__init__()
        self.observed = observed
        self.runnable = runnable
        self.parts = parts
        self.exactly = exactly
        # lists among the arguments and the parent's attributes, and what they held
        self.given: list[tuple[list[Any], list[Any]]] = []

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """A step of the graph, which does not say in what mode of gradients it ran."""
        if not torch.is_grad_enabled():
            raise Ungraded("a part of it runs without gradients, or with a backward of its own")
        return super().create_node(*args, **kwargs)

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """The symbol of a step, whose in-place operators are recorded as what they are."""
        return Proxy(node, self)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: dict[str, Any]
    ) -> Any:
        """A child's call; none that is handed such a list."""
        if any(own is v for own, _ in self.given for v in (*args, *kwargs.values())):
            raise Untraceable("it hands a list that others hold to a module, which may change it")
        return super().call_module(m, forward, args, kwargs)

    def look_at_lists(self, result: Any) -> None:
        """Refuse a forward that changes a list that others hold, or hands it back."""
        for own, before in self.given:
            if len(own) != len(before) or any(a is not b for a, b in zip(own, before, strict=True)):
                raise Untraceable("it changes a list that others hold")
            if _holds(result, own):
                raise Untraceable("it hands back a list that others hold")

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """The parts of a value that is looped over."""
        if self.parts is None:
            return super().iter(obj)  # type: ignore[no-any-return]
        part: Any = obj
        if self.exactly is not None:
            part = self.create_proxy("call_function", self.exactly, (obj, self.parts), {})
        return iter([part[i] for i in range(self.parts)])

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        leaves, proxies = list(self.observed.leaves), []
        where = [i for i, v in enumerate(leaves) if v is TENSOR]
        for number, _ in enumerate(where):
            proxies.append(self.create_proxy("placeholder", f"x{number}", (), {}))

        def forward(root: nn.Module, *tensors: Any) -> Any:
            for i, t in zip(where, tensors, strict=True):
                leaves[i] = t
            args, kwargs = pytree.tree_unflatten(leaves, self.observed.spec)
            if not self.runnable:
                return tuple(_proxies(root_fn(root, *args, **kwargs)))
            held = (*args, *kwargs.values(), *vars(root).values())
            self.given = [(v, list(v)) for v in held if type(v) is list]
            result = root_fn(root, *args, **kwargs)
            self.look_at_lists(result)
            return result

        return forward, [self.root, *proxies]


_AUGMENTED = {
    *("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod"),
    *("pow", "lshift", "rshift", "and", "xor", "or"),
}
IN_PLACE = frozenset(getattr(operator, f"i{name}") for name in _AUGMENTED)
"""What ``x += y`` and the like are recorded as."""


class Proxy(fx.Proxy):
    """A symbol on which ``x += y`` writes to x; fx.Proxy would record ``x = x + y``."""

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return Attribute(self, k)


class Attribute(fx.proxy.Attribute, Proxy):
    """An attribute of a symbol: ``x.T``, say, through which x may be written to."""


def _recorded(name: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    function = getattr(operator, name)

    def write(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})

    return write


for _name in _AUGMENTED:
    setattr(Proxy, f"__i{_name}__", _recorded(f"i{_name}"))


def _holds(value: Any, own: list[Any]) -> bool:
    """Whether a result is this list, or has it somewhere in it."""
    if value is own:
        return True
    inside = value.values() if isinstance(value, Mapping) else value
    return isinstance(value, list | tuple | Mapping) and any(_holds(v, own) for v in inside)


def _proxies(value: Any) -> Iterator[fx.Proxy]:
    """The proxies nested in a forward's result, whatever wraps them."""
    if isinstance(value, fx.Proxy):
        yield value
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _proxies(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _proxies(v)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for f in dataclasses.fields(value):
            yield from _proxies(getattr(value, f.name))
    elif isinstance(value, torch.Tensor) or value is None:
        return
