"""Where a model computes what ``diagonal_linear`` would: a module, or a sequence of ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from fastlinear.core.problem import Problem
from fastlinear.ops.diagonal_linear import reference
from fastlinear.ops.diagonal_linear.op import diagonal_linear
from fastlinear.ops.diagonal_linear.problem import STEP, problem_of
from fastlinear.rewrite.in_code import in_code
from fastlinear.rewrite.rules import diagonal as rule
from fastlinear.rewrite.rules.diagonal import Diagonal
from fastlinear.rewrite.rules.diagonal_sequences import Sequence


@dataclass(frozen=True, eq=False)
class Place:
    """Where a model computes what ``diagonal_linear`` would.

    Attributes:
        fqn, kind, title, what, advice: for the finding.
        x, residual, calls: an input as it was seen, whether one of its shape is added, how often.
        weight, bias, activation: the parameters and the activation's name.
        before, after: the ops of the model and ours, on x and the residual.
    """

    fqn: str
    kind: str
    what: str
    advice: str
    calls: int
    x: Tensor | None
    residual: bool
    weight: Tensor
    bias: Tensor | None
    activation: str
    before: Callable[..., Tensor]
    after: Callable[..., Tensor]

    @property
    def features(self) -> int:
        """K."""
        return int(self.weight.shape[-1])


def of_module(model: nn.Module, site: Diagonal, x: Tensor | None, calls: int) -> Place:
    """The place of a module, called so often, first with x."""
    if x is not None and x.shape[-1] != site.features:
        x = None
    if x is not None and x.dtype != getattr(site.module, site.weight).dtype:
        x = None  # autocast or promotion decides there what is computed
    weight: Tensor = getattr(site.module, site.weight)
    bias: Tensor | None = None if site.bias is None else getattr(site.module, site.bias)
    before: Callable[..., Tensor] = partial(type(site.module).forward, site.module)
    if site.in_place:  # over and over on the same x it would leave nothing of it
        before = _ops(weight, bias, site.minus, site.activation, True)
    return Place(
        site.fqn,
        site.kind,
        _WHAT[site.kind].format(name=type(site.module).__name__, k=site.features),
        site.advice(in_code(model, site.fqn)),
        calls,
        x,
        False,
        weight,
        bias,
        site.activation,
        before,
        site.instead(),
    )


def of_sequence(model: nn.Module, s: Sequence) -> Place:
    """The place of a sequence."""
    weight = model.get_parameter(s.weight)
    bias = None if s.bias is None else model.get_parameter(s.bias)
    x = s.x if s.x.dtype == weight.dtype else None

    def after(x: Tensor, residual: Tensor | None = None) -> Tensor:
        w, b = rule.vector(weight), None if bias is None else rule.vector(bias, s.minus)
        return diagonal_linear(x, w, b, activation=s.activation, residual=residual)

    steps = ["scales" if bias is None else "scales and shifts"]
    steps += [] if s.activation == "none" else [f"takes {s.activation} of"]
    what = f"{' and '.join(steps)} {weight.shape[-1]} features"
    what += ", and adds a residual," if s.residual else ""
    where = in_code(model, s.span) if s.span else "the model"
    act = "" if s.activation == "none" else f", activation={s.activation!r}"
    scale, shift = rule.written(in_code(model, s.weight), weight), ""
    if s.bias is not None and bias is not None:
        shift = f", {rule.written(in_code(model, s.bias), bias, s.minus)}"
    rest = ", residual=residual" if s.residual else ""
    return Place(
        s.fqn,
        "sequence",
        f"{where} {what} in {s.ops} ops",
        f"fl.diagonal_linear(x, {scale}{shift}{act}{rest})",
        s.calls,
        x,
        s.residual,
        weight,
        bias,
        s.activation,
        _ops(weight, bias, s.minus, s.activation, s.in_place),
        after,
    )


def _ops(
    weight: Tensor, bias: Tensor | None, minus: bool, activation: str, in_place: bool
) -> Callable[..., Tensor]:
    """PyTorch's ops as a model runs them; a product over x goes to memory that is there as well,
    and leaves x as it is. In training autograd keeps a copy of such an x: it is no cheaper then."""
    kept: list[Tensor] = []

    def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if in_place and not torch.is_grad_enabled():
            if not kept:
                kept.append(torch.empty_like(x))
            y = torch.mul(x, weight, out=kept[0])
        else:
            y = x * weight
        if bias is not None:
            y = y - bias if minus else y + bias
        y = reference.activated(y, activation)
        return y if residual is None else residual + y

    return run


def problem_of_place(place: Place, train: bool) -> Problem:
    """The Problem of a call, or of its whole training step."""
    assert place.x is not None
    x = place.x
    residual = torch.empty_like(x, device="meta") if place.residual else None
    found = problem_of(x, place.bias, residual, place.activation, train)
    return found.with_piece(STEP) if train else found


_WHAT = {
    rule.LAYER_SCALE: "{name} scales {k} features",
    rule.AFFINE: "{name} scales and shifts {k} features",
    rule.LINEAR: "The weight is exactly diagonal: {k} numbers do the work of {k} x {k}",
}


def words(place: Place, before: float, after: float) -> str:
    """The finding's message."""
    more = "; a residual added to its result costs no further pass there"
    return (
        f"{place.what}: {before:.1f} us a call, {after:.1f} us by diagonal_linear, which passes "
        f"over memory once. Replace it with {place.advice}{'' if place.residual else more}."
    )
