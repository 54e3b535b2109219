"""Calls of grouped_linear as the compiled fast path runs and records them: one node, tapes of
its two directions.

What a tape does is what the backends do, with the very same kernels and ops of PyTorch; other
backends, and what would be copied first, run in Python inside the node.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from torch import Tensor

from fastlinear.ops.common import fastpath_node
from fastlinear.ops.common.tape import Tape, memory
from fastlinear.ops.grouped_linear import (
    cpp,
    eager,
    resident,
    strips,
    strips_backward,
    wide_backward,
)
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.autograd import Formula
from fastlinear.ops.grouped_linear.operands import Backward, Forward, Numbers, Operand
from fastlinear.ops.grouped_linear.reference import Needs
from fastlinear.ops.grouped_linear.sign_mask import SIGNS, AnyPlace, is_sign_mask

NAME = "GroupedLinearBackward"
_KEPT = {
    "none": (),
    "output": (fastpath_node.OUTPUT,),
    "pre": (fastpath_node.INTERNAL,),
    SIGNS: (fastpath_node.INTERNAL,),
}
_READERS = (-1, -1, -1)  # all are kept: second derivatives start from them
_X, _WEIGHT, _BIAS, _GIVEN = range(4)  # among a forward's tensors
_DY, _FROM_X, _FROM_WEIGHT, _SAVED = 0, 1, 2, 4  # among a backward's, which begin with dy
Results = tuple[int, int | None]
"""y and the pre-activation or signs among a tape's tensors."""


def node(formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The fast path's plan for such training calls, or None while there is no library of nodes.

    They must have run before.
    """
    if not fastpath_node.begun():
        return None
    forward, saved, sign_mask = formula.forward_name, formula.saved, formula.sign_mask
    names = formula.activation, formula.layout
    found = _forward(forward, x, weight, bias, *names, saved == "pre", sign_mask)
    tape = None
    if found is not None:
        p, y, pre = found
        tape = p.spec(y, *((pre,) if saved != "none" else ()))

    def recorder(
        needs: Needs,
        dy: Tensor,
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
    ) -> Any:
        x, weight, _ = tensors
        assert x is not None
        assert weight is not None
        return _backward(formula, needs, dy, x, weight, kept[0] if kept else None)

    return fastpath_node.node(
        NAME,
        (x, weight, bias),
        formula.forward,
        formula.gradients,
        recorder if formula.backward_name in _BACKWARD_STEPS else None,
        tape,
        _KEPT[saved],
        _READERS,
    )


def inference(
    backend: str,
    activation: str,
    layout: str,
    plan: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Any:
    """The table's plan for such calls without gradients, or None where it is ``plan`` itself.

    They must have run before; ``plan`` serves what the tape cannot.
    """
    if not fastpath_node.begun():
        return None
    found = _forward(backend, x, weight, bias, activation, layout, False)
    if found is None:
        return None
    p, y, _ = found
    return fastpath_node.tape(p.spec(y), (x, weight, bias), plan)


def _forward(
    backend: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    save_pre: bool,
    sign_mask: AnyPlace | None = None,
) -> tuple[Tape, int, int | None] | None:
    """The forward's tape: x, weight, bias → the numbers of y and the pre-activation or signs;
    None where the backend has none, or a tensor would have to be copied first."""
    steps = _FORWARD_STEPS.get(backend)
    x, weight, bias = x.detach(), weight.detach(), None if bias is None else bias.detach()
    rows = _in_place(x, layout, weight.shape[2], weight)
    if steps is None or rows is None or not _launches(x):
        return None
    p = Tape(_GIVEN)
    found = steps(
        Forward(
            p,
            Operand(rows, _X),
            Operand(weight, _WEIGHT),
            None if bias is None else Operand(bias, _BIAS),
            activation,
            save_pre,
            layouts.order_of(layout, x.shape),
            layouts.output_shape(layout, x.shape, *weight.shape[:2]),
            sign_mask,
        )
    )
    return None if found is None else (p, *found)


def _backward(
    formula: Formula, needs: Needs, dy: Tensor, x: Tensor, weight: Tensor, saved: Tensor | None
) -> Any:
    """The backward's tape: dy, the call's tensors, what was kept → dx, dW, db.

    All this ran on such tensors.
    """
    layout, (groups, n, k) = formula.layout, weight.shape
    rows = _in_place(x, layout, k, weight)
    if rows is None or not dy.is_contiguous() or not _launches(x):
        return None
    if saved is not None and not saved.is_contiguous():
        return None
    tokens = rows.shape[:3]

    def wide(t: Tensor) -> Tensor:  # as ``autograd.run_backward`` has it
        if is_sign_mask(t):
            return t
        return layouts.blocks(t, layout, groups, n).reshape(*tokens, n)

    p = Tape(_SAVED + len(_KEPT[formula.saved]))
    found = _BACKWARD_STEPS[formula.backward_name](
        Backward(
            p,
            Operand(wide(dy), _DY),
            None if saved is None else Operand(wide(saved), _SAVED),
            Operand(rows, _FROM_X),
            Operand(weight, _FROM_WEIGHT),
            formula.activation,
            needs,
            layouts.order_of(layout, x.shape),
            x.shape,
        )
    )
    return None if found is None else p.spec(*found)


def _in_place(t: Tensor, layout: str, features: int, weight: Tensor) -> Tensor | None:
    """t as (B, L, G, features) in its own memory, or None where there is no such view."""
    rows = layouts.blocks(t, layout, weight.shape[0], features)
    return rows if rows.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() else None


def _launches(x: Tensor) -> bool:
    """Whether tapes can launch kernels, where x asks for that."""
    return not x.is_cuda or fastpath_node.serves_cuda()


# --------------------------------------------------------------------------------------------
# Backends


def _cpp_forward(call: Forward) -> Results | None:
    x, weight, bias = call.tensors
    if not cpp.serves(x.dtype) or not (bias is None or bias.is_contiguous()):
        return None
    y, pre = call.results()
    described = cpp.described(x, weight, call.activation, call.like_y())
    given = map(memory, (*call.numbers, y, pre))
    call.tape.call(cpp.forward_address(), ctypes.addressof(described), *given, keeps=described)
    return y, pre


def _cpp_backward(call: Backward) -> Numbers | None:
    dy, saved, x, weight = call.tensors
    if not cpp.serves(x.dtype):
        return None
    found = call.results()
    described = cpp.described(x, weight, call.activation, dy, saved, call.like_dx())
    given = map(memory, (*call.numbers, *found))
    call.tape.call(cpp.backward_address(), ctypes.addressof(described), *given, keeps=described)
    return found


def _triton_forward(call: Forward) -> Results | None:
    from fastlinear.ops.grouped_linear import triton

    return triton.forward_steps(call)


def _wide_forward(call: Forward) -> Results | None:
    from fastlinear.ops.grouped_linear import triton_wide

    return triton_wide.forward_steps(call)


def _triton_backward(call: Backward) -> Numbers | None:
    from fastlinear.ops.grouped_linear import triton_backward

    return triton_backward.backward_steps(call)


_FORWARD_STEPS: dict[str, Callable[[Forward], Results | None]] = {
    "cpp": _cpp_forward,
    "eager": eager.forward_steps,
    "resident": resident.forward_steps,
    "strips": strips.forward_steps,
    "triton": _triton_forward,
    "wide": _wide_forward,
}
_BACKWARD_STEPS: dict[str, Callable[[Backward], Numbers | None]] = {
    "cpp": _cpp_backward,
    "eager": eager.backward_steps,
    "strips": strips_backward.backward_steps,
    "triton": _triton_backward,
    "wide": wide_backward.backward_steps,
}
