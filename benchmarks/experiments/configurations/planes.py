"""Products of linear_act's ``planes``: of operands that are split already, or of which the first is
read and split there."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import torch

from benchmarks.experiments.configurations.kind import (
    Kind,
    Problem,
    log_uniform,
    normal,
    turns,
    width,
)
from fastlinear.families.linear.cuda import planes, planes_product, planes_split
from fastlinear.families.linear.cuda.planes import Config

_MOST_ROWS, _MOST_FLOPS, _MOST_NUMBERS = 1 << 17, 5e11, 1e8
_UNITS = 132
_UNIFORM = 2  # of planes.h: the scales of a block are one, as those of most numbers are


def _draw(draw: Random) -> Problem | None:
    piece = draw.choice(("forward", "forward", "grad_input", "grad_weight"))
    m, k, n = log_uniform(draw, _MOST_ROWS), width(draw), width(draw)
    if max(m * k, k * n, m * n) > _MOST_NUMBERS or 2 * m * k * n > _MOST_FLOPS:
        return None
    activation = draw.choice(("none", "relu", "gelu")) if piece == "forward" else "none"
    first = n if piece == "grad_input" else k
    reads = piece != "grad_weight" and first % 4 == 0 and draw.choice((True, False))
    found = {"piece": piece, "M": m, "K": k, "N": n, "activation": activation}
    return {**found, **({"reads": True} if reads else {})}


def _reads(p: Problem) -> bool:
    """Whether the first operand is split by the product."""
    return bool(p.get("reads", False))


def _product(p: Problem) -> tuple[int, int, int]:
    """Rows, columns and depth."""
    m, k, n = p["M"], p["K"], p["N"]
    return {"forward": (m, n, k), "grad_input": (m, k, n), "grad_weight": (n, k, m)}[p["piece"]]


def _candidates(p: Problem) -> list[Config]:
    m, n, k = _product(p)
    return list(planes.candidates(m, n, k, _reads(p)))


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    m, n, k = _product(p)
    of_rows = {"forward": (True, True), "grad_input": (True, False), "grad_weight": (False, False)}

    def split(size: int, by_rows: bool) -> planes_split.Planes:
        shape = (size, k) if by_rows else (k, size)
        numbers = normal(place, torch.float32, *shape)
        pitch = planes.pitch(shape[1])
        made = normal(place, torch.float16, 4, shape[0], pitch)[:, :, : shape[1]]
        high, low, small_high, small_low = made
        segments, blocks = -(-k // 64), -(-size // 64)
        scales = torch.ones(segments, blocks * 64, device=place)
        small = torch.full((segments, blocks), _UNIFORM, dtype=torch.int32, device=place)
        given = high, low, small_high, small_low, scales, small
        source = planes_split.Source(numbers)
        return planes_split.Planes(*given, source, not by_rows)

    ways, reads = of_rows[p["piece"]], _reads(p)

    def first() -> planes_product.Operand:
        if not reads:
            return split(m, ways[0])
        return planes_split.Source(normal(place, torch.float32, m, k))

    sets = turns(m * k + k * n + m * n, torch.float32)
    return [(first(), split(n, ways[1])) for _ in range(sets)]


def _run(p: Problem, c: Config) -> Callable[..., Any]:
    return lambda a, b: planes_product.product(a, b, None, p["activation"], config=c)


KIND = Kind(
    draw=_draw,
    chosen=lambda p: planes.config_for(*_product(p), _UNITS, _reads(p)),
    candidates=_candidates,
    microseconds=lambda p, c: c.microseconds(*_product(p), _UNITS),
    inputs=_inputs,
    run=_run,
    terms=lambda p, c: c.terms(*_product(p), _UNITS),
    config=lambda p, fields: Config(**fields),
    group=lambda p: "numbers" if _reads(p) else "planes",
    plans=planes_product.plans,
)
