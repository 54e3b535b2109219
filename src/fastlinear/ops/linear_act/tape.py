"""Training calls of linear_act as the compiled fast path records them: one node, tapes of
pieces.

What a tape does is what the backends chosen for the pieces do, with the very same kernels and
ops of PyTorch; a backend that has no such form leaves its direction to Python.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fastlinear.ops.common import cpp_build, cpp_elementwise, cpp_gemm, fastpath_node
from fastlinear.ops.common.fastpath_launch import FastpathLaunch, Y
from fastlinear.ops.common.tape import Tape, memory
from fastlinear.ops.linear_act import launches, onednn
from fastlinear.ops.linear_act.autograd import Formula

Needs = tuple[bool, bool, bool]
NAME = "LinearActBackward"
_DX, _DW = 1, 2  # gradients as bits: x is read for dW, the weight for dx


@dataclass(frozen=True, slots=True)
class Training:
    """The formula of training calls, and the names of the backends in it.

    Attributes:
        formula: what both ways through Python and C++ run.
        forward: the forward's backend.
        backward: piece → its backend; one entry where one backend computes all of it.
    """

    formula: Formula
    forward: str
    backward: dict[str, str]


_KEPT = {"none": (), "output": (fastpath_node.OUTPUT,), "pre": (fastpath_node.HIDDEN,)}


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix among a tape's tensors.

    Attributes:
        tensor: one laid out as it is.
        number: its own.
        memory: the number of the tensor whose memory it has, where it is a view.
    """

    tensor: Tensor
    number: int
    memory: int


def matrix(tape: Tape, number: int, tensor: Tensor) -> Operand:
    """The tensor of that number as its rows: itself, or a view where it has other dimensions."""
    if tensor.dim() == 2:
        return Operand(tensor, number, number)
    rows = tensor.view(-1, tensor.shape[-1])
    return Operand(rows, tape.view(number, rows.shape), number)


def node(training: Training, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The table's plan for such calls, which have run. None while there is no library of nodes, or
    where the bias is not dense."""
    if not (_dense(bias) and fastpath_node.begun()):
        return None
    formula = training.formula

    def recorder(
        needs: Needs,
        dy: Tensor,
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
    ) -> Any:
        return _backward(training, needs, dy, tensors[0], tensors[1], kept[0] if kept else None)

    given = (x.detach(), weight.detach(), None if bias is None else bias.detach())
    return fastpath_node.node(
        NAME,
        (x, weight, bias),
        formula.forward,
        formula.gradients,
        recorder,
        _forward(training, *given),
        _KEPT[formula.saved],
        (_DW, _DX, 0),
    )


def inference(
    backend: str,
    activation: str,
    plan: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Any:
    """The table's plan for calls on a GPU without gradients, which have run: one launch, or a
    tape of several. None where neither is all of it. ``plan`` serves what these cannot."""
    if not x.is_cuda or not _dense(bias):
        return None
    launch = launches.forward(backend, x, weight, bias, activation, False)
    if launch is not None:
        return launch.plan(plan, weight.shape[0])
    return tape(backend, activation, plan, x, weight, bias)


def tape(
    backend: str,
    activation: str,
    plan: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
) -> Any:
    """The table's plan for the same calls where they are several launches, or None."""
    if (
        not fastpath_node.begun()
        or not viewable(x)
        or (x.is_cuda and not fastpath_node.serves_cuda())
    ):
        return None
    p = Tape(3)
    given = matrix(p, 0, x), Operand(weight, 1, 1), None if bias is None else Operand(bias, 2, 2)
    shape = (*x.shape[:-1], weight.shape[0])
    made = forward_steps(p, backend, *given, activation, False, shape)
    return None if made is None else fastpath_node.tape(p.spec(made[0]), (x, weight, bias), plan)


def _forward(training: Training, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """The forward's tape: x, weight, bias → y, and the pre-activation where it is kept."""
    formula = training.formula
    if not viewable(x) or (x.is_cuda and not fastpath_node.serves_cuda()):
        return None
    p = Tape(3)
    shape = (*x.shape[:-1], weight.shape[0])
    rows, w = matrix(p, 0, x), Operand(weight, 1, 1)
    b = None if bias is None else Operand(bias, 2, 2)
    save = formula.saved == "pre"
    made = forward_steps(p, training.forward, rows, w, b, formula.activation, save, shape)
    if made is None:
        return None
    y, pre = made
    return p.spec(y, *((pre if save else None,) if _KEPT[formula.saved] else ()))


def _backward(
    training: Training,
    needs: Needs,
    dy: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    saved: Tensor | None,
) -> Any:
    """The backward's tape: dy, x, weight, bias, what was saved → dx, dW, db.

    dy is contiguous, and all this ran on such tensors.
    """
    if dy.is_cuda and not fastpath_node.serves_cuda():
        return None
    if (x is not None and not viewable(x)) or (saved is not None and not saved.is_contiguous()):
        return None
    p = Tape(4 if saved is None else 5)
    gradient = matrix(p, 0, dy)
    layer = Layer(
        p,
        training.backward,
        training.formula.activation,
        needs,
        None if x is None else matrix(p, 1, x),
        None if weight is None else Operand(weight, 2, 2),
        None if saved is None else matrix(p, 4, saved),
    )
    results = layer.steps(gradient)
    if results is None:
        return None
    dx, dw, db = results
    if dx is not None and dy.dim() != 2:
        assert weight is not None
        dx = p.view(dx, (*dy.shape[:-1], weight.shape[1]))
    return p.spec(dx, dw, db)


def forward_steps(
    p: Tape,
    backend: str,
    x: Operand,
    weight: Operand,
    bias: Operand | None,
    activation: str,
    save: bool,
    shape: tuple[int, ...],
) -> tuple[int, int | None] | None:
    """A layer's forward: the numbers of y, of that shape, and of the pre-activation (M, N).

    The latter is there with ``save`` at least. None where the backend has no such form; it must
    have run on tensors laid out so.
    """
    rows, columns = x.tensor.shape[0], weight.tensor.shape[0]
    b = None if bias is None else bias.number
    pre: int | None
    if backend in ("triton", "cuda", "few_rows"):
        y = p.empty(shape, x.tensor.dtype, x.memory)
        pre = p.empty((rows, columns), x.tensor.dtype, x.memory) if save else None
        tensors = x.tensor, weight.tensor, None if bias is None else bias.tensor
        launch = launches.forward(backend, *tensors, activation, save)
        if launch is None:
            if backend != "triton":
                return None
            from fastlinear.ops.linear_act import triton

            numbers = x.memory, weight.memory, b
            made = triton.forward_steps(p, tensors, numbers, activation, y, pre)
            return (y, pre) if made else None
        given = {0: x.memory, 1: weight.memory, 2: b, Y: y, launches.PRE: pre}
        p.launch(_numbered(launch, given))
        return y, pre
    if backend == "onednn":
        fused = not save and activation not in ("none", "relu")
        if fused or onednn.plain(weight.tensor) is not weight.tensor:
            return None
        pre = p.onednn(x.number, weight.number, b)
    elif backend == "cpp":
        pre = p.linear(x.number, weight.number, None)
    elif backend == "gemm_cpp":
        turned = replace(weight, tensor=weight.tensor.t())
        pre = _gemm_in_cpp(p, x, turned)
        if pre is None:
            return None
    elif backend == "eager":
        pre = p.linear(x.number, weight.number, b)
    else:
        return None
    passes = backend in ("cpp", "gemm_cpp")  # of our own behind the product
    if passes and bias is None and (backend == "cpp" or activation not in ("none", "tanh")):
        function = cpp_build.address(cpp_elementwise._library().fastlinear_act)
        y = p.activate_in_cpp(activation, pre, function, over=not save)
    elif passes and bias is not None:
        if not bias.tensor.is_contiguous():
            return None
        function = cpp_build.address(cpp_elementwise._library().fastlinear_act_bias)
        first = "none" if activation == "tanh" else activation
        y = p.activate_in_cpp(first, pre, function, over=not save, bias=b)
        y = p.activate(activation, y, True) if activation == "tanh" else y
    else:
        y = pre if activation == "none" else p.activate(activation, pre, not save)
    return (y if len(shape) == 2 else p.view(y, shape)), pre


class Layer:
    """The backward of one layer as steps of a tape.

    Args:
        tape: what they are added to.
        names: piece → its backend.
        activation: its name.
        needs: which of dx, dW and db are wanted.
        x, weight, saved: as ``reference.backward`` takes them; None where nothing reads them.
    """

    def __init__(
        self,
        tape: Tape,
        names: Mapping[str, str],
        activation: str,
        needs: Needs,
        x: Operand | None,
        weight: Operand | None,
        saved: Operand | None,
    ) -> None:
        self._tape, self._names = tape, names
        self._activation, self._needs = activation, needs
        self._x, self._weight = x, weight
        self._saved = None if activation == "none" else saved

    def steps(self, dy: Operand) -> tuple[int | None, int | None, int | None] | None:
        """Numbers of dx (M, K), dW and db; None where a backend has no such form."""
        if "backward" in self._names:
            return self._whole(dy) if self._names["backward"] == "triton" else None
        if self._activation == "none":  # in the order of the formula
            products = self._products(dy)
            made = self._grad_pre(dy)
        else:
            made = self._grad_pre(dy)
            products = None if made is None else self._products(made[0])
        return None if made is None or products is None else (*products, made[1])

    def _whole(self, dy: Operand) -> tuple[int | None, int | None, int | None] | None:
        from fastlinear.ops.linear_act import triton_backward

        def of(operand: Operand | None) -> tuple[int, Tensor | None]:
            return (-1, None) if operand is None else (operand.memory, operand.tensor)

        (saved, x, weight) = of(self._saved), of(self._x), of(self._weight)
        found: tuple[int | None, int | None, int | None] | None = triton_backward.steps(
            self._tape,
            (dy.memory, saved[0], x[0], weight[0]),
            dy.tensor,
            saved[1],
            x[1],
            weight[1],
            self._activation,
            self._needs,
        )
        return found

    def _grad_pre(self, dy: Operand) -> tuple[Operand, int | None] | None:
        """dpre, and the number of db."""
        p, backend, need_db = self._tape, self._names["grad_pre"], self._needs[2]
        identity = self._activation == "none"
        if identity and not need_db:
            return dy, None
        if backend == "triton":
            from fastlinear.ops.linear_act import triton

            saved, kept = self._saved, None if self._saved is None else self._saved.tensor
            numbers = dy.memory, -1 if saved is None else saved.memory
            made = triton.grad_pre_steps(p, numbers, dy.tensor, kept, self._activation, need_db)
            if made is None:
                return None
            # dpre is laid out as dy is
            return dy if identity else Operand(dy.tensor, made[0], made[0]), made[1]
        if backend not in ("eager", "cpp"):
            return None
        if backend == "cpp":
            assert self._saved is not None
            function = cpp_build.address(cpp_elementwise._library().fastlinear_dact)
            given = dy.number, self._saved.number, function, cpp_elementwise._CHUNKS
            dpre, db = p.differentiate_in_cpp(self._activation, *given, sums=need_db)
            return Operand(dy.tensor, dpre, dpre), db
        found = dy
        if not identity:
            assert self._saved is not None
            dpre = p.differentiate(self._activation, dy.number, self._saved.number)
            found = Operand(dy.tensor, dpre, dpre)
        return found, p.row_sum(found.number) if need_db else None

    def _products(self, dpre: Operand) -> tuple[int | None, int | None] | None:
        """Numbers of dx and dW."""
        found: list[int | None] = [None, None]
        for i, other in enumerate((self._weight, self._x)):
            if not self._needs[i]:
                continue
            assert other is not None
            found[i] = self._product(dpre, other, i == 1)
            if found[i] is None:
                return None
        return found[0], found[1]

    def _product(self, dpre: Operand, other: Operand, turned: bool) -> int | None:
        """dpre W, or dpreᵀ x where ``turned``."""
        p, backend = self._tape, self._names["grad_weight" if turned else "grad_input"]
        if backend == "eager":
            return p.product(dpre.number, other.number, a_turned=turned)
        if backend == "onednn":
            if onednn.plain(other.tensor) is not other.tensor:
                return None
            return p.onednn(dpre.number, other.number, x_turned=turned, weight_turned=True)
        if backend == "gemm_cpp":
            left = replace(dpre, tensor=dpre.tensor.t()) if turned else dpre
            return _gemm_in_cpp(p, left, other)
        if backend == "triton":
            from fastlinear.ops.linear_act import triton

            a = dpre.tensor.t() if turned else dpre.tensor
            made: int | None = triton.product_steps(p, a, other.tensor, dpre.memory, other.memory)
            return made
        return None


def _gemm_in_cpp(p: Tape, a: Operand, b: Operand) -> int | None:
    """a (M, K) b (K, N) by ``gemm.cpp``, their tensors turned where they are read so; None where
    it does not read them as they lie."""
    (m, k), n = a.tensor.shape, b.tensor.shape[1]
    if not (m and n and k and cpp_gemm.readable(a.tensor) and cpp_gemm.readable(b.tensor)):
        return None
    c = p.empty((m, n), a.tensor.dtype, a.memory)
    left, right = a.tensor.stride(), b.tensor.stride()
    given = memory(a.number), left[0], left[1], memory(b.number), right[0], right[1], memory(c)
    p.call(cpp_gemm.address(), *given, n, m, n, k)
    return c


def _dense(bias: Tensor | None) -> bool:
    return bias is None or bias.is_contiguous()


def viewable(x: Tensor) -> bool:
    """Whether x is its rows, or a view of x is."""
    return x.dim() == 2 or x.is_contiguous()


def _numbered(launch: FastpathLaunch, numbers: dict[int, int | None]) -> FastpathLaunch:
    """The launch with the places of its tensors as numbers of a tape's."""
    found = []
    for argument, tensor in launch.tensors:
        number = numbers[tensor]
        assert number is not None
        found.append((argument, number))
    return replace(launch, tensors=tuple(found))
