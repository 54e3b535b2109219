"""What a registered op needs besides its schema: the backends of its calls, remembered."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fastlinear.dispatch import cache
from fastlinear.dispatch.select import Choice
from fastlinear.op.front import choices
from fastlinear.op.spec import Arguments, OpSpec, kind


class Backends:
    """The backends of a registered op's calls, chosen once a kind of call."""

    def __init__(self, spec: OpSpec) -> None:
        self._spec = spec
        self._known: dict[Any, tuple[Choice, ...]] = {}
        cache.on_change(self._known.clear)

    def forward(self, arguments: Arguments, grad: bool) -> Callable[..., Any]:
        """The function of the forward's backend."""
        return self.choices(arguments, grad)[0].backend.load()

    def backward(self, arguments: Arguments) -> Callable[..., Any]:
        """The function of the backward's backend, where one computes all of it."""
        return self.choices(arguments, True)[1].backend.load()

    def choices(self, arguments: Arguments, grad: bool) -> tuple[Choice, ...]:
        """The choice for each piece of a valid call."""
        key = (*kind(arguments), grad)
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= self._spec.most_plans:
                self._known.clear()
            found = self._known[key] = choices(self._spec, arguments, grad)
        return found
