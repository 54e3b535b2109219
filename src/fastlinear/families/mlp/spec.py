"""The ``OpSpec`` of mlp, and its front end.

A call is (x, weights, biases, activation, final_activation, backend).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core import calls
from fastlinear.core.calls import as_result
from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice, select
from fastlinear.families.mlp import reference, selection
from fastlinear.families.mlp.autograd import Formula, Mlp
from fastlinear.families.mlp.cpu import whole
from fastlinear.families.mlp.problem import LOOPS, NAME, STEP, layer_activations
from fastlinear.families.mlp.reference import Biases
from fastlinear.families.mlp.validation import sequences, validate
from fastlinear.fastpath import autograd_node, recorded
from fastlinear.op import library
from fastlinear.op.front import Front, choices
from fastlinear.op.spec import Arguments, OpSpec, Plan, Resolved, inferring
from fastlinear.op.step import Step
from fastlinear.op.timing import Timed

_Weights = Sequence[Tensor]
_Biases = Sequence[Tensor | None] | None


def _normal(arguments: Arguments) -> Arguments:
    x, weights, biases, *options = arguments
    return (x, *sequences(weights, biases), *options)


def _reference(
    x: Tensor, weights: Any, biases: Any, activation: str, final_activation: str, _: Any = None
) -> Tensor:
    return reference.mlp(x, weights, biases, activation, final_activation)


def _problem(arguments: Arguments, grad: bool) -> Problem:
    x, weights, biases, activation, final_activation, _ = arguments
    return selection.problem_of(x, weights, biases, activation, final_activation, grad)


def _resolve(arguments: Arguments, grad: bool, autocast: bool) -> Resolved:
    x, weights, biases, *names, backend = arguments
    own = _chain(*names)
    if x.device.type not in ("cpu", "cuda"):
        return Resolved(own, own, by_torch=True)
    chosen = choices(SPEC, arguments, grad)
    backends = {c.backend.name for c in chosen if c.problem.piece != STEP}
    empty = x.numel() == 0 or any(w.numel() == 0 for w in weights)
    captured = calls.is_captured(x)
    if empty or backends == {"eager"}:
        if not grad:
            plan = _chain_in_place(*names)
            if empty or x.is_cuda:
                return Resolved(plan, plan)
            return inferring(plan, x)
        plain = backend is None and not (empty or autocast or captured)
        if not (plain and autograd_node.begun() and _by_node(chosen)):
            # PyTorch's nodes cost less than one in Python, and more than one in C++
            return Resolved(own, own, by_torch=True)
    if grad:
        return _train(arguments, chosen)
    plan = _inference(chosen[0].load(), *names)
    (name,) = backends
    dense = all(t.is_contiguous() for t in (x, *weights, *biases) if t is not None)
    if name == "whole_cpp" and dense and x.dim() <= 3 and x.dtype is torch.float32:
        codes = whole.codes(len(weights), *names)
        return Resolved(plan, ("chain", whole.address(), codes))
    return inferring(plan, x)


def _train(arguments: Arguments, chosen: tuple[Choice, ...]) -> Resolved:
    """The formula over the backends chosen for forward and backward."""
    x, weights, _, activation, final_activation, _ = arguments
    forward, backward = chosen[:2]
    layers = chosen[0].problem.dim("L")
    again = activation_of(activation).saved == "pre"
    loops = all(c.backend.name in LOOPS for c in (forward, backward))
    # the gradient of the next layer's weight reads what one gave
    hidden = tuple([w.requires_grad for w in weights[1:]]) if again and loops else ()
    runs = forward.load(), backward.load()
    formula = Formula(activation, final_activation, layers, *runs, hidden if any(hidden) else ())
    apply = Mlp.apply

    def plan(x: Tensor, weights: _Weights, biases: _Biases) -> Tensor:
        y: Tensor = apply(formula, x, *weights, *_dense(biases, layers))
        return y

    if calls.is_captured(x):
        return Resolved(plan, plan)
    return Resolved(plan, plan, partial(recorded.node, formula))


def _by_node(chosen: tuple[Choice, ...]) -> bool:
    """Whether PyTorch's own ops run fastest by one node of ours."""
    if any(c.problem.piece == STEP for c in chosen):
        return False  # PyTorch's own autograd was chosen
    return select(chosen[0].problem.with_piece(STEP)).backend.name == "pieces"


def _chain(activation: str, final_activation: str) -> Plan:
    """PyTorch's own ops, one layer after the other."""

    def plan(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
    ) -> Tensor:
        bs = (None,) * len(weights) if biases is None else biases
        return reference.mlp(x, weights, bs, activation, final_activation)

    return plan


def _chain_in_place(activation: str, final_activation: str) -> Plan:
    """The same without gradients: activations in the products' own memory, where torch can."""

    def plan(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
    ) -> Tensor:
        names = layer_activations(len(weights), activation, final_activation)
        bs = (None,) * len(weights) if biases is None else biases
        h = x
        for weight, bias, name in zip(weights, bs, names, strict=True):
            h = activation_of(name).over(F.linear(h, weight, bias))
        # torch's activations return no view, as its layers do of more than two dimensions
        return h if x.dim() == 2 or final_activation == "none" else as_result(h, h.shape)

    return plan


def _inference(run: Callable[..., Any], activation: str, final_activation: str) -> Plan:
    def plan(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
    ) -> Tensor:
        bs = _dense(biases, len(weights))
        if x.dim() == 2:
            y: Tensor = run(x, tuple(weights), bs, activation, final_activation, False)[0]
            return y
        rows = x.reshape(-1, x.shape[-1])
        y = run(rows, tuple(weights), bs, activation, final_activation, False)[0]
        return as_result(y, (*x.shape[:-1], y.shape[-1]))

    return plan


def _dense(biases: Sequence[Tensor | None] | None, layers: int) -> Biases:
    """Biases as backends take them: a tuple, each dense."""
    if biases is None:
        return (None,) * layers
    return tuple([b if b is None or b.is_contiguous() else b.contiguous() for b in biases])


def _compiled(arguments: Arguments, grad: bool) -> Tensor:
    x, weights, biases, *names, backend = arguments
    present = [b for b in biases if b is not None]
    has_bias = [b is not None for b in biases]
    y: Tensor
    if grad:
        y = library.call(NAME, x, list(weights), present, has_bias, *names, grad, backend or "")[0]
        return y
    turned = [calls.lies_turned(w) for w in weights]
    lying = [w.t() if t else w for w, t in zip(weights, turned, strict=True)]
    y = library.call(
        f"{NAME}_inference", x, lying, present, has_bias, turned, *names, backend or ""
    )
    return y


SPEC = OpSpec(
    name=NAME,
    operands=("x", "weights", "biases"),
    options=("activation", "final_activation", "backend"),
    validate=validate,
    reference=_reference,
    resolve=_resolve,
    problem=_problem,
    train=_train,
    compiled=_compiled,
    normal=_normal,
    sequences=True,
    torch_casts=True,
)
FRONT = Front(SPEC)
STEPS = Step(FRONT)
eager, pieces = STEPS.eager, STEPS.pieces
timed = Timed(FRONT, lambda inputs, backend: (*inputs[:5], backend))
