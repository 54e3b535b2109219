"""Times a backend through the public function, host overhead included."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.op.front import Front
from fastlinear.op.spec import Arguments
from fastlinear.op.step import trained

AsCall = Callable[[tuple[Any, ...], str], Arguments]
"""(inputs of a forward backend, its name) → the call that forces it."""


class Timed:
    """A family's ``timed``: what tuning times in place of a backend's function.

    A backend's function costs Python at every call; behind the C++ table a call has none of that.
    """

    def __init__(self, front: Front, as_call: AsCall, *, whole: bool = False) -> None:
        """``whole``: whether a training call is chosen, and timed, as one step."""
        self._front, self._as_call, self._whole = front, as_call, whole

    def __call__(self, backend: Backend, p: Problem) -> Callable[..., Any] | None:
        """The public call of inference. None, for the function itself, inside a CUDA graph, where
        the host does not count, and for a forward that is timed with its whole step."""
        if self._whole and p.piece == "step" and not p.captured:
            return partial(trained, self.caller(backend.name))
        if p.piece != "forward" or p.needs_grad or p.captured:
            return None
        return self.caller(backend.name)

    def caller(self, backend: str) -> Callable[..., Any]:
        """A function of a forward backend's inputs that calls the public function with it.

        Waits for the libraries of the table and of its tapes, as callers have them.
        """
        if lookup.wait(lookup.PATIENCE_S):
            autograd_node.wait(lookup.PATIENCE_S)
        call, as_call = self._front.call, self._as_call
        return lambda *inputs: call(*as_call(inputs, backend))
