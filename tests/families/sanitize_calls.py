"""One small call of each CUDA and Triton backend of the families that have no script of their own,
for compute-sanitizer (see sanitize_families.py beside this):

    compute-sanitizer --tool memcheck python -m tests.families.sanitize_calls gated_mlp

Every backend that can serve a Problem computes it once and is judged. Exits 1 when a result is
wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.compare import judge
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, family
from fastlinear.dispatch.tune import verify
from fastlinear.families.diagonal.problem import problem as diagonal
from fastlinear.families.gated.problem import problem as gated
from fastlinear.families.grouped.problem import problem as grouped
from tests.families.unserved import unserved

DTYPES = ("float32", "bfloat16")
REGISTERED = ("gated_mlp", "grouped_linear", "diagonal_linear")
"""Families whose backends are records."""
# sizes: odd tails on either side of a tile, and whole tiles, which the Hopper kernels ask for
_GATED = ((40, 24, 48, 16), (33, 65, 20, 7), (130, 256, 256, 128), (20, 64, 128, 0))
# the last: more groups than an H200 has multiprocessors, so that a block's weight changes
_GROUPED = (
    *((40, 3, 33, 20, 10), (40, 3, 36, 20, 10), (70, 2, 64, 64, 35)),
    *((130, 2, 136, 136, 65), (66, 140, 64, 72, 33)),
)
_DIAGONAL = ((65, 33), (33, 128), (3, 1100))
_ROWS = (0, 5, 17, 40)  # of each group
_UNEQUAL = ((7, 33, 20), (40, 64, 64), (1, 16, 130))  # rows, K, N of each group
Made = Callable[[str], "list[Tensor]"]


def problems(name: str, device: str) -> Iterator[Problem]:
    """Small Problems of every piece of a registered family."""
    for dtype in DTYPES:
        how: dict[str, Any] = {"dtype": dtype, "device": device}
        precise = {"precision": matmul_precision(FLOAT_DTYPES[dtype])}
        for piece in family(name).pieces:
            if piece == "step":  # PyTorch's own way against the pieces: no kernels of its own
                continue
            how["needs_grad"] = piece != "forward"
            if name == "gated_mlp":
                for sizes in _GATED:
                    for order in ("apart", "gate_up"):
                        yield gated(piece, *sizes, bias="yes", order=order, **how, **precise)
            elif name == "grouped_linear":
                for m, g, k, n, length in _GROUPED:
                    for order in ("tokens", "groups", "channels"):
                        more = {"order": order, "length": length, "activation": "gelu"}
                        yield grouped(piece, m, g, k, n, **more, **how, **precise)  # type: ignore[arg-type]
            else:
                for sizes in _DIAGONAL:
                    for layout in ("rows", "strided"):
                        more = {"x_layout": layout, "activation": "gelu", "residual": True}
                        yield diagonal(piece, *sizes, **more, **how)  # type: ignore[arg-type]


def backends(problem: Problem) -> list[Backend]:
    """Those that can serve a Problem, PyTorch's own path left out."""
    known = family(problem.family).candidates(problem.piece)
    return [b for b in known if b.name != "eager" and b.reason_not(problem) is None]


def ragged(dtype: torch.dtype, device: str) -> Made:
    """``ragged_linear`` with groups of 0 rows and more, and rows of none; y and all gradients."""
    draw = _drawer(dtype, device)
    rows, (k, n) = sum(_ROWS) + 3, (33, 65)
    x, weight, bias = draw(rows, k), draw(len(_ROWS), n, k), draw(len(_ROWS), n)
    sizes, dy = torch.tensor(_ROWS, device=device), draw(rows, n)

    def made(backend: str) -> list[Tensor]:
        given = [t.detach().requires_grad_() for t in (x, weight, bias)]
        y = fl.ragged_linear(
            given[0], given[1], sizes, given[2], activation="gelu", backend=backend
        )
        return [y.detach(), *torch.autograd.grad(y, given, dy)]

    return made


def unequal(dtype: torch.dtype, device: str) -> Made:
    """``unequal_linear`` with groups of other sizes; every y and all gradients."""
    draw = _drawer(dtype, device)
    drawn = [(draw(m, k), draw(n, k), draw(n)) for m, k, n in _UNEQUAL]
    dys = [draw(m, n) for m, _, n in _UNEQUAL]

    def made(backend: str) -> list[Tensor]:
        groups = [[t.detach().requires_grad_() for t in group] for group in drawn]
        xs, weights, biases = (list(ts) for ts in zip(*groups, strict=True))
        ys = fl.unequal_linear(xs, weights, biases, activation="gelu", backend=backend)
        wanted = [*xs, *weights, *biases]
        return [*(y.detach() for y in ys), *torch.autograd.grad(ys, wanted, dys)]

    return made


def experts(dtype: torch.dtype, device: str) -> Made:
    """``experts`` with biases and a limit, and slots of none; y and all gradients."""
    draw = _drawer(dtype, device)
    tokens, count, h, i = 37, 5, 33, 20
    index = (torch.arange(2 * tokens, device=device) * 7 % 6 - 1).view(tokens, 2)
    shapes = (tokens, h), (tokens, 2), (count, 2 * i, h), (count, h, i), (count, 2 * i), (count, h)
    drawn, dy = [draw(*shape) for shape in shapes], draw(tokens, h)

    def made(backend: str) -> list[Tensor]:
        x, weight, *rest = given = [t.detach().requires_grad_() for t in drawn]
        options = {"stacked": "interleaved", "limit": 99.0, "alpha": 1.702, "up_offset": 1.0}
        y = fl.experts(x, index, weight, *rest, backend=backend, **options)  # type: ignore[arg-type]
        return [y.detach(), *torch.autograd.grad(y, given, dy)]

    return made


_ON_CPU = "together" if unserved(torch.float32) is None else "eager"
LISTED: dict[str, tuple[Callable[[torch.dtype, str], Made], str, str]] = {
    "ragged_linear": (ragged, "triton", "cpp"),
    "experts": (experts, "triton", "cpp"),
    "unequal_linear": (unequal, "together", _ON_CPU),
}
"""Families that are functions: calls, their backend on a GPU, and on a CPU."""
FAMILIES = (*REGISTERED, *LISTED)


def run(name: str, device: str) -> Iterator[tuple[str, bool]]:
    """What was called, and whether its results are as near to the truth as they have to be."""
    if name in LISTED:
        calls, on_gpu, on_cpu = LISTED[name]
        backend = on_gpu if device == "cuda" else on_cpu
        # 16 bits take processors with products of them
        for dtype in DTYPES if device == "cuda" else DTYPES[:1]:
            made = calls(FLOAT_DTYPES[dtype], device)
            ours, theirs = made(backend), made("eager")
            exact = calls(torch.float64, device)("eager")  # the same numbers: see _drawer
            judged = (judge(name, *three).passed for three in zip(ours, theirs, exact, strict=True))
            yield f"{name} {backend} {dtype}", all(judged)
        return
    for problem in problems(name, device):
        inputs = family(name).make_inputs(problem, torch.device(device), 0)
        for backend in backends(problem):
            with torch.no_grad():
                good = all(v.passed for v in verify(backend, problem, inputs))
            yield f"{backend.name}: {problem.describe()}", good


def _drawer(dtype: torch.dtype, device: str) -> Callable[..., Tensor]:
    """Draws numbers that bfloat16 holds, the same in every dtype."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator) * shape[-1] ** -0.25
        return drawn.bfloat16().to(device, dtype)

    return draw


def main(names: Sequence[str], device: str = "cuda") -> int:
    """How many results are wrong."""
    wrong = 0
    for name in names or FAMILIES:
        if name not in FAMILIES:
            raise SystemExit(f"no family {name!r} here, but {', '.join(FAMILIES)}")
        for what, good in run(name, device):
            if device == "cuda":
                torch.cuda.synchronize()
            print("ok   " if good else "WRONG", what, flush=True)
            wrong += not good
    return wrong


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
