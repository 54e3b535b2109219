"""mlp as registered ops, for torch.compile and export: schema, fake, autograd."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlinear.op import library
from fastlinear.op.compile import Backends
from fastlinear.op.library import register_op
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.mlp import reference
from fastlinear.ops.mlp.autograd import run_backward
from fastlinear.ops.mlp.reference import Biases
from fastlinear.ops.mlp.spec import SPEC

_BACKENDS = Backends(SPEC)


def _with_none(biases: list[Tensor], has_bias: list[bool]) -> Biases:
    given = iter(biases)
    return tuple(next(given) if has else None for has in has_bias)


def _saved_widths(weights: list[Tensor], final_activation: str, needs_grad: bool) -> list[int]:
    """Widths of what the forward returns besides y; y itself is saved where it is what is read."""
    if not needs_grad:
        return []
    widths = [w.shape[0] for w in weights]
    return widths if activation_of(final_activation).saved == "pre" else widths[:-1]


def _empty(x: Tensor, weights: list[Tensor]) -> bool:
    return x.numel() == 0 or any(w.numel() == 0 for w in weights)


def _forward(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    activation: str,
    final_activation: str,
    needs_grad: bool,
    backend: str,
) -> tuple[Tensor, list[Tensor]]:
    names = activation, final_activation
    bs = _with_none(biases, has_bias)

    # one that cannot serve is refused of empty tensors too
    run = _BACKENDS.forward((x, tuple(weights), bs, *names, backend or None), needs_grad)
    if _empty(x, weights):
        run = reference.forward
    dense = tuple(None if b is None else b.contiguous() for b in bs)
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    y, saved = run(rows, tuple(weights), dense, *names, needs_grad)
    kept = [s.contiguous() for s in saved[: len(_saved_widths(weights, names[1], needs_grad))]]
    return y.contiguous().view(*x.shape[:-1], y.shape[-1]), kept


def _forward_fake(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    has_bias: list[bool],
    activation: str,
    final_activation: str,
    needs_grad: bool,
    backend: str,
) -> tuple[Tensor, list[Tensor]]:
    m = math.prod(x.shape[:-1])  # torch.Size.numel would fix M
    widths = _saved_widths(weights, final_activation, needs_grad)
    y = x.new_empty((*x.shape[:-1], weights[-1].shape[0]))
    return y, [x.new_empty((m, n)) for n in widths]


def _backward(
    dy: Tensor,
    x: Tensor,
    weights: list[Tensor],
    saved: list[Tensor],
    activation: str,
    final_activation: str,
    needs_x: bool,
    needs_w: list[bool],
    needs_b: list[bool],
    backend: str,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    names = activation, final_activation

    run: Callable[..., Any] = reference.backward
    if not _empty(x, weights):
        biases = (None,) * len(weights)
        run = _BACKENDS.backward((x, tuple(weights), biases, *names, backend or None))
    kept: list[Tensor | None] = list(saved)
    if len(kept) < len(weights):
        kept.append(None)
    needs = (needs_x, tuple(needs_w), tuple(needs_b))
    dx, dws, dbs = run_backward(dy, x, tuple(weights), kept, *names, needs, run)
    return _filled(x, dx), [_filled(x, g) for g in dws], [_filled(x, g) for g in dbs]


def _filled(x: Tensor, grad: Tensor | None) -> Tensor:
    return x.new_empty(0) if grad is None else grad.contiguous()


def _backward_fake(
    dy: Tensor,
    x: Tensor,
    weights: list[Tensor],
    saved: list[Tensor],
    activation: str,
    final_activation: str,
    needs_x: bool,
    needs_w: list[bool],
    needs_b: list[bool],
    backend: str,
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    return (
        x.new_empty(x.shape if needs_x else (0,)),
        [x.new_empty(w.shape if n else (0,)) for w, n in zip(weights, needs_w, strict=True)],
        [x.new_empty(w.shape[0] if n else 0) for w, n in zip(weights, needs_b, strict=True)],
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, list[Tensor]]) -> None:
    x, weights, biases, has_bias, activation, final_activation, needs_grad, backend = inputs
    y, saved = output
    reads_y = needs_grad and activation_of(final_activation).saved == "output"
    last = [y] if reads_y else []
    ctx.save_for_backward(x, *weights, *biases, *saved, *last)
    ctx.has_bias = has_bias
    ctx.names = activation, final_activation
    ctx.backend = backend
    ctx.recorded = needs_grad
    ctx.mark_non_differentiable(*saved)


def _autograd(ctx: Any, dy: Tensor, _: Any) -> tuple[Any, ...]:
    layers, given = len(ctx.has_bias), sum(ctx.has_bias)
    x, *rest = ctx.saved_tensors
    weights, biases = rest[:layers], rest[layers : layers + given]
    saved = rest[layers + given :]
    if not ctx.recorded:  # the caller asked for no gradients when it was traced
        bs = _with_none(biases, ctx.has_bias)
        rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        names = ctx.names
        saved = list(reference.forward(rows, tuple(weights), bs, names[0], names[1], True)[1])
    wanted = ctx.needs_input_grad
    needs_w = _flags(wanted[1], layers)
    flags = iter(_flags(wanted[2], given))
    needs_b = [next(flags) if has else False for has in ctx.has_bias]
    dx, dws, dbs = library.call(
        "mlp_backward", dy, x, weights, saved, *ctx.names, wanted[0], needs_w, needs_b, ctx.backend
    )
    return (
        dx if wanted[0] else None,
        [g if need else None for g, need in zip(dws, needs_w, strict=True)],
        [
            g if need else None
            for g, need, has in zip(dbs, needs_b, ctx.has_bias, strict=True)
            if has
        ],
        *(None,) * 5,
    )


def _flags(wanted: Any, count: int) -> list[bool]:
    return list(wanted) if isinstance(wanted, (list, tuple)) else [bool(wanted)] * count


register_op(
    "mlp",
    implementation=_forward,
    fake=_forward_fake,
    backward=_autograd,
    setup_context=_setup_context,
)
register_op(
    "mlp_backward",
    implementation=_backward,
    fake=_backward_fake,
)
