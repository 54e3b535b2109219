"""Functions of tensors in C++, once calls of a kind come often: what registered ops run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor

from fastlinear.dispatch import cache
from fastlinear.fastpath import autograd_node, lookup, recorded
from fastlinear.op.front import no_table
from fastlinear.op.spec import kind

Operands = Sequence[Any]
"""Tensors, None and lists of tensors; the first is a tensor."""
Results = Tensor | tuple[Tensor | None, ...]
"""One result, or several, of which some may be missing."""

SIGHTS = 10
"""Calls of a kind that Python runs: a recording takes as long as 8 to 11 calls by it save. So kinds
that come less often cost nothing, and no kind more than twice the least."""
_MOST_KINDS = 4096


class Repeated:
    """One function without gradients, by tapes of the compiled fast path where it can."""

    def __init__(self, name: str, run: Callable[[Operands, Sequence[Any]], Results]) -> None:
        """
        Args:
            name: of the table in C++.
            run: (operands, options) → results that share memory with none; what it computes depends
                on kinds of operands and on the options alone.
        """
        self._name, self._run = name, run
        self._table: Callable[..., Any] = no_table
        self._seen: dict[Any, int] = {}
        cache.on_change(self._forget)
        autograd_node.on_ready(self._forget)

    def __call__(self, operands: Operands, options: Sequence[Any]) -> Results:
        """``run(operands, options)``; options are strings, booleans and lists of booleans."""
        call = tuple(flat(operands)), None, None, *_names(operands, options)
        found: Results | None = self._table(*call)
        if found is not None:
            return found
        began = cache.changes()
        found = self._run(operands, options)
        if cache.changes() == began:
            self._learn(call, operands, options)
        return found

    def _learn(self, call: tuple[Any, ...], operands: Operands, options: Sequence[Any]) -> None:
        table, x = lookup.table(self._name), operands[0]
        if table is None or (x.is_cuda and not lookup.serves_cuda()):
            return
        self._table = table.call
        if not (autograd_node.begun() and table.wants(*call)):
            return
        key = kind(call)
        if key not in self._seen and len(self._seen) >= _MOST_KINDS:
            self._seen.clear()
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if seen < SIGHTS:
            return
        del self._seen[key]
        how, run = lengths(operands), self._run

        def plan(given: Sequence[Tensor | None], *_: None) -> Results:
            return run(nested(iter(given), how), options)

        table.admit(*call, recorded.inference(plan, *call[:3]) or plan)

    def _forget(self) -> None:
        self._seen.clear()
        table = lookup.table(self._name) if lookup.ready() else None
        if table is not None:
            table.clear()


def flat(given: Sequence[Any]) -> list[Any]:
    """Tensors and lists of them as one list."""
    found: list[Any] = []
    for one in given:
        found += one if isinstance(one, (list, tuple)) else [one]
    return found


def lengths(given: Sequence[Any]) -> list[int | None]:
    """How many tensors each list has; None for what is none."""
    return [len(one) if isinstance(one, (list, tuple)) else None for one in given]


def nested(found: Iterator[Any], lengths: Sequence[int | None]) -> list[Any]:
    """The inverse: the next of ``found`` where a length is None, else a list of that many."""
    return [next(found) if n is None else [next(found) for _ in range(n)] for n in lengths]


def _names(operands: Operands, options: Sequence[Any]) -> list[str | bool]:
    """Options as the table takes them, and the lengths of lists where there are some."""
    found = ["".join("01"[flag] for flag in o) if isinstance(o, list) else o for o in options]
    lists = [str(len(one)) for one in operands if isinstance(one, list)]
    return [*found, ",".join(lists)] if lists else found
