"""Plans of mlp: what to call for calls of one kind, out of the backends chosen for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.common import door_node
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.autocast import cast as autocast_copy
from fastlinear.ops.common.calls import as_result, autocast_dtype, is_captured
from fastlinear.ops.mlp import programs, reference, whole_cpp
from fastlinear.ops.mlp.autograd import Formula, Mlp
from fastlinear.ops.mlp.layerwise import IN_PLACE
from fastlinear.ops.mlp.problem import STEP, layer_activations
from fastlinear.ops.mlp.reference import Biases, Weights
from fastlinear.ops.mlp.selection import choices
from fastlinear.ops.mlp.validation import sequences

Plan = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor | None] | None], Tensor]


def resolved(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    backend: str | None,
    grad: bool,
    fresh: bool,
) -> tuple[Any, Plan]:
    """(what the compiled door can run or record by itself or None, the plan).

    fresh: the weights are new tensors at every call, as autocast makes them.
    """
    names = activation, final_activation
    if x.device.type not in ("cpu", "cuda"):
        return None, _chain(*names)
    chosen = choices(x, weights, biases, *names, backend, grad)
    backends = {c.backend.name for c in chosen if c.problem.piece != STEP}
    empty = x.numel() == 0 or any(w.numel() == 0 for w in weights)
    if empty or backends == {"eager"}:
        if not grad:
            return None, _chain_in_place(*names)
        plain = backend is None and not empty and not fresh and not is_captured(x)
        if not (plain and door_node.begun() and _by_node(chosen)):
            # PyTorch's nodes cost less than one in Python, and more than one in C++
            return None, _chain(*names)
    if grad:
        training = training_of(chosen, *names)
        return None if fresh or is_captured(x) else training, training_plan(training)
    run = chosen[0].backend.load()
    native: Any = None
    (name,) = backends
    if name in programs.Inference.BACKENDS and x.is_cuda and not fresh and not is_captured(x):
        native = programs.Inference(*names, name)
    dense = all(t.is_contiguous() for t in (x, *weights, *biases) if t is not None)
    if backends == {"whole_cpp"} and dense and x.dim() <= 3:
        native = (whole_cpp.address(), whole_cpp.codes(len(weights), *names))
    return native, _inference(run, *names)


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
            h = F.linear(h, weight, bias)
            in_place = IN_PLACE.get(name)
            if in_place is None:
                h = activation_of(name).value(h)
            else:
                in_place(h)
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


def training_of(
    chosen: tuple[Choice, ...], activation: str, final_activation: str
) -> programs.Training:
    """The formula over the backends chosen for forward and backward, and their names."""
    forward, backward = chosen[0].backend, chosen[1].backend
    layers = chosen[0].problem.dim("L")
    formula = Formula(activation, final_activation, layers, forward.load(), backward.load())
    return programs.Training(formula, forward.name, backward.name)


def training_plan(training: programs.Training) -> Plan:
    """``Mlp`` with this formula."""
    formula = training.formula
    apply = Mlp.apply

    def plan(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
    ) -> Tensor:
        y: Tensor = apply(formula, x, *weights, *_dense(biases, len(weights)))
        return y

    return plan


def prepared(inner: Plan) -> Plan:
    """The plan for tensors that autocast casts, or whose sign is lazy: kernels read memory as it
    lies."""

    def plan(
        x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
    ) -> Tensor:
        x, ws, bs = as_autocast(x, *sequences(weights, biases))
        return inner(
            x.resolve_neg(),
            tuple(w.resolve_neg() for w in ws),
            tuple(None if b is None else b.resolve_neg() for b in bs),
        )

    return plan


def _dense(biases: Sequence[Tensor | None] | None, layers: int) -> Biases:
    """Biases as backends take them: a tuple, each dense."""
    if biases is None:
        return (None,) * layers
    return tuple([b if b is None or b.is_contiguous() else b.contiguous() for b in biases])


def as_autocast(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, Weights, Biases]:
    """The tensors in the dtype autocast has for them; themselves where it is off."""
    dtype = autocast_dtype(x)
    if dtype is None or not all(
        isinstance(t, Tensor) for t in (*weights, *biases) if t is not None
    ):
        return x, weights, biases
    return (
        autocast_copy(x, dtype),
        tuple(autocast_copy(w, dtype) for w in weights),
        tuple(None if b is None else autocast_copy(b, dtype) for b in biases),
    )
