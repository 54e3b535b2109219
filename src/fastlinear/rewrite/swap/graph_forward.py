"""A module's forward as CUDA graphs: recorded at the first call, kept with the instance."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import partial
from types import MethodType
from typing import Any

from torch import nn

from fastlinear.cuda_graphs.graphed import Graphed, graphed, no_graph_here
from fastlinear.rewrite.swap.forwards import Forward, watched
from fastlinear.rewrite.swap.modules import Swap
from fastlinear.rewrite.swap.stand_in import Bound


class GraphForward(Bound):
    """Bound like a method, it replays the function it binds through ``fl.graphed``.

    Watchers of every op or every module (function modes, global hooks: a profiler, say) would see
    nothing of a replay; under them the function runs plainly. A copy of the module records graphs
    of its own.
    """

    # slots, so that fl.graphed does not look for tensors in here
    __slots__ = ("_graphed", "_on_unsupported")

    def __init__(self, function: Forward, module: nn.Module, on_unsupported: str = "eager") -> None:
        super().__init__(function, module)
        self._on_unsupported = on_unsupported
        self._graphed: Graphed | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.__self__
        if type(module).forward is not self.original:
            return type(module).forward(module, *args, **kwargs)
        if watched():
            return self.__func__(module, *args, **kwargs)
        if self._graphed is None:
            if no_graph_here():
                return self.__func__(module, *args, **kwargs)
            method = MethodType(self.__func__, module)
            self._graphed = graphed(method, on_unsupported=self._on_unsupported)
        return self._graphed(*args, **kwargs)

    @property
    def replayed(self) -> int:
        """How many calls were replays."""
        return 0 if self._graphed is None else self._graphed.counts.replayed

    def release(self) -> None:
        """Free every graph and its memory; the next call records anew."""
        if self._graphed is not None:
            self._graphed.clear()
        self._graphed = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphForward:
        module = copy.deepcopy(self.__self__, memo)
        return GraphForward(self.__func__, module, self._on_unsupported)


def with_graph(
    swaps: Iterable[Swap],
    model: nn.Module,
    names: Iterable[str] = ("",),
    on_unsupported: str = "eager",
) -> tuple[Swap, ...]:
    """These swaps, and the forwards of the modules named, with whatever they make of them, as
    CUDA graphs. ``""`` is the model."""
    found = list(swaps)
    for name in names:
        module = model.get_submodule(name)
        own = next((s.forward for s in found if s.module is module), None)
        known = own or getattr(module.__dict__.get("forward"), "__func__", type(module).forward)
        found = [s for s in found if s.module is not module]
        bind = partial(GraphForward, on_unsupported=on_unsupported)
        found.append(Swap(name, module, _calling(known), bind))
    return tuple(found)


def _calling(inner: Any) -> Forward:
    """A function of fastlinear's own that does what ``inner`` does."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return inner(self, *args, **kwargs)

    return forward
