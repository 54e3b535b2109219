"""What findings say of linears that could be one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.cost import Cost
from fastlinear.core.problem import Problem
from fastlinear.families.grouped.problem import NAME
from fastlinear.families.linear.op import problem_of
from fastlinear.rewrite.fusion import Fusion, Report
from fastlinear.rewrite.match.calls import Kind, SiteCalls
from fastlinear.rewrite.session import Session

LIST = "list"
"""The kind of a finding on linears of a list."""


def report(
    session: Session,
    *,
    kind: str,
    title: str,
    words: str,
    advice: str,
    linears: tuple[str, ...],
    cost: Cost,
    covers: bool = False,
) -> Report:
    """What a finding says of them; ``kind`` is told in its details, ``cost`` is of a forward."""
    passes = 3 if session.train else 1  # backward: twice the products, the same tensors

    def message(before_us: float, after_us: float) -> str:
        return f"{words}: {before_us:.1f} us, {after_us:.1f} us as one."

    stacks = len(linears) > 1 and kind != LIST
    return Report(
        title=title,
        message=message,
        advice=advice,
        details={"kind": kind, "linears": list(linears)},
        words=words,
        replace=f"Replace by {advice}.",
        aside=", which has to lay the weights together at each call," * stacks,
        cost=Cost(passes * cost.flops, passes * cost.bytes),
        covers=covers,
    )


def advised(
    session: Session,
    report: Report,
    *,
    fqn: str,
    x: Tensor,
    calls: int,
    input_grad: bool,
    before: Callable[[Tensor], tuple[Tensor, ...]],
    after: Callable[[Tensor], tuple[Tensor, ...]],
    tensors: Sequence[Tensor],
    problem: Problem,
    alike: tuple[Any, ...],
) -> Fusion:
    """What is measured of linears that the reader alone can make one: ``before`` as they are,
    ``after`` as one, both on ``x``, which the first of them reads; in training with gradients of
    ``tensors`` too. ``problem`` is that of the first of them. Those that are ``alike`` take as
    long."""
    grad = session.train and (input_grad or any(t.requires_grad for t in tensors))
    return Fusion(
        rule=NAME,
        fqn=fqn,
        module=session.model.get_submodule(fqn),
        names=tuple(report.details["linears"]),
        calls=SiteCalls((Kind(x, calls, input_grad),), None, grad),
        problems=(problem,),
        tensors={str(i): t for i, t in enumerate(tensors)},
        layers=lambda x, _: before(x),
        after=after,
        report=report,
        alike=alike,
    )


def first_problem(session: Session, layer: nn.Module, x: Tensor) -> Problem:
    """Of the first of several linears, which stands for theirs."""
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)
    return problem_of(x, weight, bias, "none", session.train)  # type: ignore[arg-type]


def strided(
    session: Session, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Random numbers that lie as an input did."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    flat = torch.randn(max(size, 1), device=session.device).to(dtype)
    return flat.as_strided(shape, stride)


def cost_of(tokens: int, inputs: int, weights: int, outputs: int, size: int) -> Cost:
    """Of so many products a token, each tensor moved once."""
    return Cost(2.0 * tokens * weights, float(size * (inputs + weights + tokens * outputs)))
