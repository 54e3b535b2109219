"""What a graphed callable was asked for, and how its calls went."""

from __future__ import annotations

from dataclasses import dataclass

from fastlinear.cuda_graphs.arguments import Named


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of :func:`fastlinear.graphed`, checked."""

    batch_dim: int | None
    buckets: tuple[int, ...]
    max_graphs: int
    reuse_outputs: bool
    by_address: tuple[Named, ...]
    eager: bool
    warmup: int


@dataclass(slots=True)
class Counts:
    """How many calls of a Graphed were recordings, replays and plain calls, and graphs freed."""

    recorded: int = 0
    replayed: int = 0
    plain: int = 0
    freed: int = 0
