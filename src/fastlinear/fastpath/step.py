"""The fast path's tables of the families' steps: what tuning times goes the way callers' calls
go."""

from __future__ import annotations

from functools import cache

from fastlinear.fastpath import autograd_node, lookup


@cache
def table(name: str, on_cuda: bool) -> lookup.Table | None:
    """The table of that name, waiting for the fast path and its nodes: callers take them once they
    are there. None where they cannot be built or do not serve."""
    if not (lookup.wait(lookup.PATIENCE_S) and autograd_node.wait(lookup.PATIENCE_S)):
        return None
    if on_cuda and not (lookup.serves_cuda() and autograd_node.serves_cuda()):
        return None
    return lookup.table(name)


def clear(name: str) -> None:
    """Forget its plans, if there are any."""
    found = lookup.table(name) if lookup.ready() else None
    if found is not None:
        found.clear()
