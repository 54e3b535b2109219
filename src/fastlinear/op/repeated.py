"""Functions of tensors in C++, once calls of a kind come often: what registered ops run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from fastlinear.dispatch import cache
from fastlinear.fastpath import autograd_node, lookup, recorded
from fastlinear.op.front import no_table
from fastlinear.op.spec import kind

Results = Tensor | tuple[Tensor | None, ...]
"""One result, or several, of which some may be missing."""
Run = Callable[[Sequence[Tensor | None]], Results]

SIGHTS = 10
"""Calls of a kind that Python runs: a recording takes about as long as so many calls by it save, so
that kinds which never come again cost nothing, and no kind more than twice the least."""
_MOST_KINDS = 4096


class Repeated:
    """Calls of one function without gradients, by tapes of the compiled fast path where it can."""

    def __init__(self, name: str) -> None:
        """
        Args:
            name: of the table in C++.
        """
        self._name = name
        self._table: Callable[..., Any] = no_table
        self._seen: dict[Any, int] = {}
        cache.on_change(self._forget)
        autograd_node.on_ready(self._forget)

    def __call__(self, run: Run, tensors: tuple[Tensor | None, ...], *names: Any) -> Results:
        """``run(tensors)``.

        Args:
            run: what it computes depends on kinds of tensors and on ``names`` alone.
            tensors: the first is there; no result shares memory with any.
            names: strings and booleans, at most 8.
        """
        found: Results | None = self._table(tensors, None, None, *names)
        if found is not None:
            return found
        began = cache.changes()
        found = run(tensors)
        if cache.changes() == began:
            self._learn(run, tensors, names)
        return found

    def _learn(self, run: Run, tensors: tuple[Tensor | None, ...], names: tuple[Any, ...]) -> None:
        table = lookup.table(self._name)
        x = tensors[0]
        assert x is not None
        if table is None or (x.is_cuda and not lookup.serves_cuda()):
            return
        self._table = table.call
        if not (autograd_node.begun() and table.wants(tensors, None, None, *names)):
            return
        key = kind((tensors, None, None, *names))
        if key not in self._seen and len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen < SIGHTS:
            return
        del self._seen[key]

        def plan(given: Sequence[Tensor | None], *_: None) -> Results:
            return run(given)

        made = recorded.inference(plan, tensors, None, None)
        table.admit(tensors, None, None, *names, made or plan)

    def _forget(self) -> None:
        self._seen.clear()
        table = lookup.table(self._name) if lookup.ready() else None
        if table is not None:
            table.clear()
