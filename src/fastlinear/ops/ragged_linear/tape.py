"""Calls of ragged_linear as the compiled fast path runs and records them: one node, tapes of its
two directions.

What a tape does is what the backends do, with the very same launches or C++ functions. The
sizes are read at every call: on the device, or by the C++ function, which turns a call with bad
ones down, so that Python says what is wrong.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node
from fastlinear.ops.common.tape import Tape
from fastlinear.ops.grouped_linear.operands import Operand
from fastlinear.ops.ragged_linear import cpp
from fastlinear.ops.ragged_linear.formula import Formula, More

NAME = "RaggedLinearBackward"
_KEPT = {"none": (), "output": (fastpath_node.OUTPUT,), "pre": (fastpath_node.INTERNAL,)}
_ALL = -1  # gradients that a tensor is kept for: second derivatives start from all of them
_GIVEN = 4  # x, weight, group_sizes, bias; a backward's begin with dy


def node(formula: Formula, x: Tensor, weight: Tensor, more: More) -> Any:
    """The fast path's plan for such training calls, or None while there is no library of nodes.

    They must have run before.
    """
    if not fastpath_node.begun():
        return None
    saved, tape = formula.saved, None
    found = _forward(formula, x, weight, more, saved == "pre")
    if found is not None:
        p, y, pre, sizes = found
        own = (sizes,) if formula.keeps_sizes else ()
        tape = p.spec(y, *own, *(() if saved == "none" else (pre,)))

    def recorder(
        needs: tuple[bool, ...],
        dy: Tensor,
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
    ) -> Any:
        return _backward(formula, needs, (dy, *tensors, *kept))

    own_kept = (fastpath_node.INTERNAL,) if formula.keeps_sizes else ()
    return fastpath_node.node(
        NAME,
        (x, weight, *more),
        formula.forward,
        formula.gradients,
        recorder,
        tape,
        (*own_kept, *_KEPT[saved]),
        (_ALL, _ALL, 0 if formula.keeps_sizes else _ALL, _ALL),
    )


def inference(formula: Formula, x: Tensor, weight: Tensor, more: More) -> Any:
    """The fast path's plan for such calls without gradients, or None where the formula runs them.

    They must have run before.
    """
    found = _forward(formula, x, weight, more, False) if fastpath_node.begun() else None
    if found is None:
        return None
    p, y, *_ = found
    return fastpath_node.tape(p.spec(y), (x, weight, *more), formula.inference)


def _forward(
    formula: Formula, x: Tensor, weight: Tensor, more: More, save_pre: bool
) -> tuple[Tape, int, int | None, int | None] | None:
    """The forward's tape and the numbers of y, the pre-activation and the copy of the sizes;
    None where it cannot be told."""
    if x.is_cuda and not fastpath_node.serves_cuda():
        return None
    p = Tape(_GIVEN)
    sizes, bias = more
    call = (
        *(p, Operand(x.detach(), 0), Operand(weight.detach(), 1), Operand(sizes, 2)),
        *(None if bias is None else Operand(bias.detach(), 3), formula.activation, save_pre),
    )
    if formula.backend == "cpp":
        return (p, *cpp.forward_steps(*call))
    from fastlinear.ops.ragged_linear import triton_steps

    found = triton_steps.forward_steps(*call)
    return None if found is None else (p, *found, None)


def _backward(formula: Formula, needs: tuple[bool, ...], tensors: tuple[Tensor | None, ...]) -> Any:
    """The backward's tape: dy, the call's tensors, what was kept → their gradients.

    All this ran on such tensors.
    """
    p = Tape(len(tensors))
    given = [None if t is None else Operand(t, i) for i, t in enumerate(tensors)]
    dy, x, weight, sizes, _, *kept = given
    if formula.keeps_sizes:
        sizes, *kept = kept
    assert dy is not None
    if x is None or weight is None or sizes is None or not dy.tensor.is_contiguous():
        return None
    saved = kept[0] if kept else None
    if saved is not None and not saved.tensor.is_contiguous():
        return None
    call = (p, dy, saved, x, weight, sizes, formula.activation, (needs[0], needs[1], needs[3]))
    if formula.backend == "cpp":
        dx, dw, db = cpp.backward_steps(*call)
        return p.spec(dx, dw, None, db)
    if not fastpath_node.serves_cuda() and x.tensor.is_cuda:
        return None
    from fastlinear.ops.ragged_linear import triton_steps

    found = triton_steps.backward_steps(*call)
    return None if found is None else p.spec(*found[:2], None, found[2])
