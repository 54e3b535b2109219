"""Python state that a model's step writes: a replayed graph runs no Python and would lose it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from fastlinear.profile.effects import writes

_REGISTRIES = frozenset(vars(nn.Module()))


def why_not_replayed(model: nn.Module, step: Callable[[], object]) -> str | None:
    """What one step writes to the modules besides tensors, or None.

    The code of every module is looked at, and one step is run to see whether a list, dict, set or
    deque among their attributes is another afterwards.
    """
    for module in model.modules():
        found = writes(module)
        if found is not None:
            return f"{found}, which a replay would not."
    before = [(name, held, _content(held)) for name, held in _containers(model)]
    step()
    for name, held, content in before:
        now = _content(held)
        if len(now) != len(content) or any(a is not b for a, b in zip(now, content, strict=True)):
            return f"A step changes {name}, which a replay would not."
    return None


def _containers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for module in model.modules():
        for name, value in vars(module).items():
            if name not in _REGISTRIES and isinstance(value, list | dict | set | deque):
                yield f"{type(module).__qualname__}.{name}", value


def _content(held: Any) -> list[Any]:
    """The objects in a container, keys included."""
    return [*held.keys(), *held.values()] if isinstance(held, dict) else list(held)
