"""Calls of grouped_linear as the compiled door runs and records them, without Python.

Backend ``cpp`` is one step of a program each way; other backends leave their direction to Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common import door_node
from fastlinear.ops.common.door_program import Program, memory
from fastlinear.ops.grouped_linear import cpp
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear.autograd import Formula
from fastlinear.ops.grouped_linear.reference import Needs

_KEPT = {"none": (), "output": (door_node.OUTPUT,), "pre": (door_node.INTERNAL,)}
_READERS = (-1, -1, -1)  # all are kept: second derivatives start from them


def node(formula: Formula, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The door's plan for such training calls, or None while there is no library of nodes.

    They must have run before.
    """
    if not door_node.begun():
        return None
    forward = None
    if formula.forward_name == "cpp":
        names = formula.activation, formula.layout, formula.saved
        forward = _forward(x, weight, bias, *names)

    def programmer(
        needs: Needs,
        dy: Tensor,
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
    ) -> Any:
        x, weight, _ = tensors
        assert x is not None
        assert weight is not None
        return _backward(formula, needs, dy, x, weight, kept[0] if kept else None)

    return door_node.node(
        "GroupedLinearBackward",
        (x, weight, bias),
        formula.forward,
        formula.gradients,
        programmer if formula.backward_name == "cpp" else None,
        forward,
        _KEPT[formula.saved],
        _READERS,
    )


def inference(
    backend: str,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    plan: Callable[..., Tensor],
) -> Any:
    """The door's plan for such calls without gradients, or None where it is ``plan`` itself.

    They must have run before; ``plan`` serves what the program cannot.
    """
    if backend != "cpp" or not door_node.begun():
        return None
    spec = _forward(x, weight, bias, activation, layout, "none")
    return None if spec is None else door_node.program(spec, (x, weight, bias), plan)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, layout: str, saved: str
) -> Any:
    """The forward's program: x, weight, bias → y, and what is kept; None where a tensor would have
    to be copied first."""
    x, weight = x.detach(), weight.detach()
    rows = _in_place(x, layout, weight.shape[2], weight)
    if rows is None or not cpp.serves(x.dtype) or not (bias is None or bias.is_contiguous()):
        return None
    p = Program(3)
    shape = layouts.output_shape(layout, x.shape, *weight.shape[:2])
    y = p.empty(shape, x.dtype, 0)
    pre = p.empty(shape, x.dtype, 0) if saved == "pre" else None
    call = cpp.described(rows, weight, activation, _like(shape, x, layout, rows, weight))
    tensors = (0, 1, None if bias is None else 2, y, pre)
    p.call(cpp.forward_address(), ctypes.addressof(call), *map(memory, tensors), keeps=call)
    return p.spec(y, *((pre,) if saved != "none" else ()))


def _backward(
    formula: Formula, needs: Needs, dy: Tensor, x: Tensor, weight: Tensor, saved: Tensor | None
) -> Any:
    """The backward's program: dy, the call's tensors, what was kept → dx, dW, db."""
    layout = formula.layout
    rows = _in_place(x, layout, weight.shape[2], weight)
    if rows is None or not dy.is_contiguous() or not cpp.serves(x.dtype):
        return None
    if saved is not None and not saved.is_contiguous():
        return None
    p = Program(4 + len(_KEPT[formula.saved]))
    shapes = (x.shape, weight.shape, weight.shape[:2])
    found = [
        p.empty(shape, x.dtype, 0) if need else None
        for shape, need in zip(shapes, needs, strict=True)
    ]
    of_y = _like(dy.shape, x, layout, rows, weight)
    of_x = layouts.empty(rows.shape, layouts.order_of(layout, x.shape), x.to("meta"), x.dtype)
    call = cpp.described(rows, weight, formula.activation, of_y, of_y, of_x)
    tensors = (0, None if saved is None else 4, 1, 2, *found)
    p.call(cpp.backward_address(), ctypes.addressof(call), *map(memory, tensors), keeps=call)
    return p.spec(*found)


def _in_place(t: Tensor, layout: str, features: int, weight: Tensor) -> Tensor | None:
    """t as (B, L, G, features) in its own memory, or None where there is no such view."""
    rows = layouts.blocks(t, layout, weight.shape[0], features)
    return rows if rows.untyped_storage().data_ptr() == t.untyped_storage().data_ptr() else None


def _like(shape: tuple[int, ...], x: Tensor, layout: str, rows: Tensor, weight: Tensor) -> Tensor:
    """A tensor of no memory, dense in that shape, as (B, L, G, N)."""
    y = torch.empty(shape, dtype=x.dtype, device="meta")
    wide = layouts.blocks(y, layout, *weight.shape[:2])
    return wide.view(*rows.shape[:3], weight.shape[1])
