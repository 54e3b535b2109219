"""Triton's products of linear_act: its forward, and the two of its backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
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
from fastlinear.families.linear.triton.config import (
    FewRowsConfig,
    config_for,
    few_rows_config_for,
    grad_config_for,
)
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


def _along(p: Problem) -> bool:
    return bool(p["piece"] == "forward")


def _chosen(p: Problem) -> GemmConfig | FewRowsConfig:
    (rows, depth, cols), dtype = _product(p), dtype_of(p)
    if _along(p) and (few := few_rows_config_for(rows, depth, cols, dtype)) is not None:
        return few
    if dtype is torch.float32:
        return single_config.config_for(rows, depth, cols, _HOPPER, _aligned(p), _along(p))
    if _along(p):
        return config_for(rows, depth, cols, dtype, _HOPPER, _aligned(p))
    return grad_config_for(rows, cols, depth, dtype, _HOPPER, _aligned(p))


def _candidates(p: Problem) -> list[Any]:
    (rows, depth, cols), dtype = _product(p), dtype_of(p)
    found: list[Any] = []
    if _along(p) and rows <= _MOST_FMA_ROWS:
        for block_n, warps in ((b, w) for b in (1, 2, 4, 8) for w in (1, 2, 4, 8)):
            block_k = 32 * 16 // dtype.itemsize * warps
            if block_k < 2 * depth and rows * block_n <= 16:
                found.append(FewRowsConfig(block_n, block_k, warps))
    if dtype is not torch.float32:
        return [*found, *product_config.candidates(rows, depth, cols, _aligned(p))]
    tiles = single_config._ALONG if _along(p) else single_config._ACROSS
    for tile in tiles if _aligned(p) else single_config._LOOSE:
        splits = [s for s in _SPLITS if s == 1 or depth >= 128 * s]
        found += [replace(tile.config, splits=s) for s in splits]
    return found


def _terms(p: Problem, c: Any) -> tuple[float, ...]:
    sizes = _product(p)
    if isinstance(c, FewRowsConfig):
        c = GemmConfig("pointer", 16, 16 * c.block_n, c.block_k, c.warps, 1)
    return product_config.terms(c, *sizes, p["activation"], p["kept"], _aligned(p))


def _microseconds(p: Problem, c: Any) -> float:
    sizes = _product(p)
    if isinstance(c, FewRowsConfig):
        return 3.0 + sizes[1] * sizes[2] * dtype_of(p).itemsize / 3.5e6
    return product_config.microseconds(c, *sizes, p["activation"], p["kept"], _aligned(p))


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
    plans=backend._plans,
)
