"""The CUDA kernels of few rows: linear_act's forward in inference."""

from __future__ import annotations

from collections.abc import Callable
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
from fastlinear.families.linear.cuda import few_rows
from fastlinear.families.linear.cuda import few_rows_config as config

_LARGEST = 1.5e8  # numbers of a weight


def _draw(draw: Random) -> Problem | None:
    dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
    rows = log_uniform(draw, 64 if dtype.itemsize == 2 else 16)
    k, n = (max(8, width(draw) // 8 * 8) for _ in range(2))
    return {"M": rows, "K": k, "N": n, "dtype": name_of(dtype)} if k * n <= _LARGEST else None


def _sizes(p: Problem) -> tuple[int, int, int, torch.dtype]:
    return p["M"], p["K"], p["N"], dtype_of(p)


def _inputs(p: Problem, place: torch.device) -> list[tuple[Any, ...]]:
    m, k, n, dtype = _sizes(p)
    x, bias = normal(place, dtype, m, k), normal(place, dtype, n)
    weights = (normal(place, dtype, n, k) / k**0.5 for _ in range(turns(k * n, dtype)))
    return [(x, w, bias) for w in weights]


def _run(p: Problem, c: config.Config) -> Callable[..., Any]:
    def run(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor) -> Any:
        return few_rows.forward(x, w, bias, "gelu", False, config=c)

    return run


def _config(p: Problem, fields: dict[str, Any]) -> config.Config:
    return config.SingleConfig(**fields) if p["dtype"] == "float32" else config.HalfConfig(**fields)


KIND = Kind(
    draw=_draw,
    chosen=lambda p: config.config_for(*_sizes(p)),
    candidates=lambda p: config.candidates(p["M"], p["K"], dtype_of(p)),
    microseconds=lambda p, c: config.microseconds(c, *_sizes(p)),
    inputs=_inputs,
    run=_run,
    terms=lambda p, c: config.terms(c, *_sizes(p)),
    config=_config,
    group=lambda p: p["dtype"],
)
