"""What an experiment's cases are made of, by the family of the case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.contenders import diagonal_linear as pseudo_linear
from benchmarks.contenders import gated_mlp as gated
from benchmarks.contenders import graphed, linear_act, models
from benchmarks.contenders import grouped_linear as groups
from benchmarks.contenders import linear_bias as bias
from benchmarks.contenders import linear_modules as modules
from benchmarks.contenders import mlp as chains
from benchmarks.contenders import ragged_linear as ragged
from benchmarks.contenders import unequal_linear as unequal
from benchmarks.contenders.dispatched import tune_pieces
from benchmarks.harness.case import Case
from benchmarks.harness.peer import Peer
from benchmarks.harness.work import Work, make_work
from fastlinear.families.linear.selection import choices_of, problem_of, tuning_order
from fastlinear.families.mlp import selection as mlp
from fastlinear.fastpath import autograd_node, lookup


@dataclass(frozen=True)
class Kind:
    """How cases of one family are prepared.

    Attributes:
        make_work: draws the tensors.
        peers: all contenders, able to take part or not.
        chosen: what dispatch takes for our contender, in a CUDA graph or not.
        tune: tunes fastlinear for a case.
    """

    make_work: Callable[[Case, torch.device], Any]
    peers: Callable[[Case], tuple[Peer, ...]]
    chosen: Callable[[Case, Any, bool], dict[str, str]] = lambda *_: {}
    tune: Callable[[Case, torch.device], None] = lambda *_: None


def _tune(case: Case, device: torch.device) -> None:
    """Both regimes on a GPU: wall time outside CUDA graphs, device time inside."""
    tune_pieces(tuning_order, linear_act.problem_of(case), device)
    if case.dim("L") > 1:
        lookup.wait(lookup.PATIENCE_S)
        tune_pieces(mlp.tuning_order, linear_act.chain_of(case), device)


def _chosen(case: Case, work: Work, captured: bool) -> dict[str, str]:
    """Piece → backend and source: what dispatch takes for one layer, in a CUDA graph or not."""
    if case.dim("L") > 1:
        p = replace(linear_act.chain_of(case), captured=captured and case.device == "cuda")
        made = mlp.choices_of(p)
        return {f"mlp {c.problem.piece}": f"{c.backend.name} ({c.source})" for c in made}
    stack = work.stacks[0]
    layer = stack.x, stack.weights[0], stack.biases[0], stack.activation
    made = choices_of(problem_of(*layer, case.needs_grad, captured and stack.x.is_cuda))
    return {c.problem.piece: f"{c.backend.name} ({c.source})" for c in made}


def _await_fastpath(case: Case, device: torch.device) -> None:
    """There is nothing to tune, but calls are not timed before the compiled fast path is there."""
    lookup.wait(lookup.PATIENCE_S)
    autograd_node.wait(lookup.PATIENCE_S)


KINDS: dict[str, Kind] = {
    "linear_act": Kind(make_work, linear_act.peers, _chosen, _tune),
    "linear_modules": Kind(make_work, modules.peers, _chosen, _tune),
    "linear": Kind(bias.make_work, bias.peers),
    "mlp": Kind(make_work, chains.peers, chains.chosen, chains.tune),
    "diagonal_linear": Kind(
        pseudo_linear.make_work, pseudo_linear.peers, pseudo_linear.chosen, pseudo_linear.tune
    ),
    "grouped_linear": Kind(groups.make_work, groups.peers, groups.chosen, groups.tune),
    "ragged_linear": Kind(ragged.make_work, ragged.peers, ragged.chosen),
    "unequal_linear": Kind(unequal.make_work, unequal.peers, unequal.chosen, _await_fastpath),
    "gated_mlp": Kind(gated.make_work, gated.peers, gated.chosen, gated.tune),
    "graphed": Kind(graphed.make_work, graphed.peers),
    "model": Kind(models.make_work, models.peers, lambda case, work, _: work.chosen()),
}
"""Family of a case → how it is prepared."""
