"""Forwards through ``torch.compile``: compiled at the first call of each shape, of a few shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlinear.rewrite.exchange.forwards import Forward, watched
from fastlinear.rewrite.exchange.stand_in import Bound
from fastlinear.rewrite.exchange.swap import Swap

DEFAULT, REDUCE_OVERHEAD = "default", "reduce-overhead"
COMPILE_MODES = (DEFAULT, REDUCE_OVERHEAD)
"""Modes of ``torch.compile`` that are tried; the second replays CUDA graphs."""
_HOW: dict[str, dict[str, Any]] = {
    DEFAULT: {"options": {"fallback_random": True}},  # dropout draws what it would without
    REDUCE_OVERHEAD: {"mode": REDUCE_OVERHEAD},
}
_numbers = count()


class CompiledForward(Bound):
    """Bound like a method, it runs the function it binds through ``torch.compile``.

    Watchers of every op or every module (function modes but the default device, global hooks) see
    the function run plainly, and so does a caller that compiles the model itself. A copy of the
    module compiles anew where its guards differ. Dynamo's ``recompile_limit`` holds: shapes beyond
    it run uncompiled.
    """

    __slots__ = ("_compiled", "_mode")

    def __init__(self, function: Forward, module: nn.Module, mode: str = DEFAULT) -> None:
        super().__init__(function, module)
        self._mode = mode
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        if type(module).forward is not self.original:
            return type(module).forward(module, *args, **kwargs)
        if torch.compiler.is_compiling() or watched():
            return self.__func__(module, *args, **kwargs)
        if self._compiled is None:
            method = MethodType(self.__func__, module)
            self._compiled = torch.compile(method, dynamic=False, **_HOW[self._mode])
        if self._mode != REDUCE_OVERHEAD:
            return self._compiled(*args, **kwargs)
        torch.compiler.cudagraph_mark_step_begin()
        # the next replay writes over what this one returns
        return pytree.tree_map_only(Tensor, torch.clone, self._compiled(*args, **kwargs))

    def release(self) -> None:
        """Let go of what was compiled, unless it is as good as what the next call would compile.

        Dynamo keeps what it compiled with a function's code. Where its guards are slower than
        fresh ones, what is bound from here on is a copy of the function with code of its own;
        copies of the module keep theirs.
        """
        self._compiled = None
        if _writes_slow_guards():
            self.__func__ = _again(self.__func__)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(self.__func__, copy.deepcopy(self.__self__, memo), self._mode)


def with_compiled(
    swaps: Iterable[Swap], model: nn.Module, mode: str, names: Iterable[str] = ("",)
) -> tuple[Swap, ...]:
    """These swaps, and the forwards of the modules named, with whatever they make of them,
    compiled. ``""`` is the model."""
    found = list(swaps)
    for name in names:
        module = model.get_submodule(name)
        own = next((s.forward for s in found if s.module is module), None)
        known = own or getattr(module.__dict__.get("forward"), "__func__", type(module).forward)
        found = [s for s in found if s.module is not module]
        found.append(Swap(name, module, _calling(known), partial(CompiledForward, mode=mode)))
    return tuple(found)


def _calling(inner: Any) -> Forward:
    """A function of fastlinear's own that does what ``inner`` does.

    torch.compile keeps what it compiled with a function's code and bounds how much: each function
    made here has code of its own.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    return _again(forward)


def _again(function: Forward) -> Forward:
    """A copy of the function that Dynamo has compiled nothing of."""
    assert isinstance(function, FunctionType)
    code = function.__code__.replace(co_name=f"forward_{next(_numbers)}")
    made = FunctionType(code, function.__globals__, closure=function.__closure__)
    made.__dict__.update(function.__dict__)
    return made


def _writes_slow_guards() -> bool:
    """Whether a module that was written to since it was compiled takes longer to call.

    With recursive dict tags Dynamo passes over the guards of a module whose attributes are as they
    were, until the first write to one; from then on it checks them all, until it compiles anew.
    Trials exchange forwards to and fro.
    """
    from torch._dynamo import config  # Dynamo takes a second to import

    return bool(getattr(config, "use_recursive_dict_tags_for_guards", False))
