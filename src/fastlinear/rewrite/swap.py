"""Swapping ``forward`` on module instances: the only change fastlinear makes to a model.

A swapped forward is a plain function bound with ``types.MethodType`` and put into the instance's
``__dict__``. ``copy.deepcopy`` rebinds such a method to the copied module, so a copy of a
rewritten model never calls the original's instances. Pickling a bound method stores a reference
by name, so a pickled copy loads as the model before the rewrite and needs no fastlinear.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from fastlinear.core.errors import InputError

_MARK = "__fastlinear__"


@dataclass(frozen=True)
class Swap:
    """One planned change: ``module`` (named ``fqn``) gets ``forward`` as its instance forward.

    ``forward`` is an unbound function taking the module first; it must not hold on to modules or
    parameters, so that it stays right for a copied module.
    """

    fqn: str
    module: nn.Module
    forward: Callable[..., Any]


def mark(function: Callable[..., Any]) -> Callable[..., Any]:
    """Name a function ``forward`` and mark it as fastlinear's."""
    function.__name__ = "forward"
    setattr(function, _MARK, True)
    return function


def is_rewritten(module: nn.Module) -> bool:
    """Whether the module's forward is one that fastlinear put there."""
    own = module.__dict__.get("forward")
    return getattr(getattr(own, "__func__", None), _MARK, False)


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody replaced ``forward`` on this instance.

    A bound reference to the class's own forward (what unpickling a rewritten model leaves
    behind) does not count.
    """
    own = module.__dict__.get("forward")
    if own is None:
        return False
    plain = getattr(own, "__func__", None) is type(module).forward
    return not (plain and getattr(own, "__self__", None) is module)


class SwapSet:
    """Swaps that are switched on and off together.

    ``on`` is all or nothing: if anything interrupts it, what was switched is switched back.
    """

    def __init__(self, swaps: Iterable[Swap]) -> None:
        self.swaps = tuple(swaps)
        self.active = False
        self._bound = [(s.module, MethodType(s.forward, s.module)) for s in self.swaps]
        self._before: list[tuple[nn.Module, Any]] = []

    def on(self) -> None:
        """Put every forward in place. Does nothing when already on."""
        if self.active:
            return
        before = [(m, m.__dict__.get("forward")) for m, _ in self._bound]
        try:
            for module, method in self._bound:
                module.__dict__["forward"] = method
        except BaseException:
            _restore(before)
            raise
        self._before = before
        self.active = True

    def off(self) -> None:
        """Put every instance back as it was. Does nothing when already off."""
        if not self.active:
            return
        _restore(self._before)
        self.active = False

    def changed_by_others(self) -> list[str]:
        """Names whose forward is no longer the one this set put in place."""
        if not self.active:
            return []
        pairs = zip(self.swaps, self._bound, strict=True)
        return [s.fqn for s, (m, method) in pairs if m.__dict__.get("forward") is not method]

    def revert(self) -> None:
        """``off``, refusing to undo what somebody else changed after the rewrite."""
        others = self.changed_by_others()
        if others:
            raise InputError(
                "Result.revert",
                expected="every rewritten module to hold the forward that optimize_ put there",
                received=f"another forward on {', '.join(others[:3])}",
                remedy="Undo the later change first, then call revert() again.",
            )
        self.off()


def _restore(before: list[tuple[nn.Module, Any]]) -> None:
    for module, forward in before:
        if forward is None:
            module.__dict__.pop("forward", None)
        else:
            module.__dict__["forward"] = forward
