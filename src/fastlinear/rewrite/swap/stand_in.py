"""What lets a swapped forward stand in for the forward of the module's class.

It has the other's signature, documentation and source. Beside it, methods go into the instance's
``__dict__``, where Python and PyTorch look for them when they take a module apart: a copy of a
rewritten model is rewritten, with forwards of its own, and so is a replica of ``nn.DataParallel``;
a pickle holds the model before the rewrite and needs no fastlinear; TorchScript refuses by name.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from contextlib import suppress
from functools import update_wrapper
from types import MethodType
from typing import Any, NoReturn

from torch import nn

from fastlinear.core.torchscript import refuse_script
from fastlinear.profile.effects import class_forward

_MARK = "__fastlinear__"


def mark(function: Callable[..., Any]) -> Callable[..., Any]:
    """Name a function ``forward`` and mark it as fastlinear's."""
    function.__name__ = "forward"
    setattr(function, _MARK, True)
    return function


def is_ours(value: Any) -> bool:
    """Whether it is a method of fastlinear's that was bound to an instance."""
    return getattr(getattr(value, "__func__", None), _MARK, False)


def standing_in(function: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """The function, marked, with name, signature and documentation of the class's forward."""
    original = class_forward(module)
    update_wrapper(function, original, updated=())
    if not hasattr(original, "__wrapped__"):  # else it is found through that
        with suppress(TypeError, ValueError):  # of a callable that has none
            function.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
    return mark(function)


class Bound:
    """What is put into an instance as its forward where a bound method does not do.

    Subclasses define ``__call__``, and ``__deepcopy__``, which binds to the copy. ``original`` is
    the class's forward: of another class, or after the class got another one, that one is meant.
    """

    __slots__ = ("__func__", "__self__", "original")

    def __init__(self, function: Callable[..., Any], module: nn.Module) -> None:
        self.__func__ = function
        self.__self__ = module
        self.original = class_forward(module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(MethodType(self.__func__, self.__self__))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__func__, name)  # as a method does

    def __reduce__(self) -> Any:
        return getattr, (self.__self__, "forward")


def stand_in(forward: Any, module: nn.Module) -> dict[str, Any]:
    """What goes into the instance's ``__dict__``: the bound forward and the methods beside it."""
    return {"forward": forward} | {k: MethodType(f, module) for k, f in _BESIDE.items()}


def _plain(self: nn.Module) -> Any:
    """The same module, its attributes shared, without what ``stand_in`` put there."""
    twin = object.__new__(type(self))
    own = self.__dict__.items()
    twin.__dict__.update((k, v) for k, v in own if k not in KEYS or not is_ours(v))
    return twin


def _replicate_for_data_parallel(self: nn.Module) -> nn.Module:
    """A replica whose forward, where it is fastlinear's, reads the replica's own weights."""
    replica: nn.Module = _plain(self)._replicate_for_data_parallel()
    forward: Any = self.__dict__.get("forward")
    if is_ours(forward):
        replica.__dict__["forward"] = MethodType(forward.__func__, replica)
    return replica


def _getstate(self: nn.Module) -> Any:
    return _plain(self).__getstate__()


def _reduce_ex(self: nn.Module, protocol: Any) -> Any:
    return _plain(self).__reduce_ex__(protocol)


def _deepcopy(self: nn.Module, memo: dict[int, Any]) -> Any:
    """As ``copy.deepcopy`` does, with what ``stand_in`` put there bound to the copy."""
    of_class = getattr(type(self), "__deepcopy__", None)
    if of_class is not None:
        return of_class(self, memo)
    make, arguments, *more = _plain(self).__reduce_ex__(4)
    made = memo[id(self)] = make(*copy.deepcopy(arguments, memo))
    if more and more[0] is not None:
        made.__setstate__(copy.deepcopy(more[0], memo))
    ours = {k: v for k, v in self.__dict__.items() if k in KEYS and is_ours(v)}
    made.__dict__.update(copy.deepcopy(ours, memo))
    return made


def _prepare_scriptable(self: nn.Module) -> NoReturn:
    what = f"a {type(self).__qualname__} whose forward fastlinear has swapped"
    refuse_script(what, "Call revert() of the result first.")


_BESIDE: dict[str, Callable[..., Any]] = {
    "_replicate_for_data_parallel": _replicate_for_data_parallel,
    "__getstate__": _getstate,
    "__reduce_ex__": _reduce_ex,
    "__deepcopy__": _deepcopy,
    "__prepare_scriptable__": _prepare_scriptable,
}
for _function in _BESIDE.values():
    setattr(_function, _MARK, True)
KEYS = ("forward", *_BESIDE)
"""What ``stand_in`` puts into the instance's ``__dict__``, by name."""
