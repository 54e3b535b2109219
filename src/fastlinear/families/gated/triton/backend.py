"""Backends ``elementwise`` and ``triton`` of gated_mlp on CUDA from sm_80 on.

``elementwise``: the products that linear_act takes, and one fused pass each way for all that lies
between them.
``triton``: the pass in the epilogue of a product: gate and up projection as one kernel, and the
gradient of what the gate lets through, which is never written. The other products are linear_act's.

Importing this file imports Triton, so it is imported lazily.
"""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.device import device_facts
from fastlinear.families.gated.layers import products_for
from fastlinear.families.gated.products import (
    Gate,
    Sums,
    backward_by,
    backward_through_down,
    forward_by,
)
from fastlinear.families.gated.stacking import (
    Biases,
    Gradients,
    Needs,
    Pre,
    Weights,
    empty_like,
    empty_pre,
    halves,
    hidden,
    split_biases,
    split_pre,
    split_weights,
)
from fastlinear.families.gated.triton.config import product_config
from fastlinear.families.gated.triton.dual_kernels import _down_bwd_kernel, _dual_fwd_kernel
from fastlinear.families.gated.triton.gate_kernels import _gate_bwd_kernel, _gate_fwd_kernel
from fastlinear.kernels.row_tiles import RowTiles, row_tiles
from fastlinear.kernels.triton.launch import Launch
from fastlinear.kernels.triton.sums import constants, sum_of_rows, units_of

Tensor = torch.Tensor
_MAX_PLANS = 4096
_NUMBERS = 1024  # of a pass's tile; three tensors are read and three written
_STAGES = 3  # of its loads
_plans: dict[Any, Launch] = {}


def elementwise_forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K) → (y (M, N) or (M, H), then the pre-activations or None twice)."""
    by = products_for(x)
    return forward_by(by, gate_forward, x, weights, biases, activation, order, save_pre)


def elementwise_backward(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    over: bool = False,
) -> Gradients:
    """dy (M, N) or (M, H), dense → the seven gradients; pre None is formed again from x.

    ``over`` allows to write over pre.
    """
    gate = Gate(gate_forward, gate_backward)
    products = products_for(x)
    return backward_by(products, gate, dy, pre, x, weights, biases, activation, order, needs, over)


def forward(
    x: Tensor, weights: Weights, biases: Biases, activation: str, order: str, save_pre: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x (M, K), bfloat16 or float16 → (y (M, N) or (M, H), then the pre-activations or None
    twice)."""
    (gate_w, up_w), (gate_b, up_b) = split_weights(weights, order), split_biases(biases, order)
    if gate_w.stride() != up_w.stride():
        gate_w, up_w = gate_w.contiguous(), up_w.contiguous()
    given = [None if b is None else b.contiguous() for b in (gate_b, up_b)]
    (m, k), size = x.shape, hidden(weights)
    h = x.new_empty(m, size)
    pre = empty_pre(x, size, order) if save_pre else None
    gate, up = (None, None) if pre is None else split_pre(pre, order)
    tensors = (x, gate_w, up_w, *given, h, gate, up)
    key = ("dual", _facts(tensors), activation, order)
    launch = _plans.get(key)
    if launch is None:
        c = product_config("forward", m, size, units_of(x.device), _capability(x))
        rest = (
            *(m, size, k, *x.stride(), *gate_w.stride(), 0 if gate is None else gate.stride(0)),
            *(activation, _math(x), _step(order)),
            *(c.block_m, c.block_n, c.block_k, c.group_m, k % c.block_k == 0, x.is_cpu),
        )
        grid = (-(-m // c.block_m) * -(-size // c.block_n),)
        launch = _keep(
            key, Launch(_dual_fwd_kernel, grid, rest, x.device, warps=c.warps, stages=c.stages)
        )
    launch(*tensors)
    y = h if weights.down is None else products_for(x).forward(h, weights.down, biases.down)
    return (y, *pre) if pre is not None else (y, None, None)


def backward(
    dy: Tensor,
    pre: Pre | None,
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    needs: Needs,
    over: bool = False,
) -> Gradients:
    """dy (M, N) or (M, H), dense, bfloat16 or float16 → the seven gradients; pre None is formed
    again from x.

    ``over`` allows to write over pre.
    """
    if weights.down is None or not any(needs[i] for i in (0, 1, 2, 4, 5)):
        return elementwise_backward(dy, pre, x, weights, biases, activation, order, needs, over)
    products = products_for(x)
    if pre is None:
        pre, over = products.pre_activations(x, weights, biases), True
    return backward_through_down(
        products, _through_down, dy, pre, x, weights, activation, order, needs, over
    )


def gate_forward(pre: Pre, activation: str, order: str, over: bool = False) -> Tensor:
    """h (M, H) = act(gate) ∘ up, dense; each tensor of pre dense. ``over`` allows h to take the
    memory of pre."""
    gate, up = split_pre(pre, order)
    h = gate if over and order == "apart" else gate.new_empty(gate.shape)
    tensors = (gate, up, h)
    gate_launch(tensors, activation, order)(*tensors)
    return h


def gate_launch(tensors: tuple[Tensor, Tensor, Tensor], activation: str, order: str) -> Launch:
    """That pass over tensors laid out as these are: gate, up, h."""
    gate = tensors[0]
    key = ("gate", _facts(tensors), activation, order)
    launch = _plans.get(key)
    if launch is None:
        t, dense = _tiles(gate, order)
        rest = (
            *(*t.sizes, t.across, gate.stride(0), t.unit, dense, t.cut),
            *(activation, _math(gate), _step(order), t.block_m, t.block_n),
        )
        grid = (t.down * t.across,)
        launch = _keep(key, Launch(_gate_fwd_kernel, grid, rest, gate.device, warps=4))
    return launch


def gate_backward(
    dh: Tensor,
    pre: Pre,
    activation: str,
    order: str,
    needs: tuple[bool, bool],
    in_place: bool,
    over: bool = False,
) -> tuple[Pre, Tensor, tuple[Tensor | None, Tensor | None]]:
    """(dpre laid out as pre, h (M, H), bias gradients), one pass and a small sum.

    Args:
        dh: the gradient of h, (M, H), dense.
        pre: pre-activations, each tensor dense.
        activation, order: their names.
        needs: which bias gradients are wanted: the gate's (or the stack's) and the up projection's.
        in_place: whether h may take the memory of dh.
        over: whether dpre may take the memory of pre.
    """
    dpre, h = pre if over else empty_like(pre), dh if in_place else torch.empty_like(dh)
    gate, up = split_pre(pre, order)
    part, scratch = _sums_memory(gate, order) if any(needs) else (None, None)
    tensors = (dh, gate, up, *split_pre(dpre, order), h, part, scratch)
    gate_backward_launch(tensors, activation, order)(*tensors)
    return dpre, h, _bias_gradients(part, order, needs, dh)


def gate_backward_launch(tensors: tuple[Any, ...], activation: str, order: str) -> Launch:
    """That pass over tensors laid out as these are: dh, two pre-activations, their two gradients,
    h, what sums the biases' gradients or None, and its scratch memory or None."""
    dh, gate = tensors[:2]
    key = ("gate backward", _facts(tensors), activation, order)
    launch = _plans.get(key)
    if launch is None:
        t, dense = _tiles(gate, order)
        summed = tensors[6] is not None
        rows = t.chunk_rows(units_of(dh.device)) if summed else t.least_chunk
        rest = (
            *(*t.sizes, gate.stride(0), rows, *constants(t, dense), t.cut),
            *(activation, _math(dh), _from_out(activation), _step(order)),
            *(t.block_m, t.block_n, _STAGES),
        )
        grid = (t.across, -(-t.rows // rows))
        launch = _keep(key, Launch(_gate_bwd_kernel, grid, rest, dh.device, warps=4))
    return launch


def _sums_memory(gate: Tensor, order: str) -> tuple[Tensor, Tensor | None]:
    """(2, …, H) for the column sums of dgate and dup of that pass, and its scratch memory."""
    tiles, _ = _tiles(gate, order)
    chunks = -(-tiles.rows // tiles.chunk_rows(units_of(gate.device)))
    part = _workspace((2, chunks * tiles.fold // tiles.added, gate.shape[1]), gate)
    return part, _workspace((2, chunks, tiles.columns), gate) if tiles.added > 1 else None


def _tiles(gate: Tensor, order: str) -> tuple[RowTiles, bool]:
    """Of a pass over gate (M, H), where it lies, and dense tensors; whether gate is dense, too."""
    m, size = gate.shape
    dense = gate.stride(0) == _step(order) * size
    return row_tiles(m, size, gate.itemsize, dense, _NUMBERS), dense


def _bias_gradients(
    part: Tensor | None, order: str, needs: tuple[bool, bool], like: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """The sums of (2, rows, H) over rows, in the dtype and order of the biases."""
    if part is None:
        return None, None
    _, rows, size = part.shape
    if order == "apart":
        first, second = gate, up = like.new_empty(size), like.new_empty(size)
    else:
        first, second = like.new_empty(2 * size), None
        gate, up = halves(first, None, order, 0)
    key = "sums", part.shape, like.dtype, like.device, order
    launch = _plans.get(key)
    if launch is None:
        how = rows, size, like.device
        launch = _keep(key, sum_of_rows(*how, step=_step(order), twice=True))
    launch(part, gate, up)
    return first if needs[0] else None, second if needs[1] else None


def _through_down(
    dy: Tensor,
    down: Tensor,
    pre: Pre,
    activation: str,
    order: str,
    needs: tuple[bool, bool, bool],
    needs_h: bool,
    over: bool,
) -> tuple[Pre, Tensor | None, Sums]:
    """(dpre, h or None, bias gradients) from dy (M, N) and the down weight (N, H) in one kernel;
    ``over``: dpre may take the memory of pre."""
    (m, n), size = dy.shape, down.shape[1]
    dpre, h = pre if over else empty_like(pre), dy.new_empty(m, size) if needs_h else None
    c = product_config("backward", m, size, units_of(dy.device), _capability(dy))
    tiles = -(-m // c.block_m)
    part = _workspace((2, tiles, size), dy) if any(needs[:2]) else None
    tensors = (dy, down, *split_pre(pre, order), *split_pre(dpre, order), h, part)
    key = ("down backward", _facts(tensors), activation, order)
    launch = _plans.get(key)
    if launch is None:
        rest = (
            *(m, size, n, dy.stride(0), *down.stride(), tensors[2].stride(0), tiles * size),
            *(activation, _math(dy), _from_out(activation), _step(order)),
            *(c.block_m, c.block_n, c.block_k, c.group_m, n % c.block_k == 0, dy.is_cpu),
        )
        grid = (tiles * -(-size // c.block_n),)
        launch = _keep(
            key, Launch(_down_bwd_kernel, grid, rest, dy.device, warps=c.warps, stages=c.stages)
        )
    launch(*tensors)
    down_bias = dy.sum(0) if needs[2] else None
    return dpre, h, (*_bias_gradients(part, order, needs[:2], dy), down_bias)


def _keep(key: Any, launch: Launch) -> Launch:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = launch
    return launch


def _facts(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """All that a launch is specialised to, of every tensor."""
    first = tensors[0]
    assert first is not None
    own = [None if t is None else (t.shape, t.stride(), t.data_ptr() & 15) for t in tensors]
    return (first.dtype, first.device, *own)


def _math(t: Tensor) -> str:
    return "exact" if t.dtype is torch.float32 else "fast"


def _from_out(activation: str) -> bool:
    return activation_of(activation).saved == "output"


def _step(order: str) -> int:
    return 2 if order == "interleaved" else 1


def _workspace(shape: tuple[int, ...], like: Tensor) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)


def _capability(t: Tensor) -> tuple[int, int]:
    """Compute capability; the CPU interpreter counts as 9.0."""
    return device_facts(t.device).capability if t.is_cuda else (9, 0)
