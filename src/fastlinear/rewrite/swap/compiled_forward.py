"""Forwards through ``torch.compile``: compiled at the first call of each shape, of a few shapes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count, repeat
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlinear.cuda_graphs.modules import Modules, hooks_of
from fastlinear.rewrite.swap.forwards import Forward, watched
from fastlinear.rewrite.swap.modules import Swap
from fastlinear.rewrite.swap.stand_in import Bound

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
    the function run plainly, and so does a caller that compiles the model itself. It runs plainly
    as well while a module inside has other hooks than when this was bound, or another forward,
    class or child than when it was compiled: Dynamo's guards pass over some of these. A copy of
    the module compiles anew where its guards differ. Dynamo's ``recompile_limit`` holds: shapes
    beyond it run uncompiled.
    """

    __slots__ = ("_compiled", "_hooks", "_inside", "_mode")

    def __init__(self, function: Forward, module: nn.Module, mode: str = DEFAULT) -> None:
        super().__init__(function, module)
        self._mode, self._hooks = mode, _hooks_inside(module)
        self._compiled: Callable[..., Any] | None = None
        self._inside: _Inside | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        if type(module).forward is not self.original:
            return type(module).forward(module, *args, **kwargs)
        if torch.compiler.is_compiling() or watched():
            return self.__func__(module, *args, **kwargs)
        if self._compiled is None or self._inside is None:
            if _hooks_inside(module) != self._hooks:
                return self.__func__(module, *args, **kwargs)
            method = MethodType(self.__func__, module)
            self._compiled = torch.compile(method, dynamic=False, **_HOW[self._mode])
            self._inside = _Inside(module)
        elif not self._inside.unchanged():
            return self.__func__(module, *args, **kwargs)
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
        self._compiled = self._inside = None
        if _writes_slow_guards():
            self.__func__ = _again(self.__func__)

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(self.__func__, copy.deepcopy(self.__self__, memo), self._mode)


class _Inside:
    """The modules inside one, as they are now: their code, children and forwards of their own."""

    def __init__(self, module: nn.Module) -> None:
        inner = _modules_inside(module)
        self._code = Modules(inner)
        self._children = [m._modules for m in (module, *inner)]
        self._were = list(map(dict, self._children))
        self._own = [vars(m) for m in inner]
        self._forwards = list(map(dict.get, self._own, repeat("forward")))

    def unchanged(self) -> bool:
        """Whether all of it is what it was: a few passes in C."""
        return (
            self._code.unchanged()
            and self._children == self._were
            and list(map(dict.get, self._own, repeat("forward"))) == self._forwards
        )


def _modules_inside(module: nn.Module) -> list[nn.Module]:
    """The modules whose hooks and code a call of this module's forward runs.

    Its own hooks are called around its forward. TorchScript's modules have neither.
    """
    found = (m for m in module.modules() if m is not module)
    return [m for m in found if not isinstance(m, torch.jit.ScriptModule)]


def _hooks_inside(module: nn.Module) -> list[dict[int, Any]]:
    return [dict(h) for m in _modules_inside(module) for h in hooks_of(m) if h]


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
    Trials swap forwards to and fro.
    """
    from torch._dynamo import config  # Dynamo takes a second to import

    return bool(getattr(config, "use_recursive_dict_tags_for_guards", False))
