"""The way of ``mlp``'s callers to one backend: what tuning puts on the clock for inference.

A backend's function costs Python at every call; behind the compiled door a call has none of that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend
from fastlinear.ops.common import door
from fastlinear.ops.mlp.op import call
from fastlinear.ops.mlp.reference import Biases, Weights


def timed(backend: Backend, p: Problem) -> Callable[..., Any] | None:
    """Inference is timed as callers of ``mlp`` pay for it. In a CUDA graph the host is no matter,
    and a forward that saves is timed with its whole step."""
    if p.piece != "forward" or p.needs_grad or p.captured:
        return None
    return caller(backend.name)


def caller(backend: str) -> Callable[..., Tensor]:
    """A function of the arguments of a forward backend that calls ``mlp`` with that backend.

    Waits for the door, so that calls take the way they take once it is there.
    """
    door.wait(door.PATIENCE_S)

    def forward(
        x: Tensor,
        weights: Weights,
        biases: Biases,
        activation: str,
        final_activation: str,
        save: bool,
    ) -> Tensor:
        assert not save
        return call(x, weights, biases, activation, final_activation, backend)

    return forward
