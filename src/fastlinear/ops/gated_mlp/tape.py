"""Calls of gated_mlp as the compiled fast path runs and records them: one node, tapes of its
pieces.

What a tape does is what the backends ``cuda`` and ``elementwise`` do, with the very same kernels
and ops of PyTorch; others, and what would be copied first, run in Python inside the node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fastlinear.ops.common import fastpath_node
from fastlinear.ops.common.tape import Tape
from fastlinear.ops.gated_mlp import bias_sums, cuda, launches
from fastlinear.ops.gated_mlp.autograd import Formula
from fastlinear.ops.gated_mlp.cuda_config import config_for
from fastlinear.ops.gated_mlp.launches import Laid
from fastlinear.ops.gated_mlp.layers import products_for
from fastlinear.ops.gated_mlp.products import PYTORCH
from fastlinear.ops.gated_mlp.saved_memory import READERS, readers_of_x, reads_kept
from fastlinear.ops.gated_mlp.stacking import (
    Biases,
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
from fastlinear.ops.linear_act.tape import Operand, forward_steps, matrix, viewable

NAME = "GatedMLPBackward"
BACKENDS = frozenset({"cuda", "elementwise"})
"""Backends that are launches and PyTorch's ops."""
_GIVEN = 7  # x, three weights, three biases
_KEPT = 2  # the two pre-activations, or their stack and nothing
_DY, _X, _WEIGHTS, _BIASES, _PRE = 0, 1, 2, 5, 8  # a backward's; a forward's begin with x
_INNER = (0, 1, 2, 4, 5)  # gradients that go through the gate
Numbers = tuple[int, int | None]
"""Pre-activations, or their gradients, among a tape's tensors: as they lie."""
Through = tuple[Numbers, int | None, tuple[int | None, int | None, int | None]]
"""dpre, h or None, and the gradients of the gate's (or the stack's), the up and the down bias."""


def inference(
    backend: str,
    activation: str,
    order: str,
    plan: Callable[..., Tensor],
    x: Tensor,
    weights: tuple[Any, Any, Any],
    biases: tuple[Any, Any, Any],
) -> Any:
    """The table's plan for calls without gradients, which have run; None where only ``plan`` serves
    them. ``backend`` is one of ``BACKENDS``."""
    if not fastpath_node.begun():
        return None
    held = Weights(*weights), Biases(*biases)
    found = _forward(backend, activation, order, False, x, *held)
    if found is None:
        return None
    tape, y, _ = found
    return fastpath_node.tape(tape.spec(y), (x, *weights, *biases), plan)


def node(
    formula: Formula, x: Tensor, weights: tuple[Any, Any, Any], biases: tuple[Any, Any, Any]
) -> Any:
    """The formula as the compiled fast path records it, for such tensors; None while there is no
    library of nodes. They must have run before."""
    tensors = x, *weights, *biases
    if not fastpath_node.begun():
        return None

    def recorder(
        needs: Needs,
        dy: Tensor,
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
        over: bool = False,
    ) -> Any:
        return _backward(formula, needs, dy, tensors, kept, over)

    names = formula.forward_name, formula.activation, formula.order
    given: Any = [None if t is None else t.detach() for t in tensors]
    found = _forward(*names, formula.save_pre, given[0], Weights(*given[1:4]), Biases(*given[4:]))
    kept = fastpath_node.SPENT if formula.save_pre else fastpath_node.NOTHING
    return fastpath_node.node(
        NAME,
        tensors,
        formula.forward,
        formula.gradients,
        recorder,
        None if found is None else found[0].spec(found[1], *found[2]),
        (kept, kept if weights[1] is not None else fastpath_node.NOTHING),
        # all are read where any are: second derivatives start from them
        (readers_of_x(formula.save_pre), *(READERS,) * (len(tensors) - 1)),
        (READERS,) * _KEPT,
    )


# --------------------------------------------------------------------------------------------
# Forward


def _forward(
    backend: str,
    activation: str,
    order: str,
    save: bool,
    x: Tensor,
    weights: Weights,
    biases: Biases,
) -> tuple[Tape, int, tuple[int | None, int | None]] | None:
    """The forward's tape: x, weights, biases → the numbers of y, and of the pre-activations
    where they are kept. None where a piece has no such form."""
    if not _served(backend, x):
        return None
    p = Tape(_GIVEN)
    rows = matrix(p, 0, x)
    steps = _by_cuda if backend == "cuda" else _elementwise
    made = steps(p, rows, weights, biases, activation, order, save)
    if made is None:
        return None
    h, pre = made
    down, bias = weights.down, biases.down
    m, size = rows.tensor.shape[0], hidden(weights)
    y: int | None = h
    if down is None:
        y = h if x.dim() == 2 else p.view(h, (*x.shape[:-1], size))
    else:
        hs = Operand(rows.tensor.new_empty(m, size), h, h)
        name = cuda.down_choice(hs.tensor, down, bias)[0] if backend == "cuda" else "eager"
        w, b = Operand(down, 3, 3), None if bias is None else Operand(bias, 6, 6)
        shape = *x.shape[:-1], down.shape[0]
        product = forward_steps(p, name, hs, w, b, "none", False, shape)
        y = None if product is None else product[0]
    return None if y is None else (p, y, pre if save else (None, None))


def _by_cuda(
    p: Tape,
    x: Operand,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    save: bool,
) -> tuple[int, tuple[int | None, int | None]] | None:
    """``cuda.gate``: the numbers of h and of the pre-activations, None where they are not kept."""
    m, size = x.tensor.shape[0], hidden(weights)
    numbers: tuple[int | None, int | None] = None, None
    kept: list[Laid] = []
    if save:
        pre = empty_pre(x.tensor, size, order)
        numbers = found = _empties(p, pre, x.memory)
        kept = _halves(pre, found, order)
    h = p.empty((m, size), x.tensor.dtype, x.memory)
    out: Laid = x.tensor.new_empty(m, size), (h, 0)
    arguments: list[Laid] = [
        (x.tensor, (x.memory, 0)),
        *_parts(split_weights(weights, order), (1, 2), weights.gate, order),
        out,
        *(kept or (out, out)),
        *_parts(split_biases(biases, order), (4, 5), biases.gate, order),
    ]
    return (h, numbers) if p.launch(launches.gate(arguments, activation, save)) else None


def _elementwise(
    p: Tape,
    x: Operand,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    save: bool,
) -> tuple[int, tuple[int | None, int | None]] | None:
    """The products of gate and up, and the Triton pass over them; as above."""
    numbers = _pre_activations(p, x.number, 1, 4, weights, biases)
    pre = empty_pre(x.tensor, hidden(weights), order)
    h = _gated(p, pre, numbers, activation, order, over=not save)
    return None if h is None else (h, numbers)


def _pre_activations(
    p: Tape, x: int, weight: int, bias: int, weights: Weights, biases: Biases
) -> Numbers:
    """``reference.pre_activations`` of rows; ``weight`` and ``bias`` are the gate's numbers."""
    first = p.linear(x, weight, None if biases.gate is None else bias)
    if weights.up is None:
        return first, None
    return first, p.linear(x, weight + 1, None if biases.up is None else bias + 1)


def _gated(
    p: Tape, pre: Pre, numbers: Numbers, activation: str, order: str, *, over: bool = False
) -> int | None:
    """The Triton pass: the number of h out of pre-activations laid out as ``pre``; ``over`` as for
    ``triton.gate_forward``."""
    gate, up = _halves(pre, numbers, order)
    assert gate is not None
    out, h = gate[0], numbers[0]
    if not over or order != "apart":
        out = out.new_empty(out.shape)
        h = p.empty(out.shape, out.dtype, numbers[0])
    arguments: list[Laid] = [gate, up, (out, (h, 0))]
    launch = launches.elementwise(arguments, activation, order, backward=False)
    return h if p.launch(launch) else None


# --------------------------------------------------------------------------------------------
# Backward


def _backward(
    formula: Formula,
    needs: Needs,
    dy: Tensor,
    tensors: tuple[Tensor | None, ...],
    kept: tuple[Tensor | None, ...],
    over: bool,
) -> Any:
    """The backward's tape: dy, x, weights, biases, what was kept → seven gradients.

    dy is contiguous, and all this ran on such tensors; x or all of them are None where the
    ``kept`` module says that none is read. ``over``: what was kept may be written over.
    """
    given: Any = tensors
    x, weights, biases = given[0], Weights(*given[1:4]), Biases(*given[4:])
    if not _served(formula.backward_name, dy if x is None else x):
        return None
    if any(k is not None and not k.is_contiguous() for k in kept):
        return None
    p = Tape(1 + _GIVEN + _KEPT)
    gradient = matrix(p, _DY, dy)
    inner = any(needs[i] for i in _INNER)
    if not reads_kept(needs):
        down_bias = _column_sums(p, formula, gradient) if needs[6] else None
        return None if needs[6] and down_bias is None else p.spec(*(None,) * 6, down_bias)
    again = kept[0] is None
    rows = matrix(p, _X, x) if again or needs[1] or needs[2] else None
    pre: Any = kept
    numbers: Numbers = _PRE, None if weights.up is None else _PRE + 1
    if again:
        assert rows is not None
        pre = empty_pre(rows.tensor, hidden(weights), formula.order)
        numbers = _pre_activations(p, rows.number, _WEIGHTS, _BIASES, weights, biases)
    if inner:
        steps = _through_down if formula.backward_name == "cuda" else _through_gate
        through = steps(p, formula, needs, gradient, weights, pre, numbers, over or again)
    elif formula.backward_name == "elementwise":
        h = _gated(p, pre, numbers, formula.activation, formula.order)
        down_bias = p.row_sum(gradient.number) if needs[6] else None
        through = None if h is None else (numbers, h, (None, None, down_bias))
    else:
        through = None  # PyTorch's ops in Python
    if through is None:
        return None
    if over:  # what was kept holds dpre, or nothing that is read again
        for number in numbers:
            if number is not None:
                p.spend(number)
    (first, second), h, summed = through
    down_weight = gate_weight = up_weight = dx = None
    if needs[3]:
        assert h is not None
        down_weight = p.product(gradient.number, h, a_turned=True)
    if needs[1]:
        assert rows is not None
        gate_weight = p.product(first, rows.number, a_turned=True)
    if needs[0]:
        dx = p.product(first, _WEIGHTS)  # the gate's half is given back before up's dW is made
    if needs[2] and second is not None:
        assert rows is not None
        up_weight = p.product(second, rows.number, a_turned=True)
    if dx is not None:
        if second is not None:
            p.accumulate(dx, second, _WEIGHTS + 1)
        dx = dx if x.dim() == 2 else p.view(dx, x.shape)
    return p.spec(dx, gate_weight, up_weight, down_weight, *summed)


def _column_sums(p: Tape, formula: Formula, dy: Operand) -> int | None:
    """The down bias's gradient alone: ``bias_sums.column_sums``, or PyTorch's."""
    if formula.backward_name != "cuda":
        return p.row_sum(dy.number)
    shares = _shares(p, dy)
    if not p.launch(launches.shares([(dy.tensor, (dy.memory, 0)), shares])):
        return None
    n = dy.tensor.shape[1]
    found = p.empty((n,), dy.tensor.dtype, dy.memory)
    out: Laid = dy.tensor.new_empty(n), (found, 0)
    p.launch(launches.bias_sums([None, None, None, shares, out], dy.tensor))
    return found


def _shares(p: Tape, dy: Operand) -> Laid:
    """New memory for the shares of dy's column sums."""
    like = bias_sums.empty_shares(dy.tensor)
    return like, (p.empty(like.shape, torch.float32, dy.memory), 0)


def _through_down(
    p: Tape,
    formula: Formula,
    needs: Needs,
    dy: Operand,
    weights: Weights,
    pre: Pre,
    numbers: Numbers,
    over: bool,
) -> Through | None:
    """``cuda.through_down``."""
    down = weights.down
    if down is None:
        return None
    order, dtype = formula.order, dy.tensor.dtype
    (m, n), size = dy.tensor.shape, down.shape[1]
    found, dpre = (pre, numbers) if over else _new_like(p, pre, dy.memory)
    read = _halves(pre, numbers, order)
    h = p.empty((m, size), dtype, dy.memory) if needs[3] else None
    out = read[0] if h is None else (dy.tensor.new_empty(m, size), (h, 0))
    config = config_for("backward", m, size)
    sums: Laid = None
    rows = cuda.sums_rows(config, m, n, size)
    if needs[4] or needs[5]:
        shape = 2, rows, size
        number = p.empty(shape, torch.float32, dy.memory)
        sums = dy.tensor.new_empty(shape, dtype=torch.float32), (number, 0)
    shares, dy_again = None, None
    if needs[6]:
        shares, dy_again = _shares(p, dy), (dy.tensor, (dy.memory, 0))
    arguments: list[Laid] = [
        (dy.tensor, (dy.memory, 0)),
        (down, (_WEIGHTS + 2, 0)),
        *read,
        *_halves(found, dpre, order),
        out,
        sums,
        dy_again,
        shares,
    ]
    launch = launches.through_down(arguments, formula.activation, needs[3], config)
    if not p.launch(launch):
        return None
    if not (needs[4] or needs[5] or needs[6]):
        return dpre, h, (None, None, None)
    gradients: list[int | None] = [None, None, None]
    parts: list[Laid] = [None, None]
    if sums is not None and order == "apart":
        gradients[:2] = [p.empty((size,), dtype, dy.memory) if g else None for g in needs[4:6]]
        half = dy.tensor.new_empty(size)
        parts = [None if g is None else (half, (g, 0)) for g in gradients[:2]]
    elif sums is not None:
        both = dy.tensor.new_empty(2 * size)
        gradients[0] = p.empty((2 * size,), dtype, dy.memory)
        parts = _parts(halves(both, None, order, 0), (gradients[0], None), both, order)
    last: Laid = None
    if needs[6]:
        number = gradients[2] = p.empty((n,), dtype, dy.memory)
        last = dy.tensor.new_empty(n), (number, 0)
    p.launch(launches.bias_sums([sums, *parts, shares, last], dy.tensor))
    return dpre, h, (gradients[0], gradients[1], gradients[2])


def _through_gate(
    p: Tape,
    formula: Formula,
    needs: Needs,
    dy: Operand,
    weights: Weights,
    pre: Pre,
    numbers: Numbers,
    over: bool,
) -> Through | None:
    """The product through the down projection, if there is one, and ``triton.gate_backward``."""
    if needs[4] or needs[5]:
        return None  # their sums are finished in Python
    order, dh = formula.order, dy.tensor
    number = dy.memory
    if weights.down is not None:
        dh = dh.new_empty(dh.shape[0], hidden(weights))
        number = p.product(dy.number, _WEIGHTS + 2)
    found, dpre = (pre, numbers) if over else _new_like(p, pre, number)
    # h takes the memory of dh, unless that is the caller's
    h = number if weights.down is not None else p.empty(dh.shape, dh.dtype, number)
    arguments: list[Laid] = [
        (dh, (number, 0)),
        *_halves(pre, numbers, order),
        *_halves(found, dpre, order),
        (dh if h == number else torch.empty_like(dh), (h, 0)),
        None,
    ]
    launch = launches.elementwise(arguments, formula.activation, order, backward=True)
    if not p.launch(launch):
        return None
    return dpre, h, (None, None, p.row_sum(dy.number) if needs[6] else None)


# --------------------------------------------------------------------------------------------


def _served(backend: str, x: Tensor) -> bool:
    if backend not in BACKENDS or (backend == "elementwise" and products_for(x) is not PYTORCH):
        return False
    return viewable(x) and (not x.is_cuda or fastpath_node.serves_cuda())


def _new_like(p: Tape, pre: Pre, like: int) -> tuple[Pre, Numbers]:
    found = empty_like(pre)
    return found, _empties(p, found, like)


def _empties(p: Tape, pre: Pre, like: int) -> Numbers:
    """New tensors laid out as these."""
    first = p.empty(pre[0].shape, pre[0].dtype, like)
    return first, None if pre[1] is None else p.empty(pre[1].shape, pre[1].dtype, like)


def _halves(pre: Pre, numbers: Numbers, order: str) -> list[Laid]:
    return _parts(split_pre(pre, order), numbers, pre[0], order)


def _parts(
    parts: Sequence[Tensor | None],
    numbers: Sequence[int | None],
    whole: Tensor | None,
    order: str,
) -> list[Laid]:
    """Where gate and up lie: in two tensors of these numbers, or in the whole of the first."""
    found: list[Laid] = []
    for part, number in zip(parts, numbers, strict=True):
        if part is None:
            found.append(None)
        elif order == "apart":
            assert number is not None
            found.append((part, (number, 0)))
        else:
            assert whole is not None
            assert numbers[0] is not None
            found.append((part, (numbers[0], part.data_ptr() - whole.data_ptr())))
    return found
