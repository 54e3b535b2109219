"""Networks whose derivatives are learnt: ``python -m benchmarks.experiments.physics --out FILE``.

A step is the gradient of a loss by all parameters. Of a Laplacian the loss is of the sum of second
derivatives by the input, of a force of the first ones. PyTorch's ways are its autograd, and
``torch.compile`` of the same by ``torch.func``, since compiled code cannot be differentiated twice.
A row has the median microseconds of each way in one interleaved run, and what errors are.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import jvp, vjp

import fastlinear as fl
from benchmarks.harness.case import timed_on
from fastlinear.core.compare import judge
from fastlinear.core.environment import environment
from fastlinear.core.timing import interleave
from fastlinear.families.mlp import reference
from fastlinear.fastpath import autograd_node

Net = Callable[..., Tensor]
"""(x, weights, biases) → u (M, 1)."""


class Task(NamedTuple):
    """A network and what is learnt of it.

    Attributes:
        learnt: ``"laplacian"`` or ``"force"``.
        widths: of its layers.
        activation: behind every layer but the last.
        rows: on a GPU; on a CPU an eighth.
    """

    learnt: str
    widths: tuple[int, ...]
    activation: str
    rows: int


TASKS = (
    Task("laplacian", (3, *(128,) * 6, 1), "tanh", 100_000),
    Task("laplacian", (2, *(256,) * 4, 1), "sine", 65_536),
    Task("laplacian", (2, *(64,) * 3, 1), "tanh", 4096),
    Task("force", (64, 128, 128, 1), "silu", 32_768),
    Task("force", (30, 240, 240, 240, 1), "gelu", 8192),
)


def by_autograd(learnt: str, net: Net) -> Callable[..., Tensor]:
    """The loss of (x, weights, biases, target), by gradients with graphs."""

    def loss(x: Tensor, weights: Any, biases: Any, target: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        u = net(x, weights, biases)
        (first,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        if learnt == "force":
            return (first - target).square().mean()
        total: Any = 0.0
        for i in range(x.shape[1]):
            (second,) = torch.autograd.grad(first[:, i].sum(), x, create_graph=True)
            total = total + second[:, i : i + 1]
        return (total - target).square().mean()

    return loss


def by_transforms(learnt: str, net: Net) -> Callable[..., Tensor]:
    """The same by ``torch.func``, of which code can be compiled."""

    def loss(x: Tensor, weights: Any, biases: Any, target: Tensor) -> Tensor:
        def of(x: Tensor) -> Tensor:
            return net(x, weights, biases)

        if learnt == "force":
            u, back = vjp(of, x)[:2]
            return (back(torch.ones_like(u))[0] - target).square().mean()
        total: Any = 0.0
        for i in range(x.shape[1]):
            along = torch.zeros_like(x)
            along[:, i] = 1.0

            def first(x: Tensor, along: Tensor = along) -> Tensor:
                return jvp(of, (x,), (along,))[1]  # type: ignore[no-any-return]

            total = total + jvp(first, (x,), (along,))[1]
        return (total - target).square().mean()

    return loss


def inputs(task: Task, device: str, dtype: torch.dtype) -> tuple[Any, ...]:
    """(x, weights, biases, target)."""
    draw = torch.Generator().manual_seed(0)
    rows = task.rows if device == "cuda" else task.rows // 8

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=draw) * scale).to(device, dtype)

    weights = [normal(n, k, scale=k**-0.5).requires_grad_() for k, n in pairwise(task.widths)]
    biases = [normal(n, scale=0.1).requires_grad_() for n in task.widths[1:]]
    x = normal(rows, task.widths[0])
    return x, weights, biases, normal(rows, task.widths[0] if task.learnt == "force" else 1)


def steps(task: Task, given: tuple[Any, ...], compiled: bool) -> dict[str, Callable[[], Any]]:
    """Each way's gradients of all parameters but the last bias, on which no derivative depends."""
    _, weights, biases, _ = given
    leaves = [*weights, *biases[:-1]]

    def plain(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        return reference.mlp(x, weights, biases, task.activation, "none")

    def ours(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor]) -> Tensor:
        return fl.mlp(x, weights, biases, task.activation, "none")

    ways = {"eager": by_autograd(task.learnt, plain), "fastlinear": by_autograd(task.learnt, ours)}
    if compiled:
        ways["compile, torch.func"] = torch.compile(by_transforms(task.learnt, plain))
    return {
        name: lambda loss=loss: torch.autograd.grad(loss(*given), leaves)  # type: ignore[misc]
        for name, loss in ways.items()
    }


def row(task: Task, device: str, dtype: torch.dtype, compiled: bool, budget_s: float) -> Any:
    """A task's times and verdicts."""
    given = inputs(task, device, dtype)
    every = steps(task, given, compiled)
    wide = inputs(task, device, torch.float64)
    oracle = steps(task, wide, False)["eager"]()
    theirs = every["eager"]()
    failed = [
        str(v)
        for i, found in enumerate(zip(every["fastlinear"](), theirs, oracle, strict=True))
        if not (v := judge(f"gradient {i}", *found)).passed
    ]
    del wide, oracle, theirs
    us = {}
    for metric in timed_on(device):
        found = interleave(every, device=device, metric=metric, rounds=15, budget_s=budget_s)
        us[metric] = {name: round(s.median_us, 1) for name, s in found.items()}
    facts = {"learnt": task.learnt, "sizes": "-".join(map(str, task.widths)), "M": len(given[0])}
    name = str(dtype).removeprefix("torch.")
    return {**facts, "activation": task.activation, "dtype": name, "us": us, "failed": failed}


def rows(device: str, dtypes: Sequence[str], compiled: bool, budget_s: float) -> Iterator[Any]:
    """All tasks."""
    for task in TASKS:
        for dtype in dtypes:
            yield row(task, device, getattr(torch, dtype), compiled, budget_s)


def main() -> None:
    """Time all tasks, and write a line of each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="rows, JSON lines")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", nargs="+", choices=("float32", "bfloat16"), default=["float32"])
    parser.add_argument("--skip-compile", action="store_true", help="it takes long to prepare")
    parser.add_argument("--budget", type=float, default=20.0, help="seconds a task and metric")
    given = parser.parse_args()
    autograd_node.wait(60.0)
    torch.manual_seed(0)
    with given.out.open("w") as file:
        for found in rows(given.device, given.dtype, not given.skip_compile, given.budget):
            print(*(found[name] for name in ("learnt", "sizes", "M", "dtype")), found["us"])
            print(*found["failed"], sep="\n", end="", flush=True)
            file.write(json.dumps({**found, "env": environment(given.device)}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
