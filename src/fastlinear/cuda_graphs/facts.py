"""Numbers and functions that a graphed callable reads from Python, and whether they are the same.

A graph holds the value of ``self.scale`` or of a global number as it was when it was recorded.
Which ones a callable reads is taken from its code: the attributes that it, the forwards of its
modules and what they call by name mention, and the globals and closure variables in them. A set of
an attribute is noticed by the version of the dict that holds it, one number for each module.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from itertools import repeat
from operator import attrgetter, is_, itemgetter
from typing import Any

from fastlinear.cuda_graphs.code import Reads, fact

try:
    from torch._C._dynamo.guards import dict_version as _version

    _version({})
except (ImportError, RuntimeError):  # pragma: no cover

    def _version(d: dict[Any, Any]) -> Any:  # type: ignore[misc]
        """Always another: every call compares the values."""
        return object()


_contents = attrgetter("cell_contents")
_get = dict.get
_NOTHING = object()
Own = dict[tuple[int, str], Any]
"""(id of a namespace or closure variable, name) → that, so that the id stays its own."""


class Facts:
    """The facts of one state of a callable.

    Args:
        reads: what its code reads.
        namespaces: the attributes of modules and objects, as the dicts that hold them.
        own: those that do not count, as the callable sets them itself; see ``settle``.
    """

    def __init__(self, reads: Reads, namespaces: Sequence[dict[str, Any]], own: Own) -> None:
        self._names, self._spaces, self._own = frozenset(reads.names), list(namespaces), own
        slots = [(d, n) for d, n in reads.globals if (id(d), n) not in own]
        self._globals, self._called = [d for d, _ in slots], [n for _, n in slots]
        self._cells = [c for c in reads.cells if (id(c), "") not in own]
        self._versions = list(map(_version, self._spaces))
        self._held = list(map(self._of, self._spaces))
        self._keep(self._read())

    def _keep(self, values: list[Any]) -> None:
        self._values, self._facts = values, list(map(fact, values))
        self._in_cells = values[len(self._globals) :]

    def _of(self, space: dict[str, Any]) -> dict[str, Hashable]:
        own = self._own
        found = {k: fact(space[k]) for k in self._names & space.keys()}
        return {k: v for k, v in found.items() if (id(space), k) not in own} if own else found

    def _read(self) -> list[Any]:
        found = list(map(_get, self._globals, self._called, repeat(_NOTHING)))
        for cell in self._cells:
            try:
                found.append(cell.cell_contents)
            except ValueError:  # deleted
                found.append(_NOTHING)
        return found

    def unchanged(self) -> bool:
        """Whether they are what they were."""
        return (
            list(map(_version, self._spaces)) == self._versions or self._same_attributes()
        ) and (
            not self._values
            or (
                not self._cells
                and all(map(is_, map(_get, self._globals, self._called), self._values))
            )
            or self._same_values()
        )

    def _same_attributes(self) -> bool:
        """Looks at the namespaces that were written to."""
        now = list(map(_version, self._spaces))
        pairs = enumerate(zip(now, self._versions, strict=True))
        if any(self._of(self._spaces[i]) != self._held[i] for i, (a, b) in pairs if a != b):
            return False
        self._versions = now
        return True

    def _same_values(self) -> bool:
        try:
            if all(map(is_, map(_get, self._globals, self._called), self._values)) and all(
                map(is_, map(_contents, self._cells), self._in_cells)
            ):
                return True
        except ValueError:
            pass
        values = self._read()
        if list(map(fact, values)) != self._facts:
            return False
        self._keep(values)  # equal numbers, but other objects
        return True

    @property
    def key(self) -> Hashable:
        """All of them."""
        spaces = tuple(tuple(sorted(held.items(), key=itemgetter(0))) for held in self._held)
        return spaces, tuple(self._facts)

    def settle(self) -> bool:
        """The callable has run: what has changed since it sets itself, and is left out for good.
        Returns whether there is such."""
        before = len(self._own)
        for space, held in zip(self._spaces, self._held, strict=True):
            now = self._of(space)
            for k in held.keys() | now.keys():
                if held.get(k, _NOTHING) != now.get(k, _NOTHING):
                    self._own[id(space), k] = space
        places: list[tuple[Any, str]] = list(zip(self._globals, self._called, strict=True))
        places += [(c, "") for c in self._cells]
        for (holder, name), value, known in zip(places, self._read(), self._facts, strict=True):
            if fact(value) != known:
                self._own[id(holder), name] = holder
        return len(self._own) > before
