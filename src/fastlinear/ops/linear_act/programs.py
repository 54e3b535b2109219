"""Training calls of linear_act as the compiled door records them: one node, programs of pieces.

What a program does is what the backends chosen for the pieces do, with the very same kernels and
ops of PyTorch; a backend that has no such form leaves its direction to Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from fastlinear.ops.common import cpp_elementwise, door_node
from fastlinear.ops.common.door_launch import DoorLaunch, Y
from fastlinear.ops.common.door_program import Program
from fastlinear.ops.linear_act import launches, onednn
from fastlinear.ops.linear_act.plans import Training

Needs = tuple[bool, bool, bool]
NAME = "LinearActBackward"
_X, _WEIGHT, _BIAS = 0, 1, 2  # among a forward's tensors
_FROM_DY, _FROM_X, _FROM_WEIGHT, _FROM_SAVED = 0, 1, 2, 4  # among a backward's
_DX, _DW = 1, 2  # gradients as bits: x is read for dW, the weight for dx
_KEPT = {"none": door_node.NOTHING, "output": door_node.OUTPUT, "pre": door_node.HIDDEN}


def node(training: Training, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The door's plan for such calls, or None while there is no library of nodes.

    They must have run before. bias is contiguous.
    """
    formula = training.formula

    def programmer(
        needs: Needs, dy: Tensor, tensors: tuple[Tensor | None, ...], saved: Tensor | None
    ) -> Any:
        return _backward(training, needs, dy, tensors[0], tensors[1], saved)

    if not door_node.begun():
        return None
    return door_node.node(
        NAME,
        (x, weight, bias),
        formula.forward,
        formula.gradients,
        programmer,
        _forward(training, x.detach(), weight.detach(), None if bias is None else bias.detach()),
        _KEPT[formula.saved],
        (_DW, _DX, 0),
    )


def _forward(training: Training, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The forward's program: x, weight, bias → y, and the pre-activation where it is kept."""
    formula = training.formula
    activation, save = formula.activation, formula.saved == "pre"
    if not _viewable(x) or (x.is_cuda and not door_node.serves_cuda()):
        return None
    p = Program(3)
    shape = (*x.shape[:-1], weight.shape[0])
    b = None if bias is None else _BIAS
    if training.forward in ("triton", "cuda"):
        y = p.empty(shape, x.dtype, _X)
        pre = p.empty((x.shape[:-1].numel(), shape[-1]), x.dtype, _X) if save else None
        launch = launches.forward(training.forward, x, weight, bias, activation, save)
        if launch is None:
            return None
        p.launch(_numbered(launch, {Y: y, launches.PRE: pre}))
        return p.spec(y, pre)
    x2 = _X if x.dim() == 2 else p.view(_X, (-1, x.shape[-1]))
    if training.forward == "onednn":
        if (not save and activation not in ("none", "relu")) or onednn._plain(weight) is not weight:
            return None
        pre = p.onednn(x2, _WEIGHT, b)
        y = pre if activation == "none" else p.activate(activation, pre, not save)
    elif training.forward == "cpp":
        pre = p.linear(x2, _WEIGHT, b)
        function = _address(cpp_elementwise._library().fastlinear_act)
        y = p.activate_in_cpp(activation, pre, function, over=not save)
    elif training.forward == "eager":
        pre = p.linear(x2, _WEIGHT, b)
        y = pre if activation == "none" else p.activate(activation, pre, not save)
    else:
        return None
    if x.dim() != 2:
        y = p.view(y, shape)
    return p.spec(y, pre if save else None)


def _backward(
    training: Training,
    needs: Needs,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    saved: Tensor | None,
) -> Any:
    """The backward's program: dy, x, weight, bias, what was saved → dx, dW, db.

    dy is contiguous, and all this ran on such tensors.
    """
    if dy.is_cuda and not door_node.serves_cuda():
        return None
    if (x is not None and not _viewable(x)) or (saved is not None and not saved.is_contiguous()):
        return None
    pieces = _Pieces(training, needs, dy, x, weight, saved)
    results = pieces.results()
    if results is None:
        return None
    dx, dw, db = results
    if dx is not None and dy.dim() != 2:
        assert weight is not None
        dx = pieces.program.view(dx, (*dy.shape[:-1], weight.shape[1]))
    return pieces.program.spec(dx, dw, db)


class _Pieces:
    """The pieces of one backward as steps of a program; tensors beside their numbers."""

    def __init__(
        self,
        training: Training,
        needs: Needs,
        dy: Tensor,
        x: Tensor | None,
        weight: Tensor | None,
        saved: Tensor | None,
    ) -> None:
        self.program = p = Program(5)
        self.needs, self.names = needs, training.backward
        self.activation = training.formula.activation
        self.dy, self.saved = dy.reshape(-1, dy.shape[-1]), saved
        self.x, self.weight = x, weight
        self.dy_2d = _FROM_DY if dy.dim() == 2 else p.view(_FROM_DY, self.dy.shape)
        self.saved_2d = _FROM_SAVED
        if saved is not None and saved.dim() != 2:
            self.saved = saved.view(self.dy.shape)
            self.saved_2d = p.view(_FROM_SAVED, self.dy.shape)
        self.x_2d = _FROM_X
        if x is not None and x.dim() != 2:
            self.x = x.view(-1, x.shape[-1])
            self.x_2d = p.view(_FROM_X, self.x.shape)

    def results(self) -> tuple[int | None, int | None, int | None] | None:
        """Numbers of dx, dW and db; None where a backend has no such form."""
        if "backward" in self.names:
            return self._whole() if self.names["backward"] == "triton" else None
        if self.activation == "none":  # in the order of the formula
            products = self._products(self.dy_2d, _FROM_DY)
            made = self._grad_pre()
        else:
            made = self._grad_pre()
            products = None if made is None else self._products(made[0], made[0])
        return None if made is None or products is None else (*products, made[1])

    def _whole(self) -> tuple[int | None, int | None, int | None] | None:
        from fastlinear.ops.linear_act import triton_backward

        numbers = _FROM_DY, _FROM_SAVED, _FROM_X, _FROM_WEIGHT
        tensors = self.dy, self.saved, self.x, self.weight
        found: tuple[int | None, int | None, int | None] | None = triton_backward.steps(
            self.program, numbers, *tensors, self.activation, self.needs
        )
        return found

    def _grad_pre(self) -> tuple[int, int | None] | None:
        """(dpre, db)."""
        p, backend, need_db = self.program, self.names["grad_pre"], self.needs[2]
        if self.activation == "none" and not need_db:
            return self.dy_2d, None
        if backend == "eager":
            dpre = self.dy_2d
            if self.activation != "none":
                dpre = p.differentiate(self.activation, dpre, self.saved_2d)
            return dpre, p.row_sum(dpre) if need_db else None
        if backend == "cpp":
            function = _address(cpp_elementwise._library().fastlinear_dact)
            chunks = cpp_elementwise._CHUNKS
            given = self.dy_2d, self.saved_2d, function, chunks
            return p.differentiate_in_cpp(self.activation, *given, sums=need_db)
        if backend == "triton":
            from fastlinear.ops.linear_act import triton

            numbers = _FROM_DY, _FROM_SAVED
            made = triton.grad_pre_steps(p, numbers, self.dy, self.saved, self.activation, need_db)
            if made is not None:
                return self.dy_2d if self.activation == "none" else made[0], made[1]
        return None

    def _products(self, dpre: int, memory: int) -> tuple[int | None, int | None] | None:
        """(dx, dW); ``memory`` is the tensor whose memory dpre's view is of."""
        dx: int | None = None
        dw: int | None = None
        if self.needs[0]:
            dx = self._product("grad_input", dpre, memory, _FROM_WEIGHT)
            if dx is None:
                return None
        if self.needs[1]:
            dw = self._product("grad_weight", dpre, memory, _FROM_X)
            if dw is None:
                return None
        return dx, dw

    def _product(self, piece: str, dpre: int, memory: int, other: int) -> int | None:
        p, backend = self.program, self.names[piece]
        is_dw = piece == "grad_weight"
        tensor = self.x if is_dw else self.weight
        number = self.x_2d if is_dw else other
        assert tensor is not None
        if backend == "eager":
            return p.product(dpre, number, a_turned=is_dw)
        if backend == "onednn":
            if onednn._plain(tensor) is not tensor:
                return None
            return p.onednn(dpre, number, x_turned=is_dw, weight_turned=True)
        if backend == "triton":
            from fastlinear.ops.linear_act import triton

            a = self.dy.t() if is_dw else self.dy  # dpre is laid out as dy is
            made: int | None = triton.product_steps(p, a, tensor, memory, other)
            return made
        return None


def _viewable(x: Tensor) -> bool:
    return x.dim() == 2 or x.is_contiguous()


def _numbered(launch: DoorLaunch, numbers: dict[int, int | None]) -> DoorLaunch:
    """The launch with its results' places as numbers of a program's tensors."""
    found = []
    for argument, tensor in launch.tensors:
        number = numbers.get(tensor, tensor)
        assert number is not None
        found.append((argument, number))
    return replace(launch, tensors=tuple(found))


def _address(function: Callable[..., Any]) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address
