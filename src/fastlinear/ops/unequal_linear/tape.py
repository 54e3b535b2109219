"""Calls of unequal_linear as the compiled fast path runs and records them: one node for all groups,
a tape for each direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node
from fastlinear.ops.common.tape import Tape
from fastlinear.ops.unequal_linear import layout
from fastlinear.ops.unequal_linear.autograd import Formula, Maybe, kernels, used

NAME = "UnequalLinearBackward"
_KEEPS = {
    "none": fastpath_node.NOTHING,
    "output": fastpath_node.OUTPUT,
    "pre": fastpath_node.INTERNAL,
}


def plan(
    formula: Formula,
    xs: Sequence[Tensor],
    weights: Sequence[Tensor],
    biases: Maybe | None,
    grad: bool,
) -> Any:
    """The fast path's plan for such calls, or None while there is no library of nodes.

    They must have run before.
    """
    if not fastpath_node.begun() or (xs[0].is_cuda and not fastpath_node.serves_cuda()):
        return None
    tensors = (*xs, *weights, *((None,) if biases is None else biases))
    sizes = layout.sizes_of(xs, weights)
    if any(t is not None and t.is_neg() for t in tensors):
        return None
    return fastpath_node.lists(
        NAME,
        len(xs),
        tensors,
        formula.forward if grad else formula.inference,
        partial(formula.gradients, sizes=sizes) if grad else None,
        partial(_backward, formula, sizes) if grad else None,
        _forward(formula, tensors, len(xs), grad),
        _KEEPS[formula.keeps] if grad else fastpath_node.NOTHING,
    )


def _forward(formula: Formula, tensors: Maybe, groups: int, grad: bool) -> Any:
    """inputs, weights, biases → the y_g, and the pre-activations where those are kept."""
    p = Tape(len(tensors))
    xs: Any = tensors[:groups]
    weights: Any = tensors[groups : 2 * groups]
    lines = [_lined(p, number, x) for number, x in enumerate(xs)]
    dense = [_dense(p, number, t) for number, t in enumerate(tensors[groups:], groups)]
    biases = dense[groups:] if len(dense) == 2 * groups else [None] * groups
    call = layout.forward_call(
        layout.sizes_of(xs, weights),
        formula.activation,
        xs[0].dtype,
        (lines, layout.pitches_of(xs), dense[:groups], biases),
        grad and formula.keeps == "pre",
        lambda count: p.empty((count,), xs[0].dtype, 0),
    )
    kernels(xs[0]).forward_steps(p, call, xs[0].device)
    pieces: list[layout.Piece] = [
        (call.y, (*x.shape[:-1], w.shape[0]), at)
        for x, w, at in zip(xs, weights, call.offsets, strict=True)
    ]
    if call.pre is None:
        return p.spec(call.y), tuple(pieces)
    total = layout.y_offsets(call.sizes, call.dtype.itemsize)[0]
    return p.spec(call.y, call.pre), (*pieces, (call.pre, (total,), 0))


def _backward(
    formula: Formula,
    sizes: layout.Sizes,
    needs: Sequence[bool],
    dys: Maybe,
    tensors: Maybe,
    kept: Maybe,
) -> Any:
    """The gradients of the results, then the call's tensors, then what was kept → a gradient of
    each tensor. All this ran on such tensors."""
    groups = len(dys)
    xs = tensors[:groups]
    first = next(dy for dy in dys if dy is not None)
    given = (*dys, *tensors, *kept)
    p = Tape(len(given))
    needs = used(needs, dys)
    need_b = needs[2 * groups :] if len(needs) == 3 * groups else [False] * groups
    need_w = [w or b for w, b in zip(needs[groups : 2 * groups], need_b, strict=True)]

    def read(
        numbered: Callable[..., int | None], start: int, wanted: Sequence[bool]
    ) -> list[int | None]:
        return [
            numbered(p, number, given[number] if need else None)
            for number, need in enumerate(wanted, start)
        ]

    lines = read(_lined, 0, [True] * groups)
    like = next(number for number in lines if number is not None)
    held = read(_dense, groups + len(tensors), [True] * len(kept))
    call, pieces = layout.backward_call(
        sizes,
        formula.activation,
        first.dtype,
        (
            lines,
            held if formula.keeps == "output" else None,
            held[0] if formula.keeps == "pre" else None,
            read(_lined, groups, need_w),
            read(_dense, 2 * groups, needs[:groups]),
        ),
        (layout.pitches_of(dys), layout.pitches_of(xs)),
        layout.input_shapes(dys, sizes),
        needs,
        lambda count: p.empty((count,), first.dtype, like),
    )
    kernels(first).backward_steps(p, call, first.device)
    results = [b for b in (call.dx, call.dw, call.db) if b is not None]
    return p.spec(*results), tuple(pieces)


def _lined(p: Tape, number: int, t: Tensor | None) -> int | None:
    """The number of a given tensor, or of its copy where its rows are not dense at one distance."""
    if t is None:
        return None
    return p.dense(number) if layout.pitch_of(t) is None else number


def _dense(p: Tape, number: int, t: Tensor | None) -> int | None:
    """The number of a given tensor, or of its copy where it is not contiguous."""
    if t is None:
        return None
    return number if t.is_contiguous() else p.dense(number)
