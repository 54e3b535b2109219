"""Shapes of the few-rows kernels, timed and fitted: ``python -m benchmarks.experiments.few_rows``.

``sweep`` times drawn configurations on drawn layers, by many processes as ``collect`` does; ``fit``
prints the microseconds of ``few_rows_config.TERMS`` that explain them, and how far the choice by
them is from the best that was timed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch

from benchmarks.harness.rows import opened
from benchmarks.parallel import measured
from fastlinear.calibration import measure
from fastlinear.calibration.drawn import width
from fastlinear.families.linear.cuda import few_rows, few_rows_config
from fastlinear.families.linear.cuda.few_rows_config import TURN_BYTES, TURNS

_TRIED = 10
_LARGEST = 1.5e8
Row = dict[str, Any]


def layers(seed: int) -> Iterator[tuple[int, int, int, torch.dtype, int]]:
    """Rows, K, N, dtype and a seed of layers without end."""
    for index in count():
        draw = Random(f"{seed} {index}")
        dtype = draw.choice((torch.bfloat16, torch.bfloat16, torch.float32))
        most = 64 if dtype.itemsize == 2 else 16
        rows = round(math.exp(draw.random() * math.log(most)))
        k, n = (max(8, width(draw) // 8 * 8) for _ in range(2))
        if k * n <= _LARGEST:
            yield rows, k, n, dtype, index


def sweep(layer: tuple[int, int, int, torch.dtype, int], place: torch.device) -> list[Row]:
    """The chosen configuration and some drawn ones, weights out of turn."""
    m, k, n, dtype, seed = layer
    chosen = few_rows_config.config_for(m, k, n, dtype)
    every = few_rows_config.candidates(m, k, dtype)
    tried = dict.fromkeys((chosen, *Random(seed).sample(every, min(_TRIED, len(every)))))
    with measure.exclusive():
        sets = max(1, min(TURNS, -(-TURN_BYTES // (k * n * dtype.itemsize))))
        x, bias = (torch.randn(*s, device=place).to(dtype) for s in ((m, k), (n,)))
        weights = [(torch.randn(n, k, device=place) / k**0.5).to(dtype) for _ in range(sets)]
    rows = []
    with torch.no_grad():
        for config in tried:

            def run(weight: torch.Tensor, config: few_rows_config.Config = config) -> Any:
                return few_rows.forward(x, weight, bias, "gelu", False, config=config)

            us = measure.device_us(run, [(w,) for w in weights], place)
            sizes = {"M": m, "K": k, "N": n, "dtype": str(dtype).removeprefix("torch.")}
            rows.append({**sizes, "config": asdict(config), "us": us, "sets": sets})
    return rows


def read(path: Path) -> dict[str, list[tuple[tuple[int, int, int], few_rows_config.Config, float]]]:
    """Dtype → sizes of a layer, a configuration, and its microseconds."""
    found = defaultdict(list)
    with opened(path, "r") as file:
        for row in map(json.loads, file):
            if row["us"]:
                half = row["dtype"] != "float32"
                kind = few_rows_config.HalfConfig if half else few_rows_config.SingleConfig
                config: few_rows_config.Config = kind(**row["config"])
                found[row["dtype"]].append(((row["M"], row["K"], row["N"]), config, row["us"]))
    return found


def fitted(terms: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Microseconds of each term, none negative, of the least relative errors."""
    from scipy.optimize import nnls

    found: np.ndarray = nnls(terms / us[:, None], np.ones(len(us)))[0]
    return found


def regrets(sizes: Iterable[Any], us: np.ndarray, predicted: np.ndarray) -> np.ndarray:
    """Of each layer, the time of the configuration that is predicted best over the best."""
    layers = defaultdict(list)
    for index, layer in enumerate(sizes):
        layers[layer].append(index)
    groups = map(np.array, layers.values())
    return np.array([us[g[predicted[g].argmin()]] / us[g].min() for g in groups if len(g) > 3])


def main() -> None:
    """Sweep on a GPU, or fit what a sweep wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("task", choices=("sweep", "fit"))
    parser.add_argument("file", type=Path, help="rows, JSON lines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--jobs", type=int, default=8)
    given = parser.parse_args()
    if given.task == "sweep":
        how: Any = {"device": "cuda", "jobs": given.jobs, "end": time.time() + given.seconds}
        with opened(given.file, "w") as file:
            for _, rows, why in measured(sweep, partial(layers, given.seed), **how):
                if why:
                    print(why)
                file.writelines(json.dumps(row) + "\n" for row in rows or ())
        return
    for name, rows in read(given.file).items():
        dtype = getattr(torch, name)
        sizes, configs, times = zip(*rows, strict=True)
        us = np.array(times)
        terms = np.array(
            [
                few_rows_config.terms(config, m, k, n, dtype)
                for (m, k, n), config in zip(sizes, configs, strict=True)
            ]
        )
        part = np.array([hash(s) % 4 for s in sizes])
        held_out = np.zeros(len(us))
        for fold in range(4):
            out = part == fold
            held_out[out] = terms[out] @ fitted(terms[~out], us[~out])
        found = regrets(sizes, us, held_out)
        print(f"{name}: regret {np.exp(np.log(found).mean()):.3f} on layers left out")
        print(", ".join(f"{v:.4g}" for v in fitted(terms, us)))


if __name__ == "__main__":
    main()
