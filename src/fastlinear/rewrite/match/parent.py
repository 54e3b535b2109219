"""Rewriting what a parent's forward does with its linears.

The parent's forward is traced with torch.fx, children kept as leaves; each linear → activation
pair, or each chain of linears, becomes one fused call, and the graph becomes a plain function of
the parent. A chain may go on through blocks that the parent calls: their traces are put into its.
Tracing fixes everything that is not a tensor, so the new forward first checks that all of that is
as it was when traced, and otherwise runs the class's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch.fx
from torch import nn

from fastlinear.profile.effects import class_forward
from fastlinear.profile.graph import IN_PLACE, Observed, Ungraded, Untraceable, trace
from fastlinear.rewrite.match.composed import composed
from fastlinear.rewrite.match.eligible import Refusal, refuse_module
from fastlinear.rewrite.match.links import Edit, Links
from fastlinear.rewrite.match.on_parameters import written_in
from fastlinear.rewrite.match.order import may_run_twice
from fastlinear.rewrite.swap.forwards import Forward
from fastlinear.rewrite.swap.guard import exactly, guarded
from fastlinear.rewrite.swap.traceable import why_not, why_not_arguments


class Fusable:
    """A parent's traced forward, and what one forward may fuse of it.

    Args:
        parent: the module traced.
        observed: the arguments the trace holds for.
        graph: its forward, children as leaves.
        modules: names inside the parent of activation modules → activation name.
        blocks: names inside the parent of modules that it calls, or that these call → their own
            forwards, which are seen as part of the parent's.

    ``called`` holds the names of the modules that the forward itself calls, and those of the
    weights of linears that it writes on parameters.
    """

    def __init__(
        self,
        parent: nn.Module,
        observed: Observed,
        graph: torch.fx.Graph,
        modules: Mapping[str, str],
        blocks: Mapping[str, Fusable] | None = None,
    ) -> None:
        self.parent, self.observed, self.graph, self.modules = parent, observed, graph, modules
        self.blocks = dict(blocks or {})
        self.links = self._links(self.blocks)
        called = (str(n.target) for n in graph.nodes if n.op == "call_module")
        self.called = frozenset((*called, *written_in(parent, graph)))

    @property
    def pairs(self) -> dict[str, str]:
        """The linear's name inside the parent → activation name."""
        return {name: act for name, (_, act) in self.links.pairs.items()}

    def flat(self, blocks: Mapping[str, Fusable], modules: Mapping[str, str]) -> Fusable:
        """The same with ``blocks`` as part of it."""
        return Fusable(self.parent, self.observed, self.graph, modules, blocks)

    def around(self, names: Iterable[str]) -> tuple[str, ...]:
        """The blocks that hold one of these modules."""
        inside = [path for name in names for path in _above(name)]
        return tuple(path for path in self.blocks if path in inside)

    def build(self, edits: Sequence[Edit], within: Iterable[str] = ()) -> Forward:
        """The new forward of the parent.

        Args:
            edits: what is to be replaced.
            within: linears whose blocks become part of it. The other blocks are called.
        """
        inside = self.around(within)
        links = self.links
        if len(inside) < len(self.blocks):
            links = self._links({path: self.blocks[path] for path in inside})
        fused, not_called = links.fused(edits)
        counts = any(node.target is exactly for node in fused.nodes)
        function = _function_of(fused)
        return guarded(self.parent, function, self.observed, not_called, counts, inside)

    def _links(self, blocks: Mapping[str, Fusable]) -> Links:
        graph = self.graph
        if blocks:
            graph = composed(graph, {path: block.graph for path, block in blocks.items()})
        return Links(self.parent, graph, self.modules)


def _above(name: str) -> Iterator[str]:
    """The names of the modules that hold one of this name."""
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def fusable(
    parent: nn.Module,
    observed: Observed,
    modules: Mapping[str, str],
    parts: int | None = None,
    *,
    sequential: bool = False,
) -> Fusable | Refusal:
    """What may be fused in the forward of ``parent``, or why it cannot be rewritten.

    Args:
        parent: the module whose forward calls linear and activation.
        observed: its arguments in one call.
        modules: names inside the parent of activation modules → activation name.
        parts: what a loop over the parts of a tensor finds; by default there is none.
        sequential: whether it may be a Sequential, whose children are then watched.
    """
    refusal = refuse_module(parent)
    if refusal is not None:
        return refusal
    plain = sequential and is_sequential(parent)
    reason = (None if plain else why_not(parent)) or why_not_arguments(observed)
    if reason is not None:
        return Refusal("untraceable", f"{type(parent).__qualname__}.forward {reason}.")
    try:
        graph = trace(parent, observed, runnable=True, parts=parts, exactly=exactly)
    except Untraceable as error:
        code = "gradients" if isinstance(error, Ungraded) else "untraceable"
        return Refusal(code, f"fastlinear cannot trace its parent's forward: {error}.")
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        if node.target is exactly and not may_run_twice(parent, nodes[:i]):
            why = "a loop over the parts of a tensor follows what must not run twice"
            return Refusal("untraceable", f"{type(parent).__qualname__}.forward: {why}.")
    return Fusable(parent, observed, graph, modules)


def is_sequential(module: nn.Module) -> bool:
    """Whether calling it calls its children one after the other, and does nothing else."""
    kind = type(module)
    own = nn.Sequential
    return class_forward(module) is own.forward and kind.__iter__ is own.__iter__  # type: ignore[attr-defined]


def _function_of(graph: torch.fx.Graph) -> Callable[..., Any]:
    """The graph as a plain function (parent, tensors in placeholder order)."""
    for node in graph.nodes:
        if node.target in IN_PLACE:  # written as ``n += 1`` a number would change for later readers
            node.target = _as_call(node.target)
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<fastlinear rewrite>", "exec"), scope)
    function: Callable[..., Any] = scope["forward"]
    return lambda parent, *tensors: function(parent, parent, *tensors)


def _as_call(operation: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def called(value: Any, other: Any) -> Any:
        return operation(value, other)

    return called
