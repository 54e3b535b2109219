"""From candidates to the forwards to swap: one for each instance, whatever is fused in it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fastlinear.rewrite.fusion import Fusion, InCalls, InForward, InSequential, WholeForward
from fastlinear.rewrite.match import edits
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.sites import inside
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.modules import Swap
from fastlinear.rewrite.swap.sequential_forward import Segment, sequential_forward
from fastlinear.rewrite.swap.shared_calls import caller_forward, shared_linear


def swaps_of(candidates: Iterable[Candidate]) -> list[Swap]:
    """The forwards to swap for these candidates."""
    found: list[Swap] = []
    chains: dict[str, Fusion] = {}
    parents: dict[str, list[Candidate]] = {}
    for c in candidates:
        if c.chain is not None:
            chains.setdefault(c.chain.key, c.chain)
        elif c.parent_fqn is not None and c.route == "parent":
            parents.setdefault(c.parent_fqn, []).append(c)
        else:
            found.append(Swap(c.fqn, c.module, forwards.plain_linear(c.module, c.backend)))
    for chain in chains.values():
        for block in chain.blocks:
            parents.setdefault(chain.fqn, []).extend(parents.pop(block, ()))
    rest, callers = [], dict[str, list[Fusion]]()
    for chain in chains.values():
        if isinstance(chain.forward, WholeForward):
            found.append(Swap(chain.fqn, chain.module, chain.forward.make()))
        elif isinstance(chain.forward, InCalls):
            callers.setdefault(chain.fqn, []).append(chain)
        else:
            rest.append(chain)
    for fqn, here in callers.items():
        found += _shared_swaps(fqn, here)
    for fqn in dict.fromkeys((*parents, *(c.fqn for c in rest))):
        pairs, here = parents.get(fqn, []), [c for c in rest if c.fqn == fqn]
        traced = [c for c in here if not isinstance(c.forward, InSequential)]
        if traced or any(c.pairs is not None for c in pairs):
            found.append(_parent_swap(fqn, pairs, here))
        else:
            found.append(_sequential_swap(fqn, pairs, here))
    return found


def _shared_swaps(fqn: str, chains: Sequence[Fusion]) -> Iterator[Swap]:
    """One forward for the module that calls them, and one for each linear."""
    groups = tuple(c.forward.group for c in chains if isinstance(c.forward, InCalls))
    yield Swap(fqn, chains[0].module, caller_forward(chains[0].module, groups))
    for c in (member for chain in chains for member in chain.members):
        yield Swap(c.fqn, c.module, shared_linear(c.module))


def _sequential_swap(fqn: str, pairs: list[Candidate], chains: Sequence[Fusion]) -> Swap:
    """One forward for all that is fused in a Sequential."""
    sequential = chains[0].module if chains else pairs[0].parent
    assert sequential is not None
    forward = ((c.forward, c.dispatch.backend) for c in chains)
    segments = [(how.segment, back) for how, back in forward if isinstance(how, InSequential)]
    for c in pairs:
        assert c.activation_module is not None
        places = Segment.pairs(sequential, c.module, c.activation_module, c.activation)
        segments += [(segment, c.backend) for segment in places]
    return Swap(fqn, sequential, sequential_forward(segments, sequential))


def _parent_swap(fqn: str, pairs: list[Candidate], chains: Sequence[Fusion]) -> Swap:
    """One forward for all that is fused in it: of the trace that goes through blocks, where a
    chain does."""
    calls = [c.forward for c in chains if isinstance(c.forward, InForward)]
    traces = [call.fusable for call in calls]
    traces += [c.pairs for c in pairs if c.pairs is not None]
    fusable = max(traces, key=lambda trace: (len(trace.blocks), len(trace.modules)))
    parent = chains[0].module if chains else pairs[0].parent
    assert parent is not None
    found, within = [call.edit for call in calls], [name for call in calls for name in call.within]
    for chain in chains:
        if isinstance(chain.forward, InSequential):
            found.append(edits.chain(chain.forward.run, chain.dispatch.backend))
            within += chain.forward.run.linears
    for c in pairs:
        name = inside(fqn, c.fqn) or ""
        # of a pair in a block the trace may not show that its activation reads nothing else
        if c.activation == "none" or name in fusable.pairs:
            found.append(edits.linear(name, c.activation, c.backend))
    return Swap(fqn, parent, fusable.build(found, within))
