"""The door's tables of the families' steps: what tuning times goes the way callers' calls go."""

from __future__ import annotations

from functools import cache

from fastlinear.ops.common import door, door_node


@cache
def table(name: str, on_cuda: bool) -> door.Table | None:
    """The table of that name, waiting for the door and its nodes: callers take them once they are
    there. None where they cannot be built or do not serve."""
    if not (door.wait(door.PATIENCE_S) and door_node.wait(door.PATIENCE_S)):
        return None
    if on_cuda and not (door.serves_cuda() and door_node.serves_cuda()):
        return None
    return door.table(name)


def clear(name: str) -> None:
    """Forget its plans, if there are any."""
    found = door.table(name) if door.ready() else None
    if found is not None:
        found.clear()
