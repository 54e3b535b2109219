"""Modules and the code that their calls run: whether it is still what it was."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from torch import nn

_forward = attrgetter("forward")


class Modules:
    """The classes of some modules, the forwards of these classes, and hooks, as they are now.

    Attributes:
        modules: the modules.
        kinds: the class of each.
        forwards: the forward of each class, in the order the classes come in.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.modules = list(modules)
        self.kinds = list(map(type, self.modules))
        self._classes = list(dict.fromkeys(self.kinds))
        self.forwards = list(map(_forward, self._classes))
        hooks = [h for m in self.modules for h in hooks_of(m)]
        self._bare = [h for h in hooks if not h]
        self._hooks = [h for h in hooks if h]
        self._held = list(map(dict, self._hooks))

    @property
    def hooked(self) -> bool:
        """Whether one had a hook."""
        return bool(self._hooks)

    def unchanged(self) -> bool:
        """Whether classes, their forwards and hooks are what they were: a few passes in C."""
        return (
            not any(self._bare)
            and self._hooks == self._held
            and list(map(type, self.modules)) == self.kinds
            and list(map(_forward, self._classes)) == self.forwards
        )


def hooks_of(m: nn.Module) -> tuple[dict[int, Any], ...]:
    """What a module keeps its hooks in."""
    return m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks
