"""Experiment ``ragged``: rows sorted by group, by every way that mixtures of experts compute them.

The peers know the number of each group's rows on the host, and have what follows from it (offsets,
padding, slices) laid out before the clock starts; ours reads the sizes on the device.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import lists
from benchmarks.contenders.lists import Form, Forward, Lists, ListsWork, Tensors, contender, flat
from benchmarks.harness.case import Case
from benchmarks.harness.peer import OURS, Peer, cuda_only, no_compiler
from benchmarks.harness.work import drawing, rotated
from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.grouped.ragged.op import explain, ragged_linear

_SPARSE = 4  # one group in so many owns rows


def sizes_of(case: Case) -> list[int]:
    """Rows of each group: ``balanced``; ``skewed``, shares as 1/rank; ``sparse``, most empty."""
    rows, groups = case.dim("M"), case.dim("G")
    order = list(range(groups))
    random.Random(0).shuffle(order)
    shares = {
        "balanced": [1.0] * groups,
        "skewed": [1.0 / (rank + 1) for rank in order],
        "sparse": [float(rank < max(1, groups // _SPARSE)) for rank in order],
    }[case.option("sizes")]
    exact = [rows * share / sum(shares) for share in shares]
    found = [int(size) for size in exact]
    left = sorted(range(groups), key=lambda g: found[g] - exact[g])  # those cut off most
    for g in left[: rows - sum(found)]:
        found[g] += 1
    return found


def make_work(case: Case, device: torch.device) -> ListsWork:
    """Draw the tensors of a case: ``whole`` are x (T, K), weight (G, N, K), dy (T, N), then the
    bias (G, N) if there is one; the lists are views of them."""
    return ListsWork(case, *rotated(case, device, _draw, lambda given: given.bytes))


def _draw(case: Case, device: torch.device, index: int) -> Lists:
    m, groups, k, n = (case.dim(name) for name in ("M", "G", "K", "N"))
    draw = drawing(case, device, index)
    x, weight, dy = draw(m, k), draw(groups, n, k, scale=k**-0.5), draw(m, n)
    bias = (draw(groups, n),) if case.option("bias") != "no" else ()
    sizes = sizes_of(case)
    rows = (x.split(sizes), weight.unbind(0), bias[0].unbind(0) if bias else (), dy.split(sizes))
    given = Lists(*rows, (x, weight, dy, *bias))
    if index == 0:
        lists.silence(case, given)
    return given


# --------------------------------------------------------------------------------------------
# How each takes its tensors


def _whole(given: Lists) -> Form:
    x, weight, dy, *bias = given.whole
    return Form((x, weight, *bias), (dy,))


def _experts(given: Lists) -> Form:
    """x as one tensor, parameters by group, as a ModuleList holds them."""
    x, _, dy, *_ = given.whole
    return Form((x, *given.weights, *given.biases), (dy,))


def _parts(given: Lists) -> Form:
    """Everything by group; groups without rows take no part."""
    owners = [g for g, x in enumerate(given.xs) if len(x)]
    kinds = (given.xs, given.weights, given.biases)
    inputs = tuple(kind[g].contiguous() for kind in kinds if kind for g in owners)
    return Form(inputs, tuple(given.dys[g].contiguous() for g in owners))


def _padded(given: Lists) -> Form:
    """Groups first, padded with zeros to the longest."""
    pad = torch.nn.utils.rnn.pad_sequence
    x, dy = (pad(list(kind), batch_first=True) for kind in (given.xs, given.dys))
    _, weight, _, *bias = given.whole
    return Form((x, weight, *bias), (dy,))


# --------------------------------------------------------------------------------------------
# How each computes it


def _of(case: Case, run: Callable[..., Tensor]) -> Forward:
    """A product and its bias, then the activation."""
    value = activation_of(case.option("activation")).value
    return lambda *given: (value(run(*given)),)


def _loop(work: ListsWork) -> Forward:
    sizes = sizes_of(work.case)
    value = activation_of(work.case.option("activation")).value

    def run(x: Tensor, *parameters: Tensor) -> Tensors:
        weights, biases = parameters[: len(sizes)], parameters[len(sizes) :]
        ys = [
            value(F.linear(part, weights[g], biases[g] if biases else None))
            for g, part in enumerate(x.split(sizes))
            if sizes[g]
        ]
        return (torch.cat(ys),)

    return run


def _by_parts(work: ListsWork) -> Forward:
    return lists.by_layer(work.case, sum(size > 0 for size in sizes_of(work.case)))


def _bmm(work: ListsWork) -> Forward:
    return lists.by_bmm(work.case)


def _grouped_mm(work: ListsWork) -> Forward:
    sizes = torch.tensor(sizes_of(work.case), device=work.stacks[0].xs[0].device)
    offsets = sizes.cumsum(0).to(torch.int32)
    owner = torch.arange(len(sizes), device=sizes.device).repeat_interleave(sizes)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        y: Tensor = torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets)
        return y if bias is None else y + bias[owner]

    return _of(work.case, run)


def _ours(backend: str | None) -> Callable[[ListsWork], Forward]:
    def of(work: ListsWork) -> Forward:
        activation = work.case.option("activation")
        sizes = torch.tensor(sizes_of(work.case), device=work.stacks[0].xs[0].device)

        def run(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensors:
            call: dict[str, Any] = {"activation": activation, "backend": backend}
            return (ragged_linear(x, weight, sizes, bias, **call),)

        return run

    return of


# --------------------------------------------------------------------------------------------
# As they are judged


def _one_output(work: ListsWork, results: Tensors) -> Tensors:
    """y and dx hold all rows, parameters' gradients come by group."""
    if not work.case.needs_grad:
        return flat(work, results)
    given = work.stacks[0]
    y, dx, *grads = results
    rest = lists.one_behind_the_other(work, (*given.dys, *given.xs, *grads), len(given.xs))
    return (y.flatten(), dx.flatten(), *rest[2:])


def _of_owners(work: ListsWork, results: Tensors) -> Tensors:
    owners = [g for g, x in enumerate(work.stacks[0].xs) if len(x)]
    every: list[Tensor] = []
    for i in range(0, len(results), len(owners)):
        kind = dict(zip(owners, results[i : i + len(owners)], strict=True))
        every += [kind.get(g, results[0][:0]) for g in range(len(work.stacks[0].xs))]
    return lists.one_behind_the_other(work, tuple(every), len(work.stacks[0].xs))


def _unpadded(work: ListsWork, results: Tensors) -> Tensors:
    sizes = sizes_of(work.case)

    def rows(t: Tensor) -> Tensor:
        return torch.cat([t[g, :size] for g, size in enumerate(sizes)]).flatten()

    y, *grads = results
    return (rows(y), *(rows(t) if i == 0 else t.flatten() for i, t in enumerate(grads)))


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a case, able to take part or not."""
    return (
        contender("eager", _experts, _loop, _one_output),
        contender("eager_parts", _parts, _by_parts, _of_owners),
        contender("padded_bmm", _padded, _bmm, _unpadded),
        contender("grouped_mm", _whole, _grouped_mm, flat, _no_grouped_mm),
        contender("compile", _experts, _loop, _one_output, no_compiler, compiled=True),
        contender("compile_grouped_mm", _whole, _grouped_mm, flat, _no_compiled, compiled=True),
        contender(OURS, _whole, _ours(None), flat, precompile=True),
        contender(f"{OURS}[loop]", _whole, _ours("eager"), flat),
        contender(f"{OURS}[triton]", _whole, _ours("triton"), flat, cuda_only, precompile=True),
    )


def _no_compiled(case: Case) -> str | None:
    if case.dtype != "bfloat16":
        return "torch.compile knows grouped_mm in bfloat16 only"
    return no_compiler(case) or _no_grouped_mm(case)


def _no_grouped_mm(case: Case) -> str | None:
    if case.device == "cuda" and case.dtype != "bfloat16":
        return "PyTorch's grouped_mm serves bfloat16 on CUDA only"
    if case.dim("K") % 8 or case.dim("N") % 8:
        return "PyTorch's grouped_mm needs rows of a multiple of 16 bytes"
    return None


def chosen(case: Case, work: ListsWork, captured: bool) -> dict[str, str]:
    """Which backend serves our call."""
    x, weight, _, *bias = work.stacks[0].whole
    sizes = torch.ones(len(weight), dtype=torch.int64, device=x.device)  # no fact of the choice
    (choice,) = explain(x, weight, sizes, *bias, needs_grad=case.needs_grad).choices
    return {"forward": choice.backend.name}
