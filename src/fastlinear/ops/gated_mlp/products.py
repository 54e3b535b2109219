"""The backward of gated_mlp around a fused elementwise pass, by whichever products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastlinear.ops.gated_mlp.stacking import Biases, Gradients, Needs, Pre, Weights


@dataclass(frozen=True)
class Gate:
    """The elementwise passes of one library.

    Attributes:
        forward: (pre, activation, order) → h (M, H).
        backward: (dh, pre, activation, order, needs of the two bias gradients, in_place) → (dpre,
            h, bias gradients); ``in_place`` allows h to take the memory of dh.
    """

    forward: Callable[[Pre, str, str], Tensor]
    backward: Callable[..., tuple[Pre, Tensor, tuple[Tensor | None, Tensor | None]]]


@dataclass(frozen=True)
class Products:
    """The matrix products of one library.

    Attributes:
        pre_activations: (x, weights, biases) → gate and up, or their stack.
        grad_input: (dpre (M, N), weight (N, K)) → dpre W.
        grad_weight: (dpre (M, N), x (M, K)) → dpreᵀ x.
        accumulated: (dpre, weight, dx) → dx + dpre W; may take the memory of dx.
    """

    pre_activations: Callable[[Tensor, Weights, Biases], Pre]
    grad_input: Callable[[Tensor, Tensor], Tensor]
    grad_weight: Callable[[Tensor, Tensor], Tensor]
    accumulated: Callable[[Tensor, Tensor, Tensor], Tensor]


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
) -> Gradients:
    """dy (M, N) or (M, H), dense → the seven gradients; pre None is formed again from x.

    What is not wanted costs neither product nor pass. Where y is the gate's product itself, dy is
    the caller's memory and stays what it is.
    """
    inner = any(needs[i] for i in (0, 1, 2, 4, 5))
    down_bias = dy.sum(0) if needs[6] else None
    if not inner and not needs[3]:
        return None, None, None, None, None, None, down_bias
    if pre is None:
        pre = products.pre_activations(x, weights, biases)
    if not inner:
        through = gate.forward(pre, activation, order)
        return None, None, None, products.grad_weight(dy, through), None, None, down_bias
    dh, owned = dy, weights.down is not None
    if weights.down is not None:
        dh = products.grad_input(dy, weights.down)
    (first, second), h, (gate_bias, up_bias) = gate.backward(
        dh, pre, activation, order, (needs[4], needs[5]), owned
    )
    del dh, pre
    down_weight = products.grad_weight(dy, h) if needs[3] else None
    del h
    gate_weight = products.grad_weight(first, x) if needs[1] else None
    up_weight = products.grad_weight(second, x) if needs[2] and second is not None else None
    dx: Any = None
    if needs[0]:
        dx = products.grad_input(first, weights.gate)
        if second is not None and weights.up is not None:
            dx = products.accumulated(second, weights.up, dx)
    return dx, gate_weight, up_weight, down_weight, gate_bias, up_bias, down_bias
