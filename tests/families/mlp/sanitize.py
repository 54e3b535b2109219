"""One small call of each CUDA and Triton kernel of mlp, for compute-sanitizer on a Hopper GPU:

    compute-sanitizer --tool memcheck python tests/families/mlp/sanitize.py
    compute-sanitizer --tool synccheck python tests/families/mlp/sanitize.py
    compute-sanitizer --tool racecheck python tests/families/mlp/sanitize.py ordered

``ordered`` leaves whole_grid, whole_stream and tasks_cuda out: their blocks hand numbers on without
barriers, which racecheck reports by design. Other words choose the calls whose names contain one.
What racecheck reports, and why that is no race, says src/fastlinear/families/mlp/ORDERING.md.
Exits 1 when a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import backend, tasks_backend
from fastlinear.families.mlp.cuda.backend import Config, Grid, Launches, Stream
from fastlinear.families.mlp.reference import Biases, Weights
from fastlinear.families.mlp.triton import backend as whole_triton

BF16, F32 = torch.bfloat16, torch.float32
Forward = Callable[..., tuple[Tensor, tuple[Tensor, ...]]]


def _wrong(
    name: str, forward: Forward, rows: int, widths: tuple[int, ...], dtype: torch.dtype
) -> int:
    """1 where the result of ``forward`` is not as near to the truth as it has to be, else 0."""
    generator = torch.Generator("cuda").manual_seed(rows)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(dtype)

    weights = tuple(draw(n, k, scale=k**-0.5) for k, n in pairwise(widths))
    biases = tuple(draw(n) for n in widths[1:])
    x = draw(rows, widths[0])
    y = forward(x, weights, biases, "gelu", "none", False)[0]
    torch.cuda.synchronize()
    plain = reference.mlp(x, weights, biases, "gelu", "none")
    wide = tuple(w.double() for w in weights), tuple(b.double() for b in biases)
    verdict = judge(name, y, plain, reference.mlp(x.double(), *wide, "gelu", "none"), factor=4.0)
    print("ok   " if verdict.passed else "WRONG", name, dtype, rows, widths, flush=True)
    return int(not verdict.passed)


def _whole(config: Config | Grid | Launches | Stream) -> Forward:
    def forward(*call: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        return backend.forward(*call, config=config)  # type: ignore[arg-type]

    return forward


def _tasks(x: Tensor, weights: Weights, biases: Biases, *names: str) -> Tensor:
    """dx of dy = 1, by ``tasks_cuda``."""
    saved = reference.forward(x, weights, biases, *names, True)[1]
    every = (True,) * len(weights)
    dy = torch.ones_like(saved[-1])
    dx = tasks_backend.backward(dy, x, weights, saved, *names, (True, every, every))[0]
    assert dx is not None
    return dx


def _wrong_tasks(rows: int, widths: tuple[int, ...]) -> int:
    """The same of a backward in one launch."""
    draw = torch.Generator("cuda").manual_seed(rows)
    shapes = [(rows, widths[0]), *((n, k) for k, n in pairwise(widths))]
    x, *ws = (torch.randn(*s, device="cuda", generator=draw).div(s[-1] ** 0.5) for s in shapes)

    def plain(dtype: torch.dtype) -> Tensor:
        given = tuple(w.to(BF16).to(dtype) for w in ws)
        leaf = x.to(BF16).to(dtype).requires_grad_()
        y = reference.mlp(leaf, given, (None,) * len(ws), "gelu", "none")
        return torch.autograd.grad(y.sum(), leaf)[0]

    given = tuple(w.to(BF16) for w in ws)
    dx = _tasks(x.to(BF16), given, (None,) * len(ws), "gelu", "none")
    torch.cuda.synchronize()
    verdict = judge("tasks_cuda", dx, plain(BF16), plain(torch.float64), factor=4.0)
    print("ok   " if verdict.passed else "WRONG", "tasks_cuda", BF16, rows, widths, flush=True)
    return int(not verdict.passed)


class Call(NamedTuple):
    """One small call of one kernel."""

    name: str
    forward: Forward
    rows: int
    widths: tuple[int, ...]
    dtype: torch.dtype


NARROW = (40, 16, 7, 16, 200, 8, 16, 24)
"""Layers of so few columns that most blocks and warps have none."""


def calls() -> list[Call]:
    """All calls, in the order in which they are made."""
    stores = Config(4, 8, 2, 2, unroll=2)
    held, simt = Config(4, 8, 2, 2, depth=2, direct=True), Config(4, 8, 2, 2, simt=True)
    launches = Launches(8, 1, 4, 2, stages=3, x_blocks=4)
    chain, few = (128, 96, 128, 40), (264, 520, 128, 41)
    return [
        Call("whole_cuda, stores", _whole(stores), 9, chain, BF16),
        Call("whole_cuda, direct", _whole(held), 9, (128,) * 4, BF16),
        Call("whole_cuda, simt", _whole(simt), 9, (64, 96, 64), F32),
        *[Call("whole_cuda, narrow stores", _whole(stores), 9, NARROW, d) for d in (BF16, F32)],
        *[Call("whole_cuda, launches", _whole(launches), 17, few, d) for d in (BF16, F32)],
        Call("whole_grid", _whole(Grid(8, 5, 2, 2)), 20, (512,) * 4, BF16),
        Call("whole_grid", _whole(Grid(8, 5, 2)), 20, (512,) * 4, F32),
        Call("whole_stream, small", _whole(Stream(2, 2, 4, 1)), 9, (256,) * 3, BF16),
        Call("whole_stream", _whole(Stream(4, 8, 4, 2)), 20, (512,) * 4, BF16),
        Call("whole_stream, 65 rows", _whole(Stream(4, 4, 5, 2)), 65, (512,) * 4, BF16),
        Call("whole_stream, uneven", _whole(Stream(2, 6, 4, 1)), 20, (264, 520, 24, 200, 41), BF16),
        *[Call("whole_triton", whole_triton.forward, 17, (64, 48, 64, 10), d) for d in (BF16, F32)],
    ]


def main(words: list[str]) -> int:
    """The number of wrong results among the calls that the words choose."""
    ordered = "ordered" in words
    words = [word for word in words if word != "ordered"]
    chosen = [
        call
        for call in calls()
        if not (ordered and call.name.startswith(("whole_grid", "whole_stream")))
        and (not words or any(word in call.name for word in words))
    ]
    tasks = not ordered and (not words or any(word in "tasks_cuda" for word in words))
    if not chosen and not tasks:
        raise SystemExit(f"no call is named like {words}: {sorted({c.name for c in calls()})}")
    return sum(_wrong(*call) for call in chosen) + (tasks and _wrong_tasks(150, (64, 130, 40)))


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
