"""A call by sorted slots: our passes, and ragged_linear's products between them.

No shape depends on where tokens go, and nothing but a CPU's products reads that on the host.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from fastlinear.families.experts.gate import Gate
from fastlinear.families.experts.products import functions


class Way(NamedTuple):
    """How calls of one kind are computed.

    Attributes:
        gate: what lies between the products.
        first: the expert of the first weight.
        backend: ``"triton"``, ``"cpp"`` or ``"batch_invariant"``.
    """

    gate: Gate
    first: int
    backend: str


class Kept(NamedTuple):
    """What a forward leaves for its backward: order (S,), place (S,), sizes (E,), and the
    pre-activations (S, 2I) or None."""

    order: Tensor
    place: Tensor
    sizes: Tensor
    pre: Tensor | None


Weights = tuple[Tensor, Tensor]
"""gate_up (E, 2I, H) and down (E, H, I)."""
Routing = tuple[Tensor, Tensor, Tensor | None, Tensor | None]
"""topk_index and topk_weight (T, k), gate_up_bias (E, 2I), down_bias (E, H)."""
Needs = tuple[bool, ...]
"""Which gradients are wanted: of x, both weights, topk_index, topk_weight, both biases."""


def forward(way: Way, x: Tensor, weights: Weights, routing: Routing) -> tuple[Tensor, Kept]:
    """(y (T, H), what a backward reads)."""
    passes, kept = _passes(way.backend, x), _sorted(way, x, weights, routing)
    index, weight, _, bias = routing
    pre, down = _pre(way, x, weights, routing, kept), weights[1]
    h = passes.gate_forward(pre, way.gate)
    rows = functions(way.backend, h, down, bias)[0](h, down, kept.sizes, bias)
    y = passes.combine(rows, kept.place, index.shape[1], _dense(weight))
    return y, kept._replace(pre=pre)


def backward(
    way: Way, dy: Tensor, x: Tensor, weights: Weights, routing: Routing, kept: Kept, needs: Needs
) -> tuple[Tensor | None, ...]:
    """The seven gradients; the pre-activations are formed again where they were not kept.

    The routing weights' are sums of dy W_down times h: the down projection's results are not kept.
    """
    passes = _passes(way.backend, x)
    (gate_up, down), (index, weight, bias, down_bias) = weights, routing
    order, place, sizes, pre = kept
    top, slots = index.shape[1], index.numel()
    index, weight = index.contiguous(), _dense(weight)
    before, through = needs[0] or needs[1] or needs[5], needs[2]
    found: list[Tensor | None] = [None] * 7
    hidden = x.new_empty(slots, down.shape[2])  # in the place of what a product does not read
    _, multiply_down = functions(way.backend, hidden, down, down_bias)
    if needs[6]:
        given = passes.gather(dy, order, top, weight)
        found[6] = multiply_down(given, hidden, down, sizes, (False, False, True))[2]
    if not (before or through or needs[4]):
        return tuple(found)
    if pre is None:
        pre = _pre(way, x, weights, routing, kept)
    dys = passes.gather(dy, order, top)
    dh = multiply_down(dys, hidden, down, sizes, (True, False, False))[0]
    own = None if down_bias is None else _dense(down_bias)
    facts = (order, index, weight, way.first, gate_up.shape[0], dys, own)
    dpre, h, found[4] = passes.gate_backward(dh, pre, way.gate, *facts, (before, through, needs[4]))
    if through:
        found[2] = multiply_down(dys, h, down, sizes, (False, True, False))[1]
    if before:
        rows = passes.gather(x, order, top) if needs[1] else x.new_empty(slots, x.shape[1])
        _, multiply = functions(way.backend, rows, gate_up, bias)
        wanted = needs[0], needs[1], needs[5]
        dx, found[1], found[5] = multiply(dpre, rows, gate_up, sizes, wanted)
        if needs[0]:
            found[0] = passes.combine(dx, place, top)
    return tuple(found)


def kept_again(way: Way, x: Tensor, weights: Weights, routing: Routing, pre: Tensor | None) -> Kept:
    """What a forward left, of which no more than ``pre`` is there."""
    return _sorted(way, x, weights, routing)._replace(pre=pre)


def _sorted(way: Way, x: Tensor, weights: Weights, routing: Routing) -> Kept:
    experts = weights[0].shape[0]
    order, place, sizes = _passes(way.backend, x).sort(routing[0], way.first, experts)
    return Kept(order, place, sizes, None)


def _pre(way: Way, x: Tensor, weights: Weights, routing: Routing, kept: Kept) -> Tensor:
    """Pre-activations (S, 2I), by place."""
    index, _, bias, _ = routing
    rows = _passes(way.backend, x).gather(x, kept.order, index.shape[1])
    multiply = functions(way.backend, rows, weights[0], bias)[0]
    pre: Tensor = multiply(rows, weights[0], kept.sizes, bias)
    return pre


def _passes(backend: str, x: Tensor) -> Any:
    if backend == "cpp" or not (backend == "triton" or x.is_cuda):
        from fastlinear.families.experts.cpu import passes

        return passes
    from fastlinear.families.experts.triton import passes as triton

    return triton


def _dense(t: Tensor) -> Tensor:
    return t.resolve_neg().contiguous()
