"""Layers that could be one: what they run as they are, and as one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.core.cost import Cost
from fastlinear.ops.grouped_linear.op import grouped_linear
from fastlinear.rewrite.in_code import in_code, in_code_together
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.rules.grouped.modules.recognise import Whole
from fastlinear.rewrite.rules.grouped.rows.observed import Row
from fastlinear.rewrite.swap.grouped_forward import CONVOLUTION, LINEARS, call_grouped
from fastlinear.rewrite.work import Work

Run = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Unit:
    """One thing to measure.

    Attributes:
        before, after: the same results by the layers as they are, and as one.
        leaves_before, leaves_after: what gradients are taken of in training.
        cost: of one forward.
        calls: how often a step makes it.
        fqn, kind, title, words, advice: for the reader.
        dtype: of the input.
        sites: whose outcome says whether it is rewritten.
        input_grad: whether the model takes the gradient of what it reads.
    """

    before: Run
    after: Run
    leaves_before: list[Tensor]
    leaves_after: list[Tensor]
    cost: Cost
    calls: int
    fqn: str
    kind: str
    title: str
    words: str
    advice: str
    dtype: torch.dtype
    sites: tuple[str, ...]
    input_grad: bool = True


def strided(
    work: Work, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Random numbers that lie as an input did."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    flat = torch.randn(max(size, 1), device=work.runner.device).to(dtype)
    return flat.as_strided(shape, stride)


def of_row(work: Work, row: Row, linears: dict[str, nn.Module]) -> Unit | None:
    layers: list[Any] = [linears[fqn] for fqn in row.members]
    count, k = len(layers), row.shape[-1]
    if not math.prod(row.shape) or any(s.out_features == 0 for s in layers):
        return None
    shape, stride = (*row.shape[:-1], count, k), (*row.stride[:-1], row.step, row.stride[-1])
    x = strided(work, shape, stride, row.dtype).detach()
    tokens, size = math.prod(row.shape[:-1]), row.dtype.itemsize
    outputs = sum(layer.out_features for layer in layers)
    cost = cost_of(tokens, tokens * k * (count if row.step else 1), k * outputs, outputs, size)
    own = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    weights, biases = [m.weight.detach() for m in layers], [m.bias for m in layers]

    def before() -> list[Tensor]:
        return [type(m).forward(m, part) for m, part in zip(layers, x.unbind(-2), strict=True)]

    held = in_code_together(work.model, row.members)
    title = f"{count} linears of {k} features on "
    if row.step:
        weight = torch.stack(weights).requires_grad_()
        bias = None
        if biases[0] is not None:
            bias = torch.stack([b.detach() for b in biases]).requires_grad_()

        def after() -> list[Tensor]:
            return [grouped_linear(x, weight, bias, layout="... g k")]

        words = f"{count} linears on parts of one tensor run one after another"
        advice = f"fl.nn.GroupedLinear.from_linears({held})"
        advice += ", whose weight[g] is the weight of layer g"
        title += "parts of one tensor"
    else:
        weight = torch.cat(weights).requires_grad_()
        bias = None
        if biases[0] is not None:
            bias = torch.cat([b.detach() for b in biases]).requires_grad_()
        widths = [layer.out_features for layer in layers]

        def after() -> list[Tensor]:
            return list(F.linear(x.select(-2, 0), weight, bias).split(widths, -1))

        words = f"{count} linears read one input, each by itself"
        cat = f"torch.cat([m.weight for m in {held}])"
        advice = f"one linear of {outputs} outputs, of weight {cat}, its result split"
        title += "one input"
    new = [t for t in (weight, bias) if t is not None]
    return Unit(
        *(
            before,
            after,
            [x, *own],
            [x, *new],
            cost,
            row.calls,
            row.fqn,
            row.kind,
            title,
            words,
            advice,
        ),
        *(row.dtype, row.members, row.grad),
    )


def of_whole(model: nn.Module, match: Whole, seen: SiteCalls) -> Unit | None:
    """A module that is a grouped layer, on the input it was called with most often."""
    module, how = match.module, match.grouped
    x = seen.kinds[0].x.detach()
    weight, _ = match.parameters()
    if x.dtype != weight.dtype or x.device != weight.device or seen.autocast is not None:
        return None  # autocast decides there what is computed
    groups, n, k = weight.shape
    tokens = x.numel() // (groups * k)
    cost = cost_of(tokens, x.numel(), groups * n * k, groups * n, x.element_size())
    own = [p for p in module.parameters() if p.requires_grad]

    def before() -> list[Tensor]:
        return [type(module).forward(module, x)]

    def after() -> list[Tensor]:
        return [call_grouped(x, *match.parameters(), how, None)]

    words = f"{type(module).__name__} multiplies {groups} groups by weights of their own"
    if how.kind == CONVOLUTION:
        words = f"{type(module).__name__} of {groups} groups over one position"
    elif how.kind == LINEARS:
        words = f"{groups} linears on parts of one tensor run one after another"
    title = f"{groups} groups of {k} to {n} features"
    return Unit(
        *(before, after, [x, *own], [x, *own], cost, seen.calls, match.fqn, how.kind, title),
        *(words, _advice(model, match), x.dtype, match.members or (match.fqn,)),
        input_grad=seen.kinds[0].input_grad,
    )


def _advice(model: nn.Module, match: Whole) -> str:
    """The line that puts one in the module's place."""
    module, how, called = match.module, match.grouped, in_code(model, match.fqn)
    if how.kind == CONVOLUTION and isinstance(module, nn.Conv1d):
        return f"fl.nn.GroupedLinear.from_conv1d({called})"
    if how.kind == CONVOLUTION and isinstance(module, nn.Conv2d):
        return f"fl.nn.GroupedLinear.from_conv2d({called})"
    act = "" if how.activation == "none" else f", activation={how.activation!r}"
    layout = f", layout={how.layout!r})"
    if how.kind == LINEARS:
        layers = in_code_together(model, match.members)
        made = f"fl.nn.GroupedLinear.from_linears({layers}{act}{layout}"
        return f"{made}, whose weight[g] is the weight of layer g"
    view = f"{called}.{how.weight}{'.transpose(1, 2)' if how.turned else ''}"
    if how.kind == CONVOLUTION:
        view = f"{called}.weight.view({how.groups}, {how.n}, {how.k})"
    held = "" if how.bias is None else f", bias of shape ({how.groups}, {how.n})"
    return f"fl.grouped_linear(x, {view}{held}{act}{layout}"


def cost_of(tokens: int, inputs: int, weights: int, outputs: int, size: int) -> Cost:
    """Of so many products a token, each tensor moved once."""
    return Cost(2.0 * tokens * weights, float(size * (inputs + weights + tokens * outputs)))
