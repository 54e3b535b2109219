"""Rewriting an activation that follows a linear in a parent's forward.

The parent's forward is traced with torch.fx, children kept as leaves; each linear → activation
pair becomes one fused call, and the graph becomes a plain function of the parent. Tracing fixes
everything that is not a tensor, so the new forward first checks that all of that is as it was when
traced, and otherwise runs the class's own forward.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import nn
from torch.utils import _pytree as pytree

from fastlinear.profile.graph import Observed, Untraceable, trace
from fastlinear.profile.recognise import recognise
from fastlinear.rewrite.eligible import Refusal, linear_kind, refuse_module
from fastlinear.rewrite.forwards import Forward, call_fused_conv1d, call_fused_linear
from fastlinear.rewrite.guard import guarded
from fastlinear.rewrite.traceable import why_not, why_not_arguments


@dataclass(frozen=True)
class Fusable:
    """A parent whose forward holds linear → activation pairs.

    Attributes:
        pairs: the linear's name inside the parent → activation name.
        build: pairs to fuse, and a forced backend or None → the new forward of the parent.
    """

    pairs: dict[str, str]
    build: Callable[[dict[str, str], str | None], Forward]


def fusable(parent: nn.Module, observed: Observed, modules: dict[str, str]) -> Fusable | Refusal:
    """The linear → activation pairs in the forward of ``parent``, or why it cannot be rewritten.

    Args:
        parent: the module whose forward calls linear and activation.
        observed: its arguments in one call.
        modules: names inside the parent of activation modules → activation name.
    """
    refusal = refuse_module(parent)
    if refusal is not None:
        return refusal
    reason = why_not(parent) or why_not_arguments(observed)
    if reason is not None:
        return Refusal("untraceable", f"{type(parent).__qualname__}.forward {reason}.")
    try:
        graph = trace(parent, observed, runnable=True)
    except Untraceable as error:
        return Refusal("untraceable", f"torch.fx cannot trace its parent's forward: {error}")
    chains = _Chains(parent, graph, modules)

    def build(chosen: dict[str, str], backend: str | None) -> Forward:
        fused, passed_over = chains.fused(chosen, backend)
        return guarded(parent, _function_of(fused), observed, passed_over)

    return Fusable({name: act for name, (_, act) in chains.pairs.items()}, build)


class _Chains:
    """The linears of a traced forward that are called once and read by one activation alone.

    ``pairs``: the linear's name → (activation node, activation name).
    """

    def __init__(self, parent: nn.Module, graph: torch.fx.Graph, modules: dict[str, str]) -> None:
        self.parent, self.graph, self.modules = parent, graph, modules
        called = [str(n.target) for n in graph.nodes if n.op == "call_module"]
        self.pairs: dict[str, tuple[torch.fx.Node, str]] = {}
        for node in graph.nodes:
            found = self._pair(node)
            if found is not None and called.count(str(node.target)) == 1:
                self.pairs[str(node.target)] = found

    def _pair(self, node: torch.fx.Node) -> tuple[torch.fx.Node, str] | None:
        if node.op != "call_module" or len(node.users) != 1 or len(node.args) != 1 or node.kwargs:
            return None
        if linear_kind(self.parent.get_submodule(str(node.target))) not in ("linear", "conv1d"):
            return None
        user = next(iter(node.users))
        name = self._activation(user, node)
        return None if name is None else (user, name)

    def _activation(self, user: torch.fx.Node, linear: torch.fx.Node) -> str | None:
        """The activation ``user`` applies to the linear's output and to nothing else, or None."""
        if user.op == "call_module":
            alone = user.args == (linear,) and not user.kwargs
            return self.modules.get(str(user.target)) if alone else None
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

    def fused(
        self, chosen: dict[str, str], backend: str | None
    ) -> tuple[torch.fx.Graph, tuple[str, ...]]:
        """The graph with the chosen pairs as fused calls, and the activation modules that it no
        longer calls."""
        graph = torch.fx.Graph()
        copies: dict[torch.fx.Node, torch.fx.Node] = {}
        ends = {self.pairs[name][0] for name in chosen}
        passed_over = []
        for node in self.graph.nodes:
            name = str(node.target)
            if node.op == "output":
                graph.output(torch.fx.node.map_arg(node.args[0], lambda n: copies[n]))
            elif node.op == "call_module" and name in chosen:
                conv1d = linear_kind(self.parent.get_submodule(name)) == "conv1d"
                call = call_fused_conv1d if conv1d else call_fused_linear
                child = graph.create_node("get_attr", name)
                source = torch.fx.node.map_arg(node.args[0], lambda n: copies[n])
                copies[node] = graph.call_function(call, (child, source, chosen[name], backend))
            elif node in ends:
                copies[node] = copies[node.args[0]]  # it happened inside the fused call
                if node.op == "call_module":
                    passed_over.append(name)
            else:
                copies[node] = graph.node_copy(node, lambda n: copies[n])
        return graph, tuple(dict.fromkeys(passed_over))


def _function_of(graph: torch.fx.Graph) -> Callable[..., Any]:
    """The graph as a plain function (parent, tensors in placeholder order)."""
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<fastlinear rewrite>", "exec"), scope)
    function: Callable[..., Any] = scope["forward"]
    return function
