"""Calls of diagonal_linear as the compiled fast path runs and records them: one node, a launch
forward and one or two backward; on a CPU one C++ call each way.

What a tape does is what the backends ``triton`` and ``cpp`` do; others run in Python inside the
node.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common import fastpath_node
from fastlinear.ops.common.fastpath_launch import FastpathLaunch
from fastlinear.ops.common.tape import Tape, memory
from fastlinear.ops.diagonal_linear import cpp
from fastlinear.ops.diagonal_linear.autograd import Formula

NAME = "DiagonalLinearBackward"
_X, _WEIGHT, _BIAS, _RESIDUAL, _GIVEN = range(5)  # among a forward's tensors
_OUT = _GIVEN  # and the caller's memory
_FROM_DY, _FROM_X, _FROM_WEIGHT, _FROM_BIAS = range(4)  # among a backward's, which begin with dy
_BACKWARD_GIVEN = 6  # dy, the call's four, and nothing kept
_ALIGNMENT = 15  # address bits that a kernel was made for
_Rest = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True, slots=True)
class Training:
    """The formula of training calls, and the names of the backends in it."""

    formula: Formula
    forward: str
    backward: str


def node(training: Training, x: Tensor, weight: Tensor, rest: _Rest) -> Any:
    """The table's plan for such calls, which have run. None while there is no library of nodes, or
    where a parameter is not dense."""
    bias, residual = rest
    if not (_dense(weight, bias) and fastpath_node.begun()):
        return None
    formula = training.formula

    def recorder(
        needs: tuple[bool, ...], dy: Tensor, tensors: tuple[Tensor | None, ...], _kept: Any
    ) -> Any:
        return _backward(training, needs, dy, tensors)

    plain = [None if t is None else t.detach() for t in (x, weight, bias, residual)]
    return fastpath_node.node(
        NAME,
        (x, weight, bias, residual),
        formula.forward,
        formula.gradients,
        recorder,
        _forward(training, *plain),
        (fastpath_node.NOTHING,),
        formula.readers,
    )


def _forward(
    training: Training,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    residual: Tensor | None,
) -> Any:
    """The forward's tape: x, weight, bias, residual → y; None where it is not one launch."""
    assert x is not None
    assert weight is not None
    if training.forward == "cpp":
        return _forward_in_cpp(x, bias, residual, training.formula.activation, None)
    if training.forward != "triton":
        return None
    return _forward_in_triton(x, weight, bias, residual, training.formula.activation, None)


def _backward(
    training: Training, needs: Sequence[bool], dy: Tensor, tensors: tuple[Tensor | None, ...]
) -> Any:
    """The backward's tape: dy, x, weight, bias → dx, dw, db, dr.

    dy is contiguous, and all this ran on such tensors.
    """
    x, weight, bias = tensors[:3]
    if training.backward == "cpp":
        return _backward_in_cpp(training, needs, dy, x, weight, bias)
    if training.backward != "triton" or not fastpath_node.serves_cuda():
        return None
    if x is not None and not _viewable(x):
        return None
    p = Tape(_BACKWARD_GIVEN)
    dr = _FROM_DY if needs[3] else None
    if not any(needs[:3]):
        return p.spec(None, None, None, dr)
    from fastlinear.ops.diagonal_linear import triton

    k = dy.shape[-1]
    rows = None if x is None else x.view(-1, k)
    wanted = needs[0], needs[1], needs[2]
    name = training.formula.activation
    plan = triton.backward_of(dy.view(-1, k), rows, weight, bias, name, wanted)
    if plan is None:
        return None
    dx = p.empty(dy.shape, dy.dtype, _FROM_DY) if needs[0] else None
    dw = p.empty((k,), dy.dtype, _FROM_DY) if needs[1] else None
    db = p.empty((k,), dy.dtype, _FROM_DY) if needs[2] else None
    sums: tuple[int | None, int | None] = (dw, db)
    if plan.parts is not None:
        made = [None if n is None else p.empty(plan.parts, torch.float32, _FROM_DY) for n in sums]
        sums = made[0], made[1]
    acts = name != "none"
    read = (
        _FROM_DY,
        _FROM_X if acts or needs[1] else None,
        _FROM_WEIGHT if acts or needs[0] else None,
        _number(bias, _FROM_BIAS) if acts else None,
    )
    launches: list[FastpathLaunch | None] = [plan.launch.in_fastpath((*read, dx, *sums))]
    if plan.parts is not None:
        launches.append(plan.sum.in_fastpath((*sums, dw, db)))
    if not all(p.launch(launch) for launch in launches):
        return None
    return p.spec(dx, dw, db, dr)


def inference(
    backend: str,
    activation: str,
    plan: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    rest: _Rest,
) -> Any:
    """The table's plan for such calls without gradients, which have run, or None where it is
    ``plan`` itself. ``plan`` serves what the tape cannot."""
    bias, residual = rest
    if not _dense(weight, bias):
        return None
    if backend == "triton" and x.is_cuda:
        return _launch(x, weight, bias, activation, residual, plan)
    if backend != "cpp" or not fastpath_node.begun():
        return None
    spec = _forward_in_cpp(x, bias, residual, activation, None)
    return None if spec is None else fastpath_node.tape(spec, (x, weight, bias, residual), plan)


def _launch(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    plan: Callable[..., Tensor],
) -> Any:
    """The forward's one launch as the table makes it itself, or None where it is not one."""
    from fastlinear.ops.diagonal_linear import triton

    given = [t for t in (x, residual) if t is not None]
    if any(t.dim() != 2 and not t.is_contiguous() for t in given):
        return None
    k = x.shape[-1]
    rows = None if residual is None else residual.view(-1, k)
    launch = triton.fastpath_launch(x.view(-1, k), weight, bias, activation, rows)
    if launch is None:
        return None
    return replace(launch, masks=(_ALIGNMENT,) * 4).plan(plan, k)


def into(
    backend: str,
    activation: str,
    plan: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    rest: tuple[Any, ...],
) -> Any:
    """The same for calls that write to a tensor of the caller's, the last of ``rest``."""
    bias, residual, out = rest
    if not (_dense(weight, bias) and fastpath_node.begun()):
        return None
    spec = None
    if backend == "cpp":
        spec = _forward_in_cpp(x, bias, residual, activation, out)
    elif backend == "triton":
        spec = _forward_in_triton(x, weight, bias, residual, activation, out)
    elif backend == "addcmul" and activation == "none" and residual is None:
        assert bias is not None
        p = Tape(_GIVEN + 1)
        p.multiply_add(p.claim(_OUT), _BIAS, _X, _WEIGHT)
        spec = p.spec(_OUT)
    return (
        None if spec is None else fastpath_node.tape(spec, (x, weight, bias, residual, out), plan)
    )


def _forward_in_cpp(
    x: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, out: Tensor | None
) -> Any:
    """The forward's tape by backend ``cpp``; None where a tensor would have to be copied."""
    rows = _rows(x)
    others = None if residual is None else _rows(residual)
    if rows is None or (others is None) != (residual is None):
        return None
    p, y = _begun(x, out)
    call = cpp.described(rows, activation, others, new=out is None)
    tensors = (_X, _WEIGHT, _number(bias, _BIAS), _number(residual, _RESIDUAL), y)
    p.call(cpp.forward_address(), ctypes.addressof(call), *map(memory, tensors), keeps=call)
    return p.spec(y, None)


def _forward_in_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    activation: str,
    out: Tensor | None,
) -> Any:
    """The forward's tape by backend ``triton``; None where it is not one launch."""
    given = [t for t in (x, residual) if t is not None]
    if not all(map(_viewable, given)) or not fastpath_node.serves_cuda():
        return None
    from fastlinear.ops.diagonal_linear import triton

    k = x.shape[-1]
    rows = None if residual is None else residual.view(-1, k)
    kept = None if out is None else out.view(-1, k)
    launch = triton.launch_of(x.view(-1, k), weight, bias, activation, rows, kept)
    p, y = _begun(x, out)
    places = (_X, _WEIGHT, _number(bias, _BIAS), _number(residual, _RESIDUAL), y)
    if launch is None or not p.launch(launch.in_fastpath(places)):
        return None
    return p.spec(y, None)


def _begun(x: Tensor, out: Tensor | None) -> tuple[Tape, int]:
    """A forward's tape, and the number of its result."""
    if out is not None:
        p = Tape(_GIVEN + 1)
        return p, p.claim(_OUT)
    p = Tape(_GIVEN)
    return p, p.empty(x.shape, x.dtype, _X)


def _backward_in_cpp(
    training: Training,
    needs: Sequence[bool],
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
) -> Any:
    """The backward's tape by backend ``cpp``: what is not read stands for dy."""
    rows = _rows(dy if x is None else x)
    if rows is None:
        return None
    p = Tape(_BACKWARD_GIVEN)
    dr = _FROM_DY if needs[3] else None
    if not any(needs[:3]):
        return p.spec(None, None, None, dr)
    shapes = (dy.shape, dy.shape[-1:], dy.shape[-1:])
    found = [
        p.empty(shape, dy.dtype, _FROM_DY) if need else None
        for shape, need in zip(shapes, needs, strict=False)
    ]
    call = cpp.described(rows, training.formula.activation, None, new=True)
    read = (
        _FROM_DY,
        _FROM_DY if x is None else _FROM_X,
        _FROM_DY if weight is None else _FROM_WEIGHT,
        _number(bias, _FROM_BIAS),
    )
    tensors = (*read, *found)
    p.call(cpp.backward_address(), ctypes.addressof(call), *map(memory, tensors), keeps=call)
    return p.spec(*found, dr)


def _rows(x: Tensor) -> Tensor | None:
    """x as (M, K) with unit stride along K in its own memory; None where it does not lie so."""
    if x.numel() == 0 or not _viewable(x):
        return None
    rows = x.detach().view(-1, x.shape[-1])
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else None


def _dense(weight: Tensor, bias: Tensor | None) -> bool:
    return weight.is_contiguous() and (bias is None or bias.is_contiguous())


def _number(t: Tensor | None, number: int) -> int | None:
    return None if t is None else number


def _viewable(x: Tensor) -> bool:
    return x.dim() == 2 or x.is_contiguous()
