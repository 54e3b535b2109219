"""linear_act without gradients as a registered op: what a compiled graph calls.

A compiled graph hands on a parameter as it is, but makes a view of one anew at every call. So the
op takes a weight as it lies in memory: what is kept of a weight is found again by its own tensor.
Strings come as new objects at every call, where plans are found by those they were made with.
"""

from __future__ import annotations

from sys import intern

from torch import Tensor

from fastlinear.families.linear.spec import FRONT
from fastlinear.op.library import call, register_eager_op


def _run(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, activation: str, backend: str
) -> Tensor:
    """x (..., K), weight (N, K) or, ``turned``, (K, N), bias (N,) → (..., N), dense."""
    forced = intern(backend) if backend else None
    y: Tensor = FRONT.run(x, weight.t() if turned else weight, bias, intern(activation), forced)
    return y.contiguous()


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, activation: str, backend: str
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[1 if turned else 0]))


def _differentiable(
    x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool, activation: str, backend: str
) -> Tensor:
    weight = weight.t() if turned else weight
    y: Tensor = call("linear_act", x, weight, bias, activation, True, backend)[0]
    return y


register_eager_op(
    "linear_act_inference",
    implementation=_run,
    fake=_fake,
    differentiable=_differentiable,
)
