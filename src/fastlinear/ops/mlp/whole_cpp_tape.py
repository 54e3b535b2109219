"""Training tapes of ``whole_cpp``: one C++ function forward, one backward, without Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.tape import Tape, memories, memory
from fastlinear.ops.mlp import whole_cpp
from fastlinear.ops.mlp.autograd import Formula
from fastlinear.ops.mlp.reference import first_needed


def whole_forward(
    formula: Formula,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
) -> Any:
    """The forward's tape where one C++ function computes all of it."""
    given = [t for t in (x, *weights, *(biases or ())) if t is not None]
    if not all(t.is_contiguous() for t in given):
        return None
    layers = formula.layers
    p = Tape(1 + layers + (1 if biases is None else layers))
    rows = x.shape[:-1].numel()
    hidden = [p.empty((rows, w.shape[0]), x.dtype, 0) for w in weights[:-1]]
    shape = (*x.shape[:-1], weights[-1].shape[0])
    y = last = p.empty(shape, x.dtype, 0)
    kind = activation_of(formula.final_activation).saved
    if kind == "pre":
        last = p.empty((rows, shape[-1]), x.dtype, 0)
    bs = [None if biases is None or biases[i] is None else 1 + layers + i for i in range(layers)]
    widths, codes, kept = _described(formula, weights)
    p.call(
        whole_cpp.address(),
        layers,
        widths,
        codes,
        memories(range(1, 1 + layers)),
        memories(bs),
        memory(0),
        memory(y),
        memories([*hidden, last]),
        rows,
        keeps=kept,
    )
    return p.spec(y, *hidden, last if kind == "pre" else None)


def whole_backward(
    formula: Formula,
    needs: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor | None, ...],
    kept: tuple[Tensor | None, ...],
) -> Any:
    """The backward's tape where one C++ function computes all of it."""
    layers, count = formula.layers, len(tensors)
    x, *weights = [t for t in tensors[: 1 + layers] if t is not None]
    if not all(t.is_contiguous() for t in (x, *weights, *(k for k in kept if k is not None))):
        return None
    p = Tape(1 + count + layers)
    given = count - 1 - layers
    wanted = [n and (i <= layers or given == layers) for i, n in enumerate(needs)]
    found: list[int | None] = [None] * count
    for i in (i for i, want in enumerate(wanted) if want):
        shape = x.shape if i == 0 else weights[(i - 1) % layers].shape[: 2 if i <= layers else 1]
        found[i] = p.empty(shape, dy.dtype, 0)
    need_bs = tuple(wanted[1 + layers :]) if given == layers else (False,) * layers
    last = 0 if kept[-1] is None else count + layers
    widths, codes, held = _described(formula, weights)
    p.call(
        whole_cpp.backward_address(),
        layers,
        widths,
        codes,
        memories(range(2, 2 + layers)),
        memory(1),
        memories([*range(1 + count, count + layers), last]),
        memory(0),
        memory(found[0]),
        memories(found[1 : 1 + layers]),
        memories(found[1 + layers :] if given == layers else [None] * layers),
        first_needed((wanted[0], tuple(wanted[1 : 1 + layers]), need_bs)),
        dy.shape[:-1].numel(),
        keeps=held,
    )
    return p.spec(*found)


def _described(formula: Formula, weights: Sequence[Tensor]) -> tuple[int, int, Any]:
    """Addresses of the widths and of the activations' codes as C++ reads them, and their memory."""
    codes = whole_cpp.codes(formula.layers, formula.activation, formula.final_activation)
    widths = whole_cpp._widths(tuple(weights))
    numbers = (ctypes.c_int32 * formula.layers)(*codes)
    return ctypes.addressof(widths), ctypes.addressof(numbers), (widths, numbers)
