"""Swapping ``forward`` on module instances: the only change fastlinear makes to a model.

A swapped forward is a plain function bound with ``types.MethodType`` and put into the instance's
``__dict__``. ``copy.deepcopy`` rebinds such a method to the copied module, so a copy of a
rewritten model never calls the original's instances. Pickling a bound method stores a reference
by name, so a pickled copy loads as the model before the rewrite and needs no fastlinear.

``nn.DataParallel`` makes replicas by copying ``__dict__``, which keeps a bound method bound to the
original and its weights on the first device. So the method that makes replicas is exchanged beside
``forward``: it binds the forward anew to each replica.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MethodType
from typing import Any

from torch import nn

from fastlinear.core.errors import InputError
from fastlinear.profile.effects import class_forward

_MARK = "__fastlinear__"
_REPLICATE = "_replicate_for_data_parallel"
_KEYS = ("forward", _REPLICATE)


@dataclass(frozen=True)
class Swap:
    """One planned change: ``module`` (named ``fqn``) gets ``forward`` as its instance forward.

    ``forward`` is an unbound function taking the module first; it must not hold on to modules or
    parameters, so that it stays right for a copied module. ``bind`` makes of it what is put into
    the instance, by default a bound method; something else must have ``__self__`` and ``__func__``
    as one has, and ``__deepcopy__`` that binds to the copy.
    """

    fqn: str
    module: nn.Module
    forward: Callable[..., Any]
    bind: Callable[[Callable[..., Any], nn.Module], Any] = MethodType


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
    plain = getattr(own, "__func__", None) is class_forward(module)
    return not (plain and getattr(own, "__self__", None) is module)


class SwapSet:
    """Swaps that are switched on and off together.

    ``on`` is all or nothing: if anything interrupts it, what was switched is switched back.
    """

    def __init__(self, swaps: Iterable[Swap]) -> None:
        self.swaps = tuple(swaps)
        self.active = False
        self._bound = [(s.module, s.bind(s.forward, s.module)) for s in self.swaps]
        self._before: list[tuple[nn.Module, dict[str, Any]]] = []

    def on(self) -> None:
        """Put every forward in place. Does nothing when already on."""
        if self.active:
            return
        own = [(m, m.__dict__) for m, _ in self._bound]
        before = [(m, {k: state[k] for k in _KEYS if k in state}) for m, state in own]
        try:
            for module, method in self._bound:
                module.__dict__["forward"] = method
                module.__dict__[_REPLICATE] = MethodType(_replicate_for_data_parallel, module)
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
                "every rewritten module to hold the forward that optimize_ put there",
                f"another forward on {', '.join(others[:3])}",
                "Undo the later change first, then call revert() again.",
            )
        self.off()
        self.release()

    def release(self) -> None:
        """Free what the bound forwards hold beside the model; they stay usable."""
        for _, method in self._bound:
            if hasattr(method, "release"):
                method.release()


def _restore(before: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    for module, own in before:
        for key in _KEYS:
            if key in own:
                module.__dict__[key] = own[key]
            else:
                module.__dict__.pop(key, None)


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """A replica whose forward, where it is fastlinear's, reads the replica's own weights."""
    replica = type(self)._replicate_for_data_parallel(self)  # type: ignore[operator]
    replica.__dict__.pop(_REPLICATE)
    if is_rewritten(self):
        replica.__dict__["forward"] = MethodType(self.__dict__["forward"].__func__, replica)
    return replica  # type: ignore[no-any-return]
