"""Plans of grouped_linear: what to call for calls of one kind, out of the backends chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fastlinear.dispatch.select import Choice
from fastlinear.ops.common.calls import autocast_dtype, is_captured
from fastlinear.ops.grouped_linear import layout as layouts
from fastlinear.ops.grouped_linear import reference
from fastlinear.ops.grouped_linear.autograd import Formula, GroupedLinear
from fastlinear.ops.grouped_linear.problem import STEP
from fastlinear.ops.grouped_linear.selection import choices
from fastlinear.ops.grouped_linear.signs import place_for

Plan = Callable[[Tensor, Tensor, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class Resolved:
    """What serves calls of one kind.

    Attributes:
        plan: what to call.
        backend: of the forward where no gradients are wanted, for a program of the compiled door.
        formula: what a node in C++ can record, where gradients are.
    """

    plan: Plan
    backend: str | None = None
    formula: Formula | None = None

    def prepared(self) -> Resolved:
        """The same for tensors that autocast casts, or whose sign is lazy."""
        return replace(self, plan=prepared(self.plan))


def resolved(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    layout: str,
    backend: str | None,
    grad: bool,
) -> Resolved:
    """What serves such tensors, which are valid."""
    if x.device.type not in ("cpu", "cuda") or not x.numel() * weight.numel():
        return Resolved(_own(activation, layout))
    order = layouts.order_of(layout, x.shape)
    rows = layouts.blocks(x.detach(), layout, weight.shape[0], weight.shape[2])
    chosen = choices(rows, weight, bias, activation, order, backend, grad)
    if not grad:
        plan = inference_plan(chosen[0], activation, layout)
        return Resolved(plan, backend=chosen[0].backend.name)
    if {c.backend.name for c in chosen if c.problem.piece != STEP} == {"eager"}:
        return Resolved(_own(activation, layout))
    formula = formula_of(chosen, rows, weight, activation, layout)
    return Resolved(training_plan(formula), formula=None if is_captured(x) else formula)


def _own(activation: str, layout: str) -> Plan:
    """PyTorch's own ops."""
    return lambda x, weight, bias: reference.grouped_linear(x, weight, bias, activation, layout)


def inference_plan(choice: Choice, activation: str, layout: str) -> Plan:
    """The forward's backend between the user's layout and the backends'."""
    run = choice.backend.load()

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        groups, _, k = weight.shape
        order = layouts.order_of(layout, x.shape)
        rows = layouts.blocks(x, layout, groups, k)
        y = run(rows, weight, bias, activation, False, order)[0]
        return layouts.result(y, layout, x.shape)

    return plan


def formula_of(
    chosen: tuple[Choice, ...], rows: Tensor, weight: Tensor, activation: str, layout: str
) -> Formula:
    """The formula over the backends chosen for forward and backward of calls of x as ``rows``,
    (B, L, G, K)."""
    run, backward = (c.backend for c in chosen[:2])
    names = activation, layout, run.name, backward.name
    order = chosen[0].problem.option("order")
    place = place_for(rows, weight, activation, order, run.name, backward.name)
    return Formula(*names, run.load(), backward.load(), place)


def training_plan(formula: Formula) -> Plan:
    """``GroupedLinear`` over a formula's backends."""
    apply = GroupedLinear.apply

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        y: Tensor = apply(x, weight, bias, formula)
        return y

    return plan


def prepared(inner: Plan) -> Plan:
    """The plan for tensors that autocast casts, or whose sign is lazy: kernels read memory as it
    lies."""

    def plan(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, weight, bias = as_autocast(x, weight, bias)
        return inner(
            x.resolve_neg(), weight.resolve_neg(), None if bias is None else bias.resolve_neg()
        )

    return plan


def as_autocast(
    x: Tensor, weight: Tensor, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The tensors in the dtype autocast has for them; themselves where it is off.

    torch's own cache of cast parameters holds matrices only, so weights are cast at each call.
    """
    dtype = autocast_dtype(x)
    if dtype is None:
        return x, weight, bias

    def cast(t: Tensor) -> Tensor:
        return t.to(dtype) if t.is_floating_point() and t.dtype is not torch.float64 else t

    return cast(x), cast(weight), None if bias is None else cast(bias)
