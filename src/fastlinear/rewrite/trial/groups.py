"""Layers that could be one as findings: what ``grouped_linear`` would save on a model's inputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.core.cost import Cost, floor_us, measure_ceilings
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.timing import interleave
from fastlinear.ops.grouped_linear.op import grouped_linear
from fastlinear.ops.grouped_linear.problem import NAME
from fastlinear.profile.records import Finding
from fastlinear.profile.step import private_copy
from fastlinear.rewrite.rules import grouped as rule
from fastlinear.rewrite.rules.grouped import Row, Seen, Whole
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.work import Work

CODE = "grouped_linear"
_MOST_S = 0.5  # of measuring one
Run = Callable[[], list[Tensor]]


@dataclass
class _Watched:
    """What one run shows of the linears and the suspects."""

    calls: list[Seen] = field(default_factory=list)
    open: list[Tensor] = field(default_factory=list)  # keeps the last input's memory from new use
    inputs: dict[str, tuple[int, tuple[int, ...], tuple[int, ...], torch.dtype]] = field(
        default_factory=dict
    )


@dataclass(frozen=True)
class _Unit:
    """One thing to measure.

    Attributes:
        before, after: the same results by the layers as they are, and as one.
        leaves_before, leaves_after: what gradients are taken of in training.
        cost: of one forward.
        calls: how often a step makes it.
        fqn, kind, title, words, advice: for the reader.
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


def find(work: Work) -> None:
    """Add a finding for all layers that ``grouped_linear`` computes faster as one.

    Nothing is rewritten. The model runs once more, and is to be preserved by the caller.
    """
    if not work.allows(NAME):
        return
    linears, suspects = rule.plain_linears(work.model), rule.suspects(work.model)
    if len(linears) < 2 and not suspects:
        return
    watched = _watch(work, linears, suspects)
    units = [_of_row(work, row, linears) for row in rule.rows(watched.calls, linears)]
    for fqn, (calls, shape, stride, dtype) in watched.inputs.items():
        x = _strided(work, shape, stride, dtype)
        match = rule.whole(fqn, suspects[fqn], x)
        if match is not None:
            units.append(_of_whole(match, x, calls))
    wanted = [u for u in units if u is not None and u.dtype in DTYPE_NAMES]
    found = []
    for i, unit in enumerate(wanted):
        if work.budget.left_s == 0:
            break
        with work.budget:
            share = work.budget.share(4 * (len(wanted) - i), _MOST_S)
            finding = _finding(work, unit, share)
        if finding is not None:
            found.append(finding)
    if found:
        ranked = sorted((*work.profile.findings, *found), key=lambda f: -f.predicted_gain_us)
        work.profile = replace(work.profile, findings=tuple(ranked))


def _watch(work: Work, linears: dict[str, nn.Module], suspects: dict[str, nn.Module]) -> _Watched:
    """One run with hooks on the linears and the suspects."""
    watched = _Watched()
    parents = {site.fqn: site.parent_fqn for site in work.profile.sites}

    def linear(fqn: str, module: Any, args: tuple[Any, ...]) -> None:
        if len(args) != 1 or type(args[0]) is not Tensor or args[0].dtype != module.weight.dtype:
            return
        x = args[0]
        storage = x.untyped_storage().data_ptr()
        if not watched.open or watched.open[0].untyped_storage().data_ptr() != storage:
            watched.open[:] = [x]
        here = (storage, 0 if x.is_inference() else x._version)
        watched.calls.append(
            Seen(
                fqn,
                parents.get(fqn),
                here,
                tuple(x.shape),
                tuple(x.stride()),
                int(x.storage_offset()),
                x.dtype,
            )
        )

    def suspect(fqn: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) == 1 and type(args[0]) is Tensor and args[0].is_floating_point():
            calls = watched.inputs[fqn][0] if fqn in watched.inputs else 0
            x = args[0]
            watched.inputs[fqn] = (calls + 1, tuple(x.shape), tuple(x.stride()), x.dtype)

    hooks = [(m, partial(linear, fqn)) for fqn, m in linears.items()]
    hooks += [(m, partial(suspect, fqn)) for fqn, m in suspects.items()]
    handles = [module.register_forward_pre_hook(hook) for module, hook in hooks]
    try:
        work.runner.step(work.model, Call(*private_copy((work.call.args, work.call.kwargs))))
    finally:
        for handle in handles:
            handle.remove()
    watched.open.clear()
    return watched


def _strided(
    work: Work, shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype
) -> Tensor:
    """Random numbers that lie as an input did."""
    size = 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if 0 not in shape else 0
    flat = torch.randn(max(size, 1), device=work.runner.device).to(dtype)
    return flat.as_strided(shape, stride)


def _of_row(work: Work, row: Row, linears: dict[str, nn.Module]) -> _Unit | None:
    layers: list[Any] = [linears[fqn] for fqn in row.members]
    count, k = len(layers), row.shape[-1]
    if not math.prod(row.shape) or any(s.out_features == 0 for s in layers):
        return None
    shape, stride = (*row.shape[:-1], count, k), (*row.stride[:-1], row.step, row.stride[-1])
    x = _strided(work, shape, stride, row.dtype).detach()
    tokens, size = math.prod(row.shape[:-1]), row.dtype.itemsize
    outputs = sum(layer.out_features for layer in layers)
    cost = _cost(tokens, tokens * k * (count if row.step else 1), k * outputs, outputs, size)
    own = [p for layer in layers for p in (layer.weight, layer.bias) if p is not None]
    weights, biases = [m.weight.detach() for m in layers], [m.bias for m in layers]

    def before() -> list[Tensor]:
        return [type(m).forward(m, part) for m, part in zip(layers, x.unbind(-2), strict=True)]

    title = f"{count} linears of {k} features on "
    if row.step:
        weight = torch.stack(weights).requires_grad_()
        bias = None
        if biases[0] is not None:
            bias = torch.stack([b.detach() for b in biases]).requires_grad_()

        def after() -> list[Tensor]:
            return [grouped_linear(x, weight, bias, layout="... g k")]

        words = f"{count} linears on parts of one tensor run one after another"
        advice = f"fl.nn.GroupedLinear.from_linears({_named(row.members)})"
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
        advice = (
            f"one linear of {outputs} outputs: torch.cat of the weights of {_named(row.members)}, "
            "its result split"
        )
        title += "one input"
    new = [t for t in (weight, bias) if t is not None]
    return _Unit(
        *(before, after, [x, *own], [x, *new], cost, 1, row.fqn, row.kind, title, words, advice),
        row.dtype,
    )


def _of_whole(match: Whole, x: Tensor, calls: int) -> _Unit | None:
    module = match.module
    weight, _ = match.parameters()
    if x.dtype != weight.dtype or x.device != weight.device:
        return None  # autocast decides there what is computed
    groups, n, k = weight.shape
    x = x.detach()
    tokens = x.numel() // (groups * k)
    size = x.element_size()
    cost = _cost(tokens, x.numel(), groups * n * k, groups * n, size)
    own = [p for p in module.parameters() if p.requires_grad]

    def before() -> list[Tensor]:
        return [type(module).forward(module, x)]

    def after() -> list[Tensor]:
        w, b = match.parameters()
        return [grouped_linear(x, w, b, activation=match.activation, layout=match.layout)]

    act = "" if match.activation == "none" else f", activation={match.activation!r}"
    held = "" if match.bias is None else f", bias of shape ({groups}, {n})"
    turned = ".transpose(1, 2)" if match.turned else ""
    advice = f"fl.grouped_linear(x, module.{match.weight}{turned}{held}{act}, "
    advice += f"layout={match.layout!r})"
    if match.kind == rule.CONVOLUTION:
        words = f"{type(module).__name__} of {groups} groups over one position"
        if isinstance(module, nn.Conv1d):
            advice = "fl.nn.GroupedLinear.from_conv1d(module)"
        else:
            view = f"module.weight.view({groups}, {n}, {k})"
            advice = f"fl.grouped_linear(x, {view}{held}, layout={match.layout!r})"
    else:
        words = f"{type(module).__name__} multiplies {groups} groups by weights of their own"
    title = f"{groups} groups of {k} to {n} features"
    return _Unit(
        *(before, after, [x, *own], [x, *own], cost, calls, match.fqn, match.kind, title, words),
        *(advice, x.dtype),
    )


def _cost(tokens: int, inputs: int, weights: int, outputs: int, size: int) -> Cost:
    return Cost(2.0 * tokens * weights, float(size * (inputs + weights + tokens * outputs)))


def _finding(work: Work, unit: _Unit, budget_s: float) -> Finding | None:
    train = work.runner.mode == "train"
    first = _timed(unit.before, unit.leaves_before, train)
    second = _timed(unit.after, unit.leaves_after, train)
    with torch.set_grad_enabled(train):
        first(), second()
        times = interleave(
            {"before": first, "after": second},
            device=work.runner.device,
            metric="wall",
            rounds=9,
            budget_s=budget_s,
        )
    old, new = times["before"], times["after"]
    if new.ci95_us[1] >= old.ci95_us[0]:
        return None
    passes = 3 if train else 1  # backward: twice the products, and the same tensors again
    cost = Cost(passes * unit.cost.flops, passes * unit.cost.bytes)
    limits = measure_ceilings(str(work.runner.device), DTYPE_NAMES[unit.dtype])
    compute = cost.flops / limits.flops_per_s >= cost.bytes / limits.bytes_per_s
    return Finding(
        code=CODE,
        fqn=unit.fqn,
        title=unit.title,
        message=(
            f"{unit.words}: {old.median_us:.1f} us, {new.median_us:.1f} us as one. Replace by "
            f"{unit.advice}."
        ),
        measured_us=old.median_us * unit.calls,
        floor_us=floor_us(cost, limits) * unit.calls,
        predicted_gain_us=(old.median_us - new.median_us) * unit.calls,
        flops=cost.flops * unit.calls,
        bytes=cost.bytes * unit.calls,
        bound="compute" if compute else "memory",
        details={"kind": unit.kind, "calls": unit.calls, "advice": unit.advice},
    )


def _timed(run: Run, leaves: list[Tensor], train: bool) -> Callable[[], Any]:
    if not train:
        return run
    leaves[0].requires_grad_()
    wanted = [t for t in leaves if t.requires_grad]

    def step() -> None:
        ys = run()
        torch.autograd.grad(ys, wanted, [torch.ones_like(y) for y in ys])

    return step


def _named(members: tuple[str, ...]) -> str:
    """Layers as code: the list that holds them all, or each."""
    homes = {fqn.rpartition(".")[0] for fqn in members}
    names = [fqn.rpartition(".")[2] for fqn in members]
    if len(homes) == 1 and all(name.isdigit() for name in names) and "" not in homes:
        return f"model.{homes.pop()}"
    listed = ", ".join(f"model.{fqn}" for fqn in members[:4])
    return f"[{listed}{', ...' if len(members) > 4 else ''}]"
