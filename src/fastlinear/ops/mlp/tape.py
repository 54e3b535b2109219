"""Calls of mlp as the compiled fast path runs them: in training one node for the whole chain.

Where a direction runs layer after layer, its tape is that of the layers, one after the other;
other backends are called from the node. So are layers without gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastlinear.dispatch.select import select
from fastlinear.ops.common import fastpath_node
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.tape import Tape
from fastlinear.ops.linear_act.problem import BACKWARD_PIECES
from fastlinear.ops.linear_act.tape import Layer, Operand, forward_steps, matrix, viewable
from fastlinear.ops.mlp.autograd import Formula
from fastlinear.ops.mlp.layerwise import backward_choices
from fastlinear.ops.mlp.layerwise import problem_of as layer_problem
from fastlinear.ops.mlp.problem import layer_activations
from fastlinear.ops.mlp.reference import first_needed
from fastlinear.ops.mlp.whole_cpp_tape import whole_backward, whole_forward

NAME = "MlpBackward"
_LAYERED = ("eager", "layerwise")


@dataclass(frozen=True, slots=True)
class Training:
    """The formula of a training call, and the names of its two backends."""

    formula: Formula
    forward: str
    backward: str


def node(
    training: Training,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
) -> Any:
    """The fast path's plan for such calls, or None where there is no library of nodes, or too many
    tensors. They must have run before; biases are contiguous."""
    tensors = (x, *weights, *((None,) if biases is None else biases))
    if not fastpath_node.begun() or len(tensors) > fastpath_node.MAX_TENSORS:
        return None
    formula = training.formula

    def recorder(
        needs: tuple[bool, ...],
        dy: Tensor,
        tensors: tuple[Tensor | None, ...],
        kept: tuple[Tensor | None, ...],
    ) -> Any:
        return _backward(training, needs, dy, tensors, kept)

    last = {
        "none": fastpath_node.NOTHING,
        "output": fastpath_node.OUTPUT,
        "pre": fastpath_node.INTERNAL,
    }
    kinds = (fastpath_node.INTERNAL,) * (formula.layers - 1)
    return fastpath_node.node(
        NAME,
        tensors,
        formula.forward,
        formula.gradients,
        recorder,
        _forward(training, x.detach(), [w.detach() for w in weights], biases),
        (*kinds, last[activation_of(formula.final_activation).saved]),
        (-1,) * len(tensors),  # all are kept: second derivatives start from them
    )


@dataclass(frozen=True, slots=True)
class Inference:
    """Calls without gradients that run layer after layer, or in a kernel of the whole chain."""

    activation: str
    final_activation: str
    backend: str = "layerwise"


def inference(
    inference: Inference,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    plan: Callable[..., Tensor],
) -> Any:
    """The fast path's plan for such calls, or None where there is no library of tapes, too many
    tensors, or a layer's backend that has no such form. They must have run before; biases are
    contiguous. ``plan`` serves what the tape cannot."""
    tensors = (x, *weights, *((None,) if biases is None else biases))
    if not fastpath_node.begun() or len(tensors) > fastpath_node.MAX_TENSORS or not _served(x):
        return None
    p = Tape(len(tensors))
    if inference.backend != "layerwise":
        y = _whole(p, inference, x, weights, biases)
    else:
        names = layer_activations(len(weights), inference.activation, inference.final_activation)
        steps = _layers(p, "layerwise", x, weights, biases, names, saving=False)
        y = None if steps is None else steps[0]
    return None if y is None else fastpath_node.tape(p.spec(y), tensors, plan)


def _whole(
    p: Tape,
    inference: Inference,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
) -> int | None:
    """The chain as one launch: y's number, or None where it is more than that."""
    given = (None,) * len(weights) if biases is None else biases
    y = p.empty((*x.shape[:-1], weights[-1].shape[0]), x.dtype, 0)
    rows = x if x.dim() == 2 else x.view(-1, x.shape[-1])
    names = inference.activation, inference.final_activation
    if inference.backend == "whole_triton":
        from fastlinear.ops.mlp import whole_triton_fastpath

        triton = whole_triton_fastpath.in_fastpath(rows, weights, given, *names, y)
        return y if p.launch(triton) else None
    from fastlinear.ops.mlp import whole_cuda

    found = whole_cuda.in_fastpath(rows, weights, given, *names, y)
    if found is None:
        return None
    if found.fixed:
        for number in range(1, 1 + len(weights)):
            p.only_at(number)
    if found.stream is not None:
        p.only_on(found.stream)
    p.launch(found.launch)
    return y


def _forward(
    training: Training,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
) -> Any:
    """The forward's tape: x, weights, biases → y, and what each layer's backward reads."""
    formula = training.formula
    layers = formula.layers
    if training.forward == "whole_cpp":
        return whole_forward(formula, x, weights, biases)
    if training.forward not in _LAYERED or not _served(x):
        return None
    names = layer_activations(layers, formula.activation, formula.final_activation)
    given = None if biases is None else [None if b is None else b.detach() for b in biases]
    p = Tape(1 + layers + (1 if biases is None else layers))
    steps = _layers(p, training.forward, x, weights, given, names, saving=True)
    return None if steps is None else p.spec(steps[0], *steps[1])


def _layers(
    p: Tape,
    chain: str,
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    names: Sequence[str],
    *,
    saving: bool,
) -> tuple[int, list[int | None]] | None:
    """The layers one after the other under a chain's backend: the numbers of y and, for each layer,
    of what its backward reads besides y. None where a layer's backend has no such form."""
    layers = len(weights)
    bs = (None,) * layers if biases is None else biases
    h = matrix(p, 0, x)
    kept: list[int | None] = []
    y = 0
    for i, (weight, bias, name) in enumerate(zip(weights, bs, names, strict=True)):
        w = Operand(weight, 1 + i, 1 + i)
        b = None if bias is None else Operand(bias, 1 + layers + i, 1 + layers + i)
        last = i == layers - 1
        rows = (h.tensor.shape[0], weight.shape[0])
        shape = (*x.shape[:-1], weight.shape[0]) if last else rows
        backend = _layer(chain, i, h.tensor, weight, bias is not None, name, saving)
        saves = saving and activation_of(name).saved == "pre"
        made = forward_steps(p, backend, h, w, b, name, saves, shape)
        if made is None:
            return None
        y, pre = made
        kept.append(pre if saves else None if last else y)
        h = Operand(x.new_empty(rows), y, y)
    return y, kept


def _backward(
    training: Training,
    needs: tuple[bool, ...],
    dy: Tensor,
    tensors: tuple[Tensor | None, ...],
    kept: tuple[Tensor | None, ...],
) -> Any:
    """The backward's tape: dy, x, weights, biases, what was kept → a gradient for each of x,
    weights and biases. All this ran on such tensors."""
    formula = training.formula
    layers = formula.layers
    if training.backward == "whole_cpp":
        return whole_backward(formula, needs, dy, tensors, kept)
    if training.backward not in _LAYERED or not _served(dy):
        return None
    if any(k is not None and not k.is_contiguous() for k in kept):
        return None
    names = layer_activations(layers, formula.activation, formula.final_activation)
    given = len(tensors) - 1 - layers
    need_bs = needs[1 + layers :] if given == layers else (False,) * layers
    first = first_needed((needs[0], needs[1 : 1 + layers], need_bs))
    x = tensors[0]
    if x is None or not viewable(x):
        return None
    p = Tape(1 + len(tensors) + layers)
    rows = x.view(-1, x.shape[-1])
    found: list[int | None] = [None] * len(tensors)
    dh = matrix(p, 0, dy)

    def saved(i: int) -> Operand | None:
        k = kept[i]
        return None if k is None else matrix(p, 1 + len(tensors) + i, k)

    def entering(i: int) -> Operand | None:
        if i == 0:
            return matrix(p, 1, x)
        before = saved(i - 1)
        if before is None or activation_of(names[i - 1]).saved != "pre":
            return before
        h = p.activate(names[i - 1], before.number, False)
        return Operand(before.tensor, h, h)

    for i in reversed(range(first, layers)):
        weight = tensors[1 + i]
        assert weight is not None
        need_dw, need_dx = needs[1 + i], i > first or needs[0]
        pieces = dict.fromkeys(BACKWARD_PIECES, "eager")
        if training.backward != "eager":
            chosen = backward_choices(i, rows, weight, names[i])
            pieces = {c.problem.piece: c.backend.name for c in chosen}
        layer = Layer(
            p,
            pieces,
            names[i],
            (need_dx, need_dw, need_bs[i]),
            entering(i) if need_dw else None,
            Operand(weight, 2 + i, 2 + i),
            None if activation_of(names[i]).saved == "none" else saved(i),
        )
        made = layer.steps(dh)
        if made is None:
            return None
        dx, found[1 + i], db = made
        if given == layers:
            found[1 + layers + i] = db
        if dx is not None:
            dh = Operand(dy.new_empty(rows.shape[0], weight.shape[1]), dx, dx)
            if i == 0:
                found[0] = dx if x.dim() == 2 else p.view(dx, x.shape)
    return p.spec(*found)


def _served(x: Tensor) -> bool:
    return viewable(x) and (not x.is_cuda or fastpath_node.serves_cuda())


def _layer(
    chain: str,
    i: int,
    x: Tensor,
    weight: Tensor,
    bias: bool,
    activation: str,
    grad: bool,
) -> str:
    """The backend of a layer's forward under a chain's backend, as ``layerwise`` chooses it."""
    if chain == "eager":
        return "eager"
    return select(layer_problem(i, x, weight, bias, activation, grad)).backend.name
