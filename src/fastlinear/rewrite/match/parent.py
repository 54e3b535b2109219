"""Rewriting what a parent's forward does with its linears.

The parent's forward is traced with torch.fx, children kept as leaves; each linear → activation
pair, or each chain of linears, becomes one fused call, and the graph becomes a plain function of
the parent. Tracing fixes everything that is not a tensor, so the new forward first checks that all
of that is as it was when traced, and otherwise runs the class's own forward.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.fx
from torch import nn

from fastlinear.profile.graph import Observed, Untraceable, trace
from fastlinear.rewrite.exchange.forwards import Forward
from fastlinear.rewrite.exchange.guard import guarded
from fastlinear.rewrite.exchange.parts import exactly
from fastlinear.rewrite.exchange.tower_forward import Way
from fastlinear.rewrite.exchange.traceable import why_not, why_not_arguments
from fastlinear.rewrite.match.eligible import Refusal, refuse_module
from fastlinear.rewrite.match.gates import Gate, Gates
from fastlinear.rewrite.match.links import Links, Run
from fastlinear.rewrite.match.rows import may_run_twice
from fastlinear.rewrite.match.towers import Abreast, Towers


@dataclass(frozen=True)
class Fusable:
    """A parent whose forward holds linear → activation pairs.

    Attributes:
        pairs: the linear's name inside the parent → activation name.
        runs: names of linears that may take part → the chains among them.
        rows: the same → those among them that read one value.
        loops: the same → those that read the parts of one value, by part.
        gates: the gated MLPs there are.
        towers: the Sequentials that do not wait for each other.
        build: pairs to fuse and a forced backend or None, then chains to fuse and theirs, then
            rows and loops to fuse, whether chains may multiply fast, gated MLPs and theirs, towers,
            each with its way → the new forward of the parent.
    """

    pairs: dict[str, str]
    runs: Callable[[Container[str]], list[Run]]
    rows: Callable[[Container[str]], list[tuple[str, ...]]]
    loops: Callable[[Container[str]], list[tuple[str, ...]]]
    gates: Callable[[], Gates]
    towers: Callable[[], Towers]
    build: Callable[..., Forward]


def fusable(
    parent: nn.Module, observed: Observed, modules: dict[str, str], parts: int | None = None
) -> Fusable | Refusal:
    """The linear → activation pairs in the forward of ``parent``, or why it cannot be rewritten.

    Args:
        parent: the module whose forward calls linear and activation.
        observed: its arguments in one call.
        modules: names inside the parent of activation modules → activation name.
        parts: what a loop over the parts of a tensor finds; by default there is none.
    """
    refusal = refuse_module(parent)
    if refusal is not None:
        return refusal
    reason = why_not(parent) or why_not_arguments(observed)
    if reason is not None:
        return Refusal("untraceable", f"{type(parent).__qualname__}.forward {reason}.")
    try:
        graph = trace(parent, observed, runnable=True, parts=parts, exactly=exactly)
    except Untraceable as error:
        return Refusal("untraceable", f"torch.fx cannot trace its parent's forward: {error}")
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        if node.target is exactly and not may_run_twice(parent, nodes[:i]):
            why = "a loop over the parts of a tensor follows what must not run twice"
            return Refusal("untraceable", f"{type(parent).__qualname__}.forward: {why}.")
    links = Links(parent, graph, modules)

    def build(
        pairs: Mapping[str, str],
        backend: str | None,
        runs: Sequence[Run] = (),
        chain_backend: str | None = None,
        rows: Sequence[tuple[str, ...]] = (),
        fast: bool = False,
        gates: Sequence[Gate] = (),
        gate_backend: str | None = None,
        towers: Sequence[tuple[Abreast, Way]] = (),
    ) -> Forward:
        more = rows, fast, gates, gate_backend, towers
        fused, passed_over = links.fused(pairs, backend, runs, chain_backend, *more)
        counts = any(node.target is exactly for node in fused.nodes)
        return guarded(parent, _function_of(fused), observed, passed_over, counts)

    pairs = {name: act for name, (_, act) in links.pairs.items()}
    return Fusable(pairs, links.runs, links.rows, links.loops, links.gates, links.towers, build)


def _function_of(graph: torch.fx.Graph) -> Callable[..., Any]:
    """The graph as a plain function (parent, tensors in placeholder order)."""
    code = graph.python_code("self")
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, "<fastlinear rewrite>", "exec"), scope)
    function: Callable[..., Any] = scope["forward"]
    return lambda parent, *tensors: function(parent, parent, *tensors)


def gates_seen(parent: nn.Module, observed: Observed) -> list[Gate]:
    """The gated MLPs in a forward that must not be rewritten; none where it cannot be traced."""
    try:
        graph = trace(parent, observed, runnable=True)
    except Untraceable:
        return []
    return Links(parent, graph, {}).gates().found
