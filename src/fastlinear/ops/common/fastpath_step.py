"""The fast path's tables of the families' steps: what tuning times goes the way callers' calls
go."""

from __future__ import annotations

from functools import cache

from fastlinear.ops.common import fastpath, fastpath_node


@cache
def table(name: str, on_cuda: bool) -> fastpath.Table | None:
    """The table of that name, waiting for the fast path and its nodes: callers take them once they
    are there. None where they cannot be built or do not serve."""
    if not (fastpath.wait(fastpath.PATIENCE_S) and fastpath_node.wait(fastpath.PATIENCE_S)):
        return None
    if on_cuda and not (fastpath.serves_cuda() and fastpath_node.serves_cuda()):
        return None
    return fastpath.table(name)


def clear(name: str) -> None:
    """Forget its plans, if there are any."""
    found = fastpath.table(name) if fastpath.ready() else None
    if found is not None:
        found.clear()
