"""From candidates to the forwards to exchange: one for each instance, whatever is fused in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastlinear.rewrite.exchange import forwards
from fastlinear.rewrite.exchange.swap import Swap
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.chain import Chain
from fastlinear.rewrite.match.chain_gated import GatedChain, GatedPart
from fastlinear.rewrite.match.chain_grouped import GroupedChain
from fastlinear.rewrite.match.chain_parent import BlockChain, ParentChain
from fastlinear.rewrite.match.chain_row import RowChain
from fastlinear.rewrite.match.chain_sequential import SequentialChain
from fastlinear.rewrite.match.chain_towers import TowerChain
from fastlinear.rewrite.rules.linear_act import inside


def swaps_of(candidates: Iterable[Candidate]) -> list[Swap]:
    """The forwards to exchange for these candidates."""
    found: list[Swap] = []
    passing: set[str] = set()
    chains: dict[str, Chain] = {}
    parents: dict[str, list[Candidate]] = {}
    for c in candidates:
        if c.chain is not None:
            chains.setdefault(c.chain.key, c.chain)
        elif c.route == "parent":
            assert c.parent_fqn is not None
            parents.setdefault(c.parent_fqn, []).append(c)
        else:
            found.append(Swap(c.fqn, c.module, c.forward()))
            if c.route == "instance" and c.activation_fqn not in passing:
                assert c.activation_fqn is not None
                assert c.activation_module is not None
                passing.add(c.activation_fqn)
                found.append(Swap(c.activation_fqn, c.activation_module, forwards.identity()))
    alone = (SequentialChain, GatedChain, GroupedChain)
    found += [c.swap() for c in chains.values() if isinstance(c, alone)]
    kinds = (ParentChain, RowChain, GatedPart, TowerChain)
    traced = [c for c in chains.values() if isinstance(c, kinds)]
    for fqn in dict.fromkeys((*parents, *(c.fqn for c in traced))):
        found.append(_parent_swap(fqn, parents.get(fqn, []), [c for c in traced if c.fqn == fqn]))
    return found


def _parent_swap(
    fqn: str,
    pairs: list[Candidate],
    chains: Sequence[ParentChain | RowChain | GatedPart | TowerChain],
) -> Swap:
    """One forward for all that is fused in it: of the trace that goes through blocks, where a
    chain does."""
    fusable = chains[0].fusable if chains else pairs[0].pairs
    fusable = next((c.fusable for c in chains if isinstance(c, BlockChain)), fusable)
    parent = chains[0].module if chains else pairs[0].parent
    assert fusable is not None
    assert parent is not None
    chosen = {inside(fqn, c.fqn) or "": c.activation for c in pairs}
    backend = pairs[0].backend if pairs else None
    runs = [c for c in chains if isinstance(c, ParentChain)]
    chain_backend = runs[0].backend if runs else None
    fast = any(c.fast for c in runs)  # all alike: the settings say it
    rows = [c.row for c in chains if isinstance(c, RowChain)]
    gated = [c for c in chains if isinstance(c, GatedPart)]
    gates, gate_backend = [c.gate for c in gated], gated[0].backend if gated else None
    towers = [(c.group, c.way) for c in chains if isinstance(c, TowerChain)]
    more = rows, fast, gates, gate_backend, towers
    made = fusable.build(chosen, backend, [c.run for c in runs], chain_backend, *more)
    return Swap(fqn, parent, made)
