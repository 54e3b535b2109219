"""From candidates to the forwards to exchange: one for each instance, whatever is fused in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastlinear.rewrite.exchange import forwards
from fastlinear.rewrite.exchange.sequential_forward import Segment, sequential_forward
from fastlinear.rewrite.exchange.swap import Swap
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import Candidate, Chain
from fastlinear.rewrite.match.chain_gated import GatedChain, GatedPart
from fastlinear.rewrite.match.chain_grouped import GroupedChain
from fastlinear.rewrite.match.chain_parent import BlockChain, ParentChain
from fastlinear.rewrite.match.chain_row import RowChain
from fastlinear.rewrite.match.chain_sequential import SequentialChain
from fastlinear.rewrite.match.chain_towers import TowerChain
from fastlinear.rewrite.match.links import Run
from fastlinear.rewrite.match.sites import inside


def swaps_of(candidates: Iterable[Candidate]) -> list[Swap]:
    """The forwards to exchange for these candidates."""
    found: list[Swap] = []
    chains: dict[str, Chain | Fusion] = {}
    parents: dict[str, list[Candidate]] = {}
    for c in candidates:
        if c.chain is not None:
            chains.setdefault(c.chain.key, c.chain)
        elif c.parent_fqn is not None and c.route == "parent":
            parents.setdefault(c.parent_fqn, []).append(c)
        else:
            found.append(Swap(c.fqn, c.module, forwards.plain_linear(c.module, c.backend)))
    for chain in chains.values():
        for block in chain.blocks if isinstance(chain, BlockChain) else ():
            parents.setdefault(chain.fqn, []).extend(parents.pop(block, ()))
    alone = (GatedChain, GroupedChain)
    found += [c.swap() for c in chains.values() if isinstance(c, alone)]
    rest = [c for c in chains.values() if not isinstance(c, alone)]
    for fqn in dict.fromkeys((*parents, *(c.fqn for c in rest))):
        pairs, here = parents.get(fqn, []), [c for c in rest if c.fqn == fqn]
        traced = [c for c in here if not isinstance(c, SequentialChain)]
        if traced or any(c.pairs is not None for c in pairs):
            found.append(_parent_swap(fqn, pairs, here))
        else:
            found.append(_sequential_swap(fqn, pairs, here))
    return found


def _sequential_swap(fqn: str, pairs: list[Candidate], chains: Sequence[Chain | Fusion]) -> Swap:
    """One forward for all that is fused in a Sequential."""
    sequential = chains[0].module if chains else pairs[0].parent
    assert sequential is not None
    segments = [(c.segment, c.backend) for c in chains if isinstance(c, SequentialChain)]
    for c in pairs:
        assert c.activation_module is not None
        places = Segment.pairs(sequential, c.module, c.activation_module, c.activation)
        segments += [(segment, c.backend) for segment in places]
    return Swap(fqn, sequential, sequential_forward(segments, sequential))


def _parent_swap(fqn: str, pairs: list[Candidate], chains: Sequence[Chain | Fusion]) -> Swap:
    """One forward for all that is fused in it: of the trace that goes through blocks, where a
    chain does."""
    kinds = (BlockChain, ParentChain, RowChain, GatedPart, TowerChain)
    traces = [c.fusable for kind in kinds[:2] for c in chains if isinstance(c, kind)]
    puts = [c.forward for c in chains if isinstance(c, Fusion) and c.forward is not None]
    traces += [put.fusable for put in puts]
    traces += [c.fusable for kind in kinds[2:] for c in chains if isinstance(c, kind)]
    fusable = next(iter((*traces, *(c.pairs for c in pairs if c.pairs is not None))))
    parent = chains[0].module if chains else pairs[0].parent
    assert parent is not None
    named = {inside(fqn, c.fqn) or "": c.activation for c in pairs}
    # of a pair in a block the trace may not show that its activation reads nothing else
    chosen = {n: a for n, a in named.items() if a == "none" or n in fusable.pairs}
    backend = pairs[0].backend if pairs else None
    followed = [c for c in chains if isinstance(c, ParentChain | SequentialChain)]
    chain_backend = followed[0].backend if followed else None
    rows = [c.row for c in chains if isinstance(c, RowChain)]
    gated = [c for c in chains if isinstance(c, GatedPart)]
    gates, gate_backend = [c.gate for c in gated], gated[0].backend if gated else None
    towers = [(c.group, c.way) for c in chains if isinstance(c, TowerChain)]
    more = rows, gates, gate_backend, towers, [put.edit for put in puts]
    made = fusable.build(chosen, backend, [_run(c) for c in followed], chain_backend, *more)
    return Swap(fqn, parent, made)


def _run(chain: ParentChain | SequentialChain) -> Run:
    """The chain by names inside the module whose forward makes the call."""
    if isinstance(chain, ParentChain):
        return chain.run
    names = tuple(inside(chain.fqn, name) or "" for name in chain.names)
    return Run(names, chain.activation, chain.final_activation)
