"""Plans of gated_mlp: what to call for calls of one kind, out of the backends chosen."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fastlinear.dispatch.select import Choice
from fastlinear.ops.common.autocast import cast
from fastlinear.ops.common.calls import as_result, autocast_dtype, is_captured
from fastlinear.ops.gated_mlp import reference
from fastlinear.ops.gated_mlp.autograd import Formula, GatedMLP, as_rows
from fastlinear.ops.gated_mlp.kept import OWN, way_of
from fastlinear.ops.gated_mlp.programs import Inference
from fastlinear.ops.gated_mlp.selection import choices
from fastlinear.ops.gated_mlp.stacking import Biases, Weights

Plan = Callable[[Tensor, Weights, Biases], Tensor]


def resolved(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    order: str,
    recompute: int | None,
    backend: str | None,
    grad: bool,
) -> tuple[Formula | Inference | None, Plan]:
    """(what the door can describe or None, what to call) for such tensors, which are valid."""
    if not has_kernels(x, weights):
        return None, _own(activation, order)
    rows = as_rows(x.detach())
    chosen = choices(rows, weights, biases, activation, order, recompute, backend, grad)
    if not grad:
        name = chosen[0].backend.name
        described = name in Inference.BACKENDS and x.is_cuda and not is_captured(x)
        kind = Inference(name, activation, order) if described else None
        return kind, inference_plan(chosen[0], activation, order)
    if way_of({c.problem.piece: c.backend.name for c in chosen}, recompute) == OWN:
        return None, _own(activation, order)
    formula = formula_of(chosen, activation, order, recompute != 1)
    return None if is_captured(x) else formula, training_plan(formula)


def has_kernels(x: Tensor, weights: Weights) -> bool:
    """Whether a backend may be asked: on a CPU or GPU, with numbers to compute."""
    empty = not x.numel() or any(w is not None and not w.numel() for w in weights)
    return x.device.type in ("cpu", "cuda") and not empty


def _own(activation: str, order: str) -> Plan:
    """PyTorch's own ops."""
    return lambda x, weights, biases: reference.gated_mlp(x, weights, biases, activation, order)


def inference_plan(choice: Choice, activation: str, order: str) -> Plan:
    """The forward's backend on rows."""
    run = choice.backend.load()

    def plan(x: Tensor, weights: Weights, biases: Biases) -> Tensor:
        y: Tensor = run(as_rows(x), weights, biases, activation, order, False)[0]
        return y if x.dim() == 2 else as_result(y, (*x.shape[:-1], y.shape[-1]))

    return plan


def formula_of(
    chosen: tuple[Choice, ...], activation: str, order: str, save_pre: bool = True
) -> Formula:
    """The formula over the backends chosen for forward and backward."""
    run, backward = chosen[0].backend, chosen[1].backend
    names = run.name, backward.name
    return Formula(activation, order, save_pre, run.load(), backward.load(), *names)


def training_plan(formula: Formula) -> Plan:
    """``GatedMLP`` over a formula's backends."""
    apply = GatedMLP.apply

    def plan(x: Tensor, weights: Weights, biases: Biases) -> Tensor:
        y: Tensor = apply(x, *weights, *biases, formula)
        return y

    return plan


def prepared(inner: Plan) -> Plan:
    """The plan for tensors that autocast casts, or whose sign is lazy: kernels read memory as it
    lies."""

    def plan(x: Tensor, weights: Weights, biases: Biases) -> Tensor:
        x, weights, biases = as_autocast(x, weights, biases)
        return inner(
            x.resolve_neg(),
            Weights(*(None if t is None else t.resolve_neg() for t in weights)),  # type: ignore[arg-type]
            Biases(*(None if t is None else t.resolve_neg() for t in biases)),
        )

    return plan


def as_autocast(x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, Weights, Biases]:
    """The tensors in the dtype autocast has for them, parameters by torch's own cache of them;
    themselves where it is off."""
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weights, biases

    def one(t: Tensor | None) -> Tensor | None:
        return None if t is None else cast(t, dtype)

    return cast(x, dtype), Weights(*map(one, weights)), Biases(*map(one, biases))  # type: ignore[arg-type]
