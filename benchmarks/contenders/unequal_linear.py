"""Experiment ``unequal``: layers of different sizes, each with its own input, by every way.

Each contender has its tensors in the form that suits it best, laid out before the clock starts:
padding and blocks on a diagonal cost no copy.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import lists
from benchmarks.contenders.lists import (
    Form,
    Forward,
    Lists,
    ListsWork,
    Tensors,
    contender,
    one_behind_the_other,
)
from benchmarks.harness.case import Case
from benchmarks.harness.peer import OURS, Peer, cuda_only, no_compiler
from benchmarks.harness.work import drawing, rotated
from fastlinear.activations.reference import activation as activation_of
from fastlinear.families.grouped.unequal.backends import FAMILY, problem
from fastlinear.families.grouped.unequal.op import explain, unequal_linear


def sizes_of(case: Case) -> list[tuple[int, int]]:
    """(K, N) of each group, drawn between the option's numbers: multiples of 8, or ``any``."""
    *word, span = case.option("sizes").split()
    step = 1 if word else 8
    low, high = (int(number) for number in span.split("-"))
    numbers = range(low, high + 1, step)
    pick = random.Random(0).choice
    return [(pick(numbers), pick(numbers)) for _ in range(case.dim("G"))]


def make_work(case: Case, device: torch.device) -> ListsWork:
    """Draw the tensors of a case."""
    return ListsWork(case, *rotated(case, device, _draw, lambda given: given.bytes))


def _draw(case: Case, device: torch.device, index: int) -> Lists:
    draw = drawing(case, device, index)
    m, sizes = case.dim("M"), sizes_of(case)
    given = Lists(
        tuple(draw(m, k) for k, _ in sizes),
        tuple(draw(n, k, scale=k**-0.5) for k, n in sizes),
        tuple(draw(n) for _, n in sizes) if case.option("bias") != "no" else (),
        tuple(draw(m, n) for _, n in sizes),
    )
    if index == 0:
        lists.silence(case, given)
    return given


# --------------------------------------------------------------------------------------------
# How each takes its tensors, computes, and is judged


def _listed(given: Lists) -> Form:
    return Form((*given.xs, *given.weights, *given.biases), given.dys)


def _blocks(given: Lists) -> Form:
    """One layer whose weight has the groups' on its diagonal."""
    bias = (torch.cat(given.biases),) if given.biases else ()
    weight = torch.block_diag(*given.weights)
    return Form((torch.cat(given.xs, 1), weight, *bias), (torch.cat(given.dys, 1),))


def _padded(given: Lists) -> Form:
    """Groups first, padded with zeros to the widest."""
    widest = [max(w.shape[i] for w in given.weights) for i in (1, 0)]
    x, dy = (
        torch.stack([F.pad(t, (0, most - t.shape[1])) for t in kind])
        for kind, most in ((given.xs, widest[0]), (given.dys, widest[1]))
    )
    weight = torch.stack(
        [F.pad(w, (0, widest[0] - w.shape[1], 0, widest[1] - w.shape[0])) for w in given.weights]
    )
    bias = [F.pad(b, (0, widest[1] - len(b))) for b in given.biases]
    return Form((x, weight, *((torch.stack(bias),) if bias else ())), (dy,))


def _loop(work: ListsWork) -> Forward:
    return lists.by_layer(work.case, work.case.dim("G"))


def _dense(work: ListsWork) -> Forward:
    value = activation_of(work.case.option("activation")).value
    return lambda *given: (value(F.linear(*given)),)


def _bmm(work: ListsWork) -> Forward:
    return lists.by_bmm(work.case)


def _ours(backend: str | None) -> Callable[[ListsWork], Forward]:
    def of(work: ListsWork) -> Forward:
        count, activation = work.case.dim("G"), work.case.option("activation")

        def run(*given: Tensor) -> list[Tensor]:
            xs, weights, biases = (given[i * count : (i + 1) * count] for i in range(3))
            call = xs, weights, biases or None
            return unequal_linear(*call, activation=activation, backend=backend)

        return run

    return of


def _by_group(work: ListsWork, results: Tensors) -> Tensors:
    return one_behind_the_other(work, results, work.case.dim("G"))


def _of_blocks(work: ListsWork, results: Tensors) -> Tensors:
    inputs, outputs = map(list, zip(*sizes_of(work.case), strict=True))

    def split(t: Tensor, widths: list[int]) -> Tensors:
        return t.split(widths, -1)

    y, *grads = results
    found = [*split(y, outputs)]
    if grads:
        rows = grads[1].split(outputs, 0)
        found += split(grads[0], inputs)
        found += [part.split(inputs, 1)[g] for g, part in enumerate(rows)]
        found += [part for t in grads[2:] for part in split(t, outputs)]
    return _by_group(work, tuple(found))


def _unpadded(work: ListsWork, results: Tensors) -> Tensors:
    sizes = sizes_of(work.case)
    y, *grads = results
    found = [y[g, :, :n] for g, (_, n) in enumerate(sizes)]
    if grads:
        found += [grads[0][g, :, :k] for g, (k, _) in enumerate(sizes)]
        found += [grads[1][g, :n, :k] for g, (k, n) in enumerate(sizes)]
        found += [t[g, :n] for t in grads[2:] for g, (_, n) in enumerate(sizes)]
    return _by_group(work, tuple(found))


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a case, able to take part or not."""
    return (
        contender("eager", _listed, _loop, _by_group),
        contender("block_diagonal", _blocks, _dense, _of_blocks),
        contender("padded_bmm", _padded, _bmm, _unpadded),
        contender("compile", _listed, _loop, _by_group, no_compiler, compiled=True),
        contender(OURS, _listed, _ours(None), _by_group),
        contender(f"{OURS}[loop]", _listed, _ours("eager"), _by_group),
        contender(f"{OURS}[together]", _listed, _ours("together"), _by_group, _not_together),
    )


def _not_together(case: Case) -> str | None:
    if case.device == "cuda":
        return cuda_only(case)
    (backend,) = [b for b in FAMILY.candidates("forward") if b.name == "together"]
    return backend.why_not_ready(problem("forward", 4, 2, 4, 4, dtype=case.dtype, device="cpu"))


def chosen(case: Case, work: ListsWork, captured: bool) -> dict[str, str]:
    """Which backend serves our call."""
    given = work.stacks[0]
    tensors = given.xs, given.weights, given.biases or None
    return {"forward": explain(*tensors, needs_grad=case.needs_grad).choices[0].backend.name}
