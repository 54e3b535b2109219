"""gated_mlp around a fused elementwise pass each way, by whichever products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fastlinear.families.gated import reference
from fastlinear.families.gated.stacking import Biases, Gradients, Needs, Pre, Weights

Sums = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The bias gradients: of the gate (or the stack), the up and the down projection."""


@dataclass(frozen=True)
class Gate:
    """The elementwise passes of one library.

    Attributes:
        forward: (pre, activation, order) → h (M, H).
        backward: (dh, pre, activation, order, needs of the two bias gradients, in_place, over) →
            (dpre, h, bias gradients); ``in_place`` allows h to take the memory of dh, ``over`` dpre
            that of pre.
    """

    forward: Callable[[Pre, str, str], Tensor]
    backward: Callable[..., tuple[Pre, Tensor, tuple[Tensor | None, Tensor | None]]]


@dataclass(frozen=True)
class Products:
    """The matrix products of one library.

    Attributes:
        pre_activations: (x, weights, biases) → gate and up, or their stack.
        forward: (x, weight (N, K), bias or None) → x Wᵀ + b.
        grad_input: (dpre (M, N), weight (N, K)) → dpre W.
        grad_weight: (dpre (M, N), x (M, K)) → dpreᵀ x.
        accumulated: (dpre, weight, dx) → dx + dpre W; may take the memory of dx.
    """

    pre_activations: Callable[[Tensor, Weights, Biases], Pre]
    forward: Callable[[Tensor, Tensor, Tensor | None], Tensor]
    grad_input: Callable[[Tensor, Tensor], Tensor]
    grad_weight: Callable[[Tensor, Tensor], Tensor]
    accumulated: Callable[[Tensor, Tensor, Tensor], Tensor]


def forward_by(
    products: Products,
    gate: Callable[..., Tensor],
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice).

    ``gate``: (pre, activation, order, over) → h, in the memory of the gate's where ``over``.
    """
    pre = products.pre_activations(x, weights, biases)
    h = gate(pre, activation, order, over=not save_pre)
    kept = pre if save_pre else (None, None)
    del pre
    y = h if weights.down is None else products.forward(h, weights.down, biases.down)
    return y, *kept


def backward_by(
    products: Products,
    gate: Gate,
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    over: bool,
) -> Gradients:
    """dy (M, N) or (M, H), dense → the seven gradients; pre None is formed again from x.

    What is not wanted costs neither product nor pass. Where y is the gate's product itself, dy is
    the caller's memory and stays what it is; so does pre unless ``over`` gives its memory away.
    """
    inner = any(needs[i] for i in (0, 1, 2, 4, 5))
    down_bias = dy.sum(0) if needs[6] else None
    if not inner and not needs[3]:
        return None, None, None, None, None, None, down_bias
    if pre is None:
        pre, over = products.pre_activations(x, weights, biases), True
    if not inner:
        through = gate.forward(pre, activation, order)
        return None, None, None, products.grad_weight(dy, through), None, None, down_bias
    dh, owned = dy, weights.down is not None
    if weights.down is not None:
        dh = products.grad_input(dy, weights.down)
    dpre, h, (gate_bias, up_bias) = gate.backward(
        dh, pre, activation, order, (needs[4], needs[5]), owned, over
    )
    del dh, pre
    down_weight = products.grad_weight(dy, h) if needs[3] else None
    del h
    first = _through_first(products, dpre, x, weights, needs)
    return *first, down_weight, gate_bias, up_bias, down_bias


def backward_through_down(
    products: Products,
    through_down: Callable[..., tuple[Pre, Tensor | None, Sums]],
    dy: Tensor,
    pre: Pre,
    x: Tensor,
    weights: Weights,
    activation: str,
    order: str,
    needs: Needs,
    over: bool,
) -> Gradients:
    """The same where one kernel goes from dy (M, N) through the down projection and the gate.

    ``through_down``: (dy, down weight, pre, activation, order, needs of the three bias gradients,
    whether h is wanted, over) → (dpre, h or None, bias gradients).
    """
    assert weights.down is not None
    wanted = needs[4:], needs[3]
    dpre, h, biases = through_down(dy, weights.down, pre, activation, order, *wanted, over)
    down_weight = None if h is None else products.grad_weight(dy, h)
    del h
    first = _through_first(products, dpre, x, weights, needs)
    return *first, down_weight, *biases


def _through_first(
    products: Products, dpre: Pre, x: Tensor, weights: Weights, needs: Needs
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx, the gate's dW, the up projection's dW)."""
    first, second = dpre
    gate_weight = products.grad_weight(first, x) if needs[1] else None
    up_weight = products.grad_weight(second, x) if needs[2] and second is not None else None
    dx: Tensor | None = None
    if needs[0]:
        dx = products.grad_input(first, weights.gate)
        if second is not None and weights.up is not None:
            dx = products.accumulated(second, weights.up, dx)
    return dx, gate_weight, up_weight


PYTORCH = Products(
    pre_activations=reference.pre_activations,
    forward=F.linear,
    grad_input=lambda dpre, weight: dpre @ weight,
    grad_weight=lambda dpre, x: dpre.t() @ x,
    accumulated=lambda dpre, weight, dx: dx.addmm_(dpre, weight),
)
"""PyTorch's: cuBLAS's on a GPU."""
