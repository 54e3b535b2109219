"""The rule of grouped_linear: linear layers that could be one, because none waits for another.

It only matches; nothing here changes a model or measures anything. Two kinds are known by their
inputs: layers on parts of one tensor (a loop over chunks), and layers on one tensor itself. Modules
that are a grouped layer by themselves are in ``modules/``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from fastlinear.rewrite.match.eligible import refuse_module
from fastlinear.rewrite.swap.forwards import PLAIN_LINEARS

LINEARS, SHARED = "linears", "shared_input"


@dataclass(frozen=True)
class Seen:
    """One call of a linear: whose, and where its input lies.

    Attributes:
        fqn: the linear.
        parent: the module whose forward called it.
        storage: the memory of the input, and how often it had been written.
        shape, stride, offset: the input in that memory.
        dtype: of the input.
        grad: whether its gradient is wanted.
        given: whether it lies in what the parent's forward was given, unwritten since.
        tensor: which object the input is, among those that lie in that memory.
    """

    fqn: str
    parent: str | None
    storage: tuple[int, int]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    grad: bool = False
    given: bool = False
    tensor: int = 0


@dataclass(frozen=True)
class Row:
    """Linears called one after another on parts of one tensor, or on one tensor.

    Attributes:
        kind: ``LINEARS`` or ``SHARED``.
        fqn: the module whose forward calls them.
        members: the linears, by where their inputs lie.
        shape, stride: of each input.
        step: numbers from one input to the next; 0 where they share one.
        dtype: of the inputs.
        grad: whether a gradient of one is wanted.
        calls: how often a step makes it.
        one_tensor: whether all are given the very same tensor, each time.
    """

    kind: str
    fqn: str
    members: tuple[str, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    step: int
    dtype: torch.dtype
    grad: bool = False
    calls: int = 1
    one_tensor: bool = False


def rows(calls: Sequence[Seen], linears: Mapping[str, nn.Module]) -> list[Row]:
    """The rows among the calls of one run, in order; a linear called outside of them is in none.

    Inputs that are parts of one tensor, unwritten since, were all there before the first call: so
    none of the layers waits for another.
    """
    found: dict[tuple[str, ...], Row] = {}
    run: list[Seen] = []
    for call in (*calls, None):
        if call is None or (run and not _belongs(run, call, linears)):
            for row in _row(run, linears):
                known = found.get(row.members)
                if known is not None:
                    one = known.one_tensor and row.one_tensor
                    row = replace(known, calls=known.calls + 1, one_tensor=one)
                found[row.members] = row
            run = []
        if call is not None and call.parent is not None:
            run.append(call)
    counts = Counter(call.fqn for call in calls)
    return [row for row in found.values() if all(counts[fqn] == row.calls for fqn in row.members)]


def _belongs(run: list[Seen], call: Seen, linears: Mapping[str, nn.Module]) -> bool:
    first = run[0]
    if any(call.fqn == other.fqn for other in run):
        return False
    return (call.parent, call.storage, call.shape, call.stride, call.dtype) == (
        first.parent,
        first.storage,
        first.shape,
        first.stride,
        first.dtype,
    ) and _steady([*run, call], linears)


def _steady(run: list[Seen], linears: Mapping[str, nn.Module]) -> bool:
    """Whether the inputs lie at one distance, 0 for one input; layers of parts are of one size, and
    all have biases or none."""
    offsets = sorted(call.offset for call in run)
    steps = {b - a for a, b in pairwise(offsets)}
    outputs = {(linears[c.fqn].out_features, linears[c.fqn].bias is None) for c in run}
    return len(steps) == 1 and (steps == {0} or len(outputs) == 1)


def _row(run: list[Seen], linears: Mapping[str, nn.Module]) -> list[Row]:
    if len(run) < 2 or len({id(linears[call.fqn].weight) for call in run}) < len(run):
        return []
    run = sorted(run, key=lambda call: call.offset)
    first, step = run[0], run[1].offset - run[0].offset
    assert first.parent is not None
    row = Row(
        LINEARS if step else SHARED,
        first.parent,
        tuple(call.fqn for call in run),
        first.shape,
        first.stride,
        step,
        first.dtype,
        any(call.grad for call in run),
        one_tensor=len({call.tensor for call in run}) == 1,
    )
    return [row]


def plain_linears(model: nn.Module) -> dict[str, nn.Module]:
    """The linears of a model that no hook, parametrization or foreign forward stands upon."""
    return {
        fqn: module
        for fqn, module in model.named_modules()
        if type(module) in PLAIN_LINEARS and refuse_module(module) is None
    }
