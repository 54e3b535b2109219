"""Swapping ``forward`` on module instances: the only change fastlinear makes to a model.

A swapped forward is a plain function bound with ``types.MethodType`` and put into the instance's
``__dict__``, beside what lets it stand in for the class's own (see ``swap.stand_in``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from fastlinear.core.errors import InputError
from fastlinear.core.interrupts import hold
from fastlinear.profile.effects import class_forward
from fastlinear.rewrite.swap.stand_in import KEYS, is_ours, stand_in, standing_in


@dataclass(frozen=True)
class Swap:
    """One planned change: ``module`` (named ``fqn``) gets ``forward`` as its instance forward.

    ``forward`` is an unbound function taking the module first; it must not hold on to modules or
    parameters, so that it stays right for a copied module. ``bind`` makes of it what is put into
    the instance: a bound method, or a ``Bound``.
    """

    fqn: str
    module: nn.Module
    forward: Callable[..., Any]
    bind: Callable[[Callable[..., Any], nn.Module], Any] = MethodType


def is_rewritten(module: nn.Module) -> bool:
    """Whether the module's forward is one that fastlinear put there."""
    return is_ours(module.__dict__.get("forward"))


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody replaced ``forward`` on this instance.

    A bound reference to the class's own forward (what unpickling a rewritten model leaves
    behind) does not count.
    """
    own = module.__dict__.get("forward")
    if own is None:
        return False
    plain = getattr(own, "__func__", None) is class_forward(module)
    return not (plain and getattr(own, "__self__", None) is module)


class SwapSet:
    """Swaps that are switched on and off together.

    Each is all or nothing: nothing interrupts it.
    """

    def __init__(self, swaps: Iterable[Swap]) -> None:
        self.swaps = tuple(swaps)
        self.active = False
        self._own = [stand_in(_bound(s), s.module) for s in self.swaps]
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []

    def on(self) -> None:
        """Put every forward in place. Does nothing when already on."""
        if self.active:
            return
        states = [(s.module, s.module.__dict__) for s in self.swaps]
        before = [(m, {k: state[k] for k in KEYS if k in state}) for m, state in states]
        with hold():
            for (_, state), own in zip(states, self._own, strict=True):
                state.update(own)
            self._before = before
            self.active = True

    def off(self) -> None:
        """Put every instance back as it was. Does nothing when already off."""
        if not self.active:
            return
        with hold():
            _restore(self._before)
            self.active = False

    def changed_by_others(self) -> list[str]:
        """Names whose forward is no longer the one this set put in place."""
        if not self.active:
            return []
        pairs = zip(self.swaps, self._own, strict=True)
        return [s.fqn for s, o in pairs if s.module.__dict__.get("forward") is not o["forward"]]

    def revert(self) -> None:
        """``off``, refusing to undo what somebody else changed after the rewrite."""
        others = self.changed_by_others()
        if others:
            raise InputError(
                "Result.revert",
                "every rewritten module to hold the forward that optimize_ put there",
                f"another forward on {', '.join(others[:3])}",
                "Undo the later change first, then call revert() again.",
            )
        self.off()
        self.release()

    def release(self) -> None:
        """Free what the bound forwards hold beside the model; they stay usable."""
        for own in self._own:
            if hasattr(own["forward"], "release"):
                own["forward"].release()


def _bound(swap: Swap) -> Any:
    return swap.bind(standing_in(swap.forward, swap.module), swap.module)


def _restore(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, own in before:
        for key in KEYS:
            if key in own:
                module.__dict__[key] = own[key]
            else:
                module.__dict__.pop(key, None)
