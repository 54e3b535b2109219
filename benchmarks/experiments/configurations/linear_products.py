"""Triton's products of linear_act: its forward, and the two of its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from itertools import product
from random import Random
from typing import Any

import torch

from benchmarks.experiments.configurations.kind import (
    Kind,
    Problem,
    dtype_of,
    log_uniform,
    name_of,
    normal,
    turns,
    width,
)
from fastlinear.families.linear.triton import backend, product_config, single_config
from fastlinear.families.linear.triton.config import FewRowsConfig, few_rows_config_for
from fastlinear.families.linear.triton.gemm_config import GemmConfig

_HOPPER = (9, 0)
_MOST_ROWS, _MOST_FLOPS, _MOST_NUMBERS = 1 << 16, 2e11, 5e7
_MOST_FMA_ROWS = 8
_SPLITS = (1, 2, 3, 4, 6, 8, 12, 16)


def _draw(draw: Random) -> Problem | None:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float32))
    piece = draw.choice(("forward", "forward", "grad_input", "grad_weight"))
    m, k, n = log_uniform(draw, _MOST_ROWS), width(draw), width(draw)
    if max(m * k, k * n, m * n) > _MOST_NUMBERS or 2 * m * k * n > _MOST_FLOPS:
        return None
    activation = draw.choice(("none", "relu", "gelu")) if piece == "forward" else "none"
    return {
        **{"piece": piece, "M": m, "K": k, "N": n, "dtype": name_of(dtype)},
        **{"activation": activation, "kept": activation != "none" and draw.random() < 0.5},
    }


def _product(p: Problem) -> tuple[int, int, int]:
    """Rows, depth and columns."""
    m, k, n = p["M"], p["K"], p["N"]
    return {"forward": (m, k, n), "grad_input": (m, n, k), "grad_weight": (n, m, k)}[p["piece"]]


def _aligned(p: Problem) -> bool:
    """Whether rows of both operands, and of the result, begin at multiples of 16 bytes."""
    return (p["K"] | p["N"]) * dtype_of(p).itemsize % 16 == 0


def _wide(p: Problem) -> tuple[bool, bool]:
    """Of each operand, whether 16 bytes of it are loaded at once."""
    if _aligned(p):
        return True, True
    k, n = p["K"], p["N"]
    a, b = {"forward": (k, k), "grad_input": (n, k), "grad_weight": (n, k)}[p["piece"]]
    return a % 16 == 0, b % 16 == 0


def _along(p: Problem) -> bool:
    return bool(p["piece"] == "forward")


def _chosen(p: Problem) -> GemmConfig | FewRowsConfig:
    (rows, depth, cols), dtype = _product(p), dtype_of(p)
    if _along(p) and (few := few_rows_config_for(rows, depth, cols, dtype)) is not None:
        return few
    if dtype is torch.float32:
        return single_config.config_for(rows, depth, cols, _HOPPER, _aligned(p), _along(p))
    return product_config.config_for(rows, depth, cols, dtype, _HOPPER, _aligned(p), _wide(p))


def _candidates(p: Problem) -> list[Any]:
    (rows, depth, cols), dtype = _product(p), dtype_of(p)
    found: list[Any] = []
    if _along(p) and rows <= _MOST_FMA_ROWS:
        for block_n, warps in ((b, w) for b in (1, 2, 4, 8) for w in (1, 2, 4, 8)):
            block_k = 32 * 16 // dtype.itemsize * warps
            if block_k < 2 * depth and rows * block_n <= 16:
                found.append(FewRowsConfig(block_n, block_k, warps))
    if dtype is not torch.float32:
        how = dtype, _HOPPER, _aligned(p), _wide(p)
        return [*found, *product_config.candidates(rows, depth, cols, *how, blocks=_blocks())]
    tiles = single_config._ALONG if _along(p) else single_config._ACROSS
    for tile in tiles if _aligned(p) else single_config._LOOSE:
        splits = [s for s in _SPLITS if s == 1 or depth >= 128 * s]
        found += [replace(tile.config, splits=s) for s in splits]
    return found


@lru_cache
def _blocks() -> tuple[GemmConfig, ...]:
    """Many more than calls choose from."""
    pointer = product((16, 32, 64, 128), (32, 64, 128), (32, 64, 128, 256), (4, 8), (2, 3, 4, 5))
    descriptors = product((64, 128), (64, 128, 256), (64, 128), (4, 8), (3, 4, 5))
    every = [GemmConfig("pointer", *block) for block in pointer]
    every += [
        GemmConfig("tma", *block, subtile=part, programs_per_unit=programs)
        for block, part, programs in product(descriptors, (1, 2), (1, 2))
    ]
    return tuple(c for c in every if _moderate(c))


def _moderate(c: GemmConfig) -> bool:
    """Whether threads have neither too little nor too much to hold: it would spill."""
    threads, sums = 32 * c.warps, c.block_r * c.block_c
    if c.problem(torch.bfloat16, _HOPPER) is not None:
        return False
    if c.kind == "tma":
        return 4 * threads <= sums <= 128 * threads
    loads = (c.block_r + c.block_c) * c.block_d
    tall = c.block_r > 16 or c.block_c <= 64
    return tall and 4 * threads <= sums <= 64 * threads and 8 * threads <= loads <= 128 * threads


def _serves(p: Problem, c: GemmConfig | FewRowsConfig) -> bool:
    """Whether a row of it tells of others: what spills is a case of its own, and rows of 8 but not
    16 numbers were loaded one by one when they were timed."""
    if isinstance(c, FewRowsConfig) or dtype_of(p).itemsize == 4:
        return True
    if c.kind == "pointer" and _aligned(p) and (p["K"] | p["N"]) % 16:
        return False
    return _moderate(c) and product_config.loads_fit(c, _wide(p))


def _terms(p: Problem, c: Any) -> tuple[float, ...]:
    sizes = _product(p)
    if isinstance(c, FewRowsConfig):
        c = GemmConfig("pointer", 16, 16 * c.block_n, c.block_k, c.warps, 1)
    more = {"activation": p["activation"], "kept": p["kept"]}
    return product_config.terms(c, *sizes, _wide(p), **more)


def _microseconds(p: Problem, c: Any) -> float:
    sizes = _product(p)
    if isinstance(c, FewRowsConfig):
        return 3.0 + sizes[1] * sizes[2] * dtype_of(p).itemsize / 3.5e6
    return product_config.microseconds(c, *sizes, _wide(p))


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    m, k, n, dtype = p["M"], p["K"], p["N"], dtype_of(p)
    shapes = {
        "forward": ((m, k), (n, k), (n,)),
        "grad_input": ((m, n), (n, k)),
        "grad_weight": ((m, n), (m, k)),
    }[p["piece"]]
    numbers = sum(torch.Size(s).numel() for s in shapes)
    count = turns(numbers, dtype)
    return [tuple(normal(place, dtype, *s) for s in shapes) for _ in range(count)]


def _run(p: Problem, c: Any) -> Callable[..., Any]:
    def forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> Any:
        return backend.forward(x, weight, bias, p["activation"], p["kept"], config=c)

    def gradient(dpre: torch.Tensor, other: torch.Tensor) -> Any:
        return getattr(backend, p["piece"])(dpre, other, config=c)

    return forward if _along(p) else gradient


def _config(p: Problem, fields: dict[str, Any]) -> GemmConfig | FewRowsConfig:
    return GemmConfig(**fields) if "kind" in fields else FewRowsConfig(**fields)


KIND = Kind(
    draw=_draw,
    chosen=_chosen,
    candidates=_candidates,
    microseconds=_microseconds,
    inputs=_inputs,
    run=_run,
    terms=_terms,
    config=_config,
    group=lambda p: p["dtype"],
    serves=_serves,
    plans=backend._plans,
)
