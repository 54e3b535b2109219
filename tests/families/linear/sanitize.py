"""One small call of each CUDA and Triton kernel of linear_act, for compute-sanitizer on Hopper:

    compute-sanitizer --tool memcheck python tests/families/linear/sanitize.py
    compute-sanitizer --tool synccheck python tests/families/linear/sanitize.py
    compute-sanitizer --tool racecheck python tests/families/linear/sanitize.py

What they report, and why the hazards that racecheck names are none, is said in
src/fastlinear/families/linear/ORDERING.md.

Words choose the calls whose names contain one of them. Exits 1 when a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.families.linear import padded, reference
from fastlinear.families.linear.cuda import columns, few_rows, gemm, planes_backend
from fastlinear.families.linear.cuda.few_rows_config import HalfConfig, SingleConfig
from fastlinear.families.linear.cuda.gemm_config import Config
from fastlinear.families.linear.triton import backend, backward

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ALL = (True, True, True)
Results = tuple[Tensor | None, ...]


class Drawn(NamedTuple):
    """Tensors of one layer: x (M, K), weight (N, K), bias (N,), dy and pre (M, N)."""

    x: Tensor
    weight: Tensor
    bias: Tensor
    dy: Tensor
    pre: Tensor

    def double(self) -> Drawn:
        return Drawn(*(t.double() for t in self))


class Call(NamedTuple):
    """One small call of one kernel, and what PyTorch gives."""

    name: str
    sizes: tuple[int, int, int]
    dtype: torch.dtype
    ours: Callable[[Drawn], Results]
    plain: Callable[[Drawn], Results]


def _forward(d: Drawn) -> Results:
    return reference.forward(d.x, d.weight, d.bias, "gelu", True)


def _backward(d: Drawn) -> Results:
    return reference.backward(d.dy, d.pre, d.x, d.weight, "gelu", ALL)


def _product(config: Config) -> Callable[[Drawn], Results]:
    return lambda d: gemm.gemm(d.x, d.weight, d.bias, "gelu", True, config)


def _gradients(d: Drawn) -> Results:
    dx, _ = gemm.gemm(d.dy, d.weight.t())
    dw, _ = gemm.gemm(d.dy.t(), d.x.t())
    return dx, dw


def _plain_gradients(d: Drawn) -> Results:
    return reference.grad_input(d.dy, d.weight), reference.grad_weight(d.dy, d.x)


def _few(config: SingleConfig | HalfConfig) -> Callable[[Drawn], Results]:
    return lambda d: few_rows.forward(d.x, d.weight, d.bias, "gelu", False, config=config)[:1]


def _planes_gradients(d: Drawn) -> Results:
    return planes_backend.grad_input(d.dy, d.weight), planes_backend.grad_weight(d.dy, d.x)


def _columns(d: Drawn) -> Results:
    db = torch.empty_like(d.bias)
    columns.ColumnSums(d.dy).run(d.dy, None, None, db)
    return (db,)


def calls() -> list[Call]:
    """All calls, in the order in which they are made."""
    tiles = {
        "ping-pong": Config(128, 192, 4, out_bufs=3),
        "alone": Config(128, 128, 6, cluster=1, out_bufs=2),
        "cooperative": Config(128, 256, 4, pingpong=False),
        "narrow": Config(64, 64, 12),
    }
    few: dict[torch.dtype, tuple[SingleConfig | HalfConfig, ...]] = {
        F32: (SingleConfig(2, 8, 2), SingleConfig(2, 8, 1, 2)),
        BF16: (HalfConfig(1, 2, 4, 2), HalfConfig(2, 2, 4, 1, 2)),
    }
    return [
        *[
            Call(f"cuda, {name}", sizes, BF16, _product(config), _forward)
            for name, config in tiles.items()
            for sizes in ((300, 200, 520), (300, 200, 333))
        ],
        Call("cuda, gradients", (264, 200, 520), F16, _gradients, _plain_gradients),
        *[
            Call("few_rows", (9, 520, 72), dtype, _few(config), lambda d: _forward(d)[:1])
            for dtype, configs in few.items()
            for config in configs
        ],
        Call(
            *("planes", (150, 200, 136), F32),
            lambda d: planes_backend.forward(d.x, d.weight, d.bias, "gelu", True),
            _forward,
        ),
        Call("planes, gradients", (150, 200, 136), F32, _planes_gradients, _plain_gradients),
        Call(
            *("planes, backward", (150, 200, 136), F32),
            lambda d: planes_backend.backward(d.dy, d.pre, d.x, d.weight, "gelu", ALL),
            _backward,
        ),
        Call("columns", (2050, 8, 264), BF16, _columns, lambda d: (d.dy.sum(0),)),
        *[
            Call("padded", (300, 77, 131), dtype, run, plain)
            for dtype in (BF16, F32)
            for run, plain in (
                (lambda d: padded.forward(d.x, d.weight, d.bias, "gelu", True), _forward),
                (lambda d: padded.backward(d.dy, d.pre, d.x, d.weight, "gelu", ALL), _backward),
            )
        ],
        *[
            Call("triton", (130, 72, 136), dtype, run, plain)
            for dtype in (BF16, F32)
            for run, plain in (
                (lambda d: backend.forward(d.x, d.weight, d.bias, "gelu", True), _forward),
                (
                    lambda d: (backend.grad_input(d.dy, d.weight),),
                    lambda d: _plain_gradients(d)[:1],
                ),
                (lambda d: (backend.grad_weight(d.dy, d.x),), lambda d: _plain_gradients(d)[1:]),
            )
        ],
        Call(
            "triton, whole backward",
            (33, 72, 136),
            BF16,
            lambda d: backward.backward(d.dy, d.pre, d.x, d.weight, "gelu", ALL),
            _backward,
        ),
    ]


def _wrong(call: Call) -> int:
    """How many of a call's results are not as near to the truth as they have to be."""
    m, k, n = call.sizes
    generator = torch.Generator("cuda").manual_seed(m)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * scale).to(call.dtype)

    drawn = Drawn(draw(m, k), draw(n, k, scale=k**-0.5), draw(n), draw(m, n), draw(m, n))
    got = call.ours(drawn)
    torch.cuda.synchronize()
    verdicts = []
    for a, b, c in zip(got, call.plain(drawn), call.plain(drawn.double()), strict=True):
        if a is not None:
            assert b is not None
            assert c is not None
            verdicts.append(judge(call.name, a, b, c, factor=4.0))
    bad = sum(not v.passed for v in verdicts)
    print("WRONG" if bad else "ok   ", call.name, call.dtype, call.sizes, flush=True)
    return bad


def main(words: list[str]) -> int:
    """The number of wrong results among the calls that the words choose."""
    chosen = [c for c in calls() if not words or any(word in c.name for word in words)]
    if not chosen:
        raise SystemExit(f"no call is named like {words}: {sorted({c.name for c in calls()})}")
    return sum(_wrong(call) for call in chosen)


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
