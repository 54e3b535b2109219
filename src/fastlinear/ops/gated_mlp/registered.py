"""gated_mlp as registered ops, for torch.compile and export: schema, fake, autograd.

Without a down weight they are ``gated_linear``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlinear.op import library
from fastlinear.op.compile import Backends
from fastlinear.op.library import register_op
from fastlinear.ops.gated_mlp import reference
from fastlinear.ops.gated_mlp.autograd import as_rows, run_backward
from fastlinear.ops.gated_mlp.kept import reads_kept
from fastlinear.ops.gated_mlp.spec import NAME, SPEC
from fastlinear.ops.gated_mlp.stacking import Biases, Weights, out_features

_BACKENDS = Backends(SPEC)


def _is_empty(x: Tensor, weights: Weights) -> bool:
    return not x.numel() or any(w is not None and not w.numel() for w in weights)


def _forward(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    order: str,
    recompute: bool,
    needs_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = Weights(gate_weight, up_weight, down_weight)
    biases = Biases(gate_bias, up_bias, down_bias)
    rows = as_rows(x)

    run: Callable[..., Any] = reference.forward
    if not _is_empty(x, weights):
        options = NAME, activation, order, str(int(recompute)), backend or None
        run = _BACKENDS.forward((rows, weights, biases, *options), needs_grad)
    y, *pre = run(rows, weights, biases, activation, order, needs_grad and not recompute)
    first, second = (x.new_empty(0) if t is None else t for t in pre)
    return y.view(*x.shape[:-1], y.shape[-1]), first, second


def _forward_fake(
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    order: str,
    recompute: bool,
    needs_grad: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    n = out_features(Weights(gate_weight, up_weight, down_weight))
    y = x.new_empty(*x.shape[:-1], n)
    if recompute or not needs_grad:
        return y, x.new_empty(0), x.new_empty(0)
    m, width = math.prod(x.shape[:-1]), gate_weight.shape[0]
    return y, x.new_empty(m, width), x.new_empty(0 if up_weight is None else (m, width))


def _backward(
    dy: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    order: str,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    weights = Weights(gate_weight, up_weight, down_weight)
    biases = Biases(gate_bias, up_bias, down_bias)
    rows, level = as_rows(x), int(first is None)

    run: Callable[..., Any] = reference.backward
    if not _is_empty(x, weights):
        options = NAME, activation, order, str(level), backend or None
        run = _BACKENDS.backward((rows, weights, biases, *options))
    pre = None if first is None else (first, second)
    wanted: Any = tuple(needs)
    grads = run_backward(dy, pre, x, weights, biases, activation, order, wanted, run)
    return tuple(x.new_empty(0) if g is None else g.contiguous() for g in grads)


def _backward_fake(
    dy: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    x: Tensor,
    gate_weight: Tensor,
    up_weight: Tensor | None,
    down_weight: Tensor | None,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    activation: str,
    order: str,
    needs: list[bool],
    backend: str,
) -> tuple[Tensor, ...]:
    given = (x, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias)
    return tuple(
        x.new_empty(t.shape if need and t is not None else (0,))
        for t, need in zip(given, needs, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    given, (activation, order, recompute, needs_grad, backend) = inputs[:7], inputs[7:]
    _, first, second = output
    save = needs_grad and not recompute
    kept = (first, second if given[2] is not None else None) if save else (None, None)
    every = (*given, *kept)
    ctx.save_for_backward(*(every if reads_kept(ctx.needs_input_grad[:7]) else [None] * len(every)))
    ctx.call = activation, order
    ctx.backend = backend
    ctx.mark_non_differentiable(first, second)


def _autograd(ctx: Any, dy: Tensor, *_: Any) -> tuple[Any, ...]:
    needed = ctx.needs_input_grad[:7]
    if not reads_kept(needed):
        rows = as_rows(dy)
        return (*[None] * 6, rows.sum(0) if needed[6] else None, *[None] * 5)
    *given, first, second = ctx.saved_tensors
    needs = [bool(need) and t is not None for need, t in zip(needed, given, strict=True)]
    saved = first, second
    grads = library.call(f"{NAME}_backward", dy, *saved, *given, *ctx.call, needs, ctx.backend)
    wanted = (g if need else None for g, need in zip(grads, needs, strict=True))
    return (*wanted, None, None, None, None, None)


register_op(
    "gated_mlp",
    implementation=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)
register_op(
    "gated_mlp_backward",
    implementation=_backward,
    fake=_backward_fake,
)
