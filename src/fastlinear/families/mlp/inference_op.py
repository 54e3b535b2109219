"""mlp without gradients as a registered op: what a compiled graph calls.

It takes weights as they lie in memory, and interns strings; see ``linear_act.inference_op``.
"""

from __future__ import annotations

from sys import intern

from torch import Tensor

from fastlinear.families.mlp.spec import FRONT
from fastlinear.op.library import call, register_eager_op


def _run(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    turned: list[bool],
    activation: str,
    final_activation: str,
    backend: str,
) -> Tensor:
    """x (..., n_0), weights (n_i, n_{i-1}) or, ``turned``, (n_{i-1}, n_i) → (..., n_L), dense;
    ``biases`` are those that there are."""
    ws = [w.t() if t else w for w, t in zip(weights, turned, strict=True)]
    given = iter(biases)
    bs = [next(given) if has else None for has in has_bias]
    names = intern(activation), intern(final_activation)
    y: Tensor = FRONT.run(x, ws, bs, *names, intern(backend) if backend else None)
    return y.contiguous()


def _fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    turned: list[bool],
    activation: str,
    final_activation: str,
    backend: str,
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weights[-1].shape[1 if turned[-1] else 0]))


def _differentiable(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    turned: list[bool],
    activation: str,
    final_activation: str,
    backend: str,
) -> Tensor:
    ws = [w.t() if t else w for w, t in zip(weights, turned, strict=True)]
    names = activation, final_activation
    y: Tensor = call("mlp", x, ws, biases, has_bias, *names, True, backend)[0]
    return y


register_eager_op(
    "mlp_inference",
    implementation=_run,
    fake=_fake,
    differentiable=_differentiable,
)
