"""One small call of each CUDA and Triton kernel of mlp, for compute-sanitizer on a Hopper GPU:

    compute-sanitizer --tool memcheck python tests/ops/mlp/sanitize.py
    compute-sanitizer --tool synccheck python tests/ops/mlp/sanitize.py
    compute-sanitizer --tool racecheck python tests/ops/mlp/sanitize.py ordered

``ordered`` leaves whole_grid out: its blocks hand numbers on without barriers, which racecheck
reports by design. Exits 1 when a result is wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from fastlinear.core.compare import judge
from fastlinear.ops.mlp import reference, strassen, whole_cuda, whole_triton
from fastlinear.ops.mlp.whole_cuda import Config, Grid, Launches

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


def _whole(config: Config | Grid | Launches) -> Forward:
    def forward(*call: object) -> tuple[Tensor, tuple[Tensor, ...]]:
        return whole_cuda.forward(*call, config=config)  # type: ignore[arg-type]

    return forward


def main() -> int:
    """The number of wrong results."""
    wrong = 0
    clusters = {"stores": Config(4, 8, 2, 2, unroll=2), "bulk": Config(2, 8, 2, 1, bulk=True)}
    for name, config in clusters.items():
        wrong += _wrong(f"whole_cuda, {name}", _whole(config), 9, (128, 96, 128, 40), BF16)
    held = Config(4, 8, 2, 2, depth=2, direct=True)
    wrong += _wrong("whole_cuda, direct", _whole(held), 9, (128,) * 4, BF16)
    wrong += _wrong("whole_cuda", _whole(Config(4, 8, 2, 2, simt=True)), 9, (64, 96, 64), F32)
    for dtype in (BF16, F32):
        launches = Launches(8, 1, 4, 2, stages=3, x_blocks=4)
        wrong += _wrong("whole_cuda, launches", _whole(launches), 17, (264, 520, 128, 41), dtype)
    if "ordered" not in sys.argv[1:]:
        wrong += _wrong("whole_grid", _whole(Grid(8, 5, 2, 2)), 20, (512,) * 4, BF16)
        wrong += _wrong("whole_grid", _whole(Grid(8, 5, 2)), 20, (512,) * 4, F32)
    wrong += _wrong("whole_triton", whole_triton.forward, 17, (64, 48, 64, 10), BF16)
    wrong += _wrong("whole_triton", whole_triton.forward, 17, (64, 48, 64, 10), F32)
    wrong += _wrong("strassen", strassen.forward, 64, (128, 256, 128), F32)
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(), 1))
