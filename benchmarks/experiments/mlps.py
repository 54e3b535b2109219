"""Experiment ``mlps``: networks that people train, by the widths of their layers.

Policies and critics, towers of a recommender, networks of coordinates and of physics, tables.
"""

from __future__ import annotations

from itertools import pairwise

from benchmarks.harness.case import BOTH_MODES, Case, timed_on

# Widths, the activation behind every layer but the last, dtypes on a GPU, rows; `+` before the
# width of a layer that takes the input again
_NETWORKS = (
    ("63-256-256-256-256-256-256-256-256-4", "relu", ("bfloat16",), (1 << 16,)),
    ("63-256-256-256-256-256-+256-256-256-4", "relu", ("bfloat16",), (1 << 16,)),
    ("32-64-64-64-64-16", "relu", ("bfloat16",), (1 << 18,)),
    ("3-128-128-128-128-128-128-1", "tanh", ("bfloat16",), (100_000,)),
    ("376-256-256-17", "relu", ("bfloat16",), (256, 4096)),
    ("415-512-512-256-1", "relu", ("bfloat16",), (2048, 16_384)),
    ("100-512-512-10", "relu", ("float32", "bfloat16"), (1024,)),
)
_CPU_DTYPES = ("float32", "bfloat16")
_MOST_CPU_FLOPS = 2e10  # of a call: a tenth of a second on two cores
_QUICK = (
    ("13-64-64-1", "relu", ("float32",), (64,)),
    ("13-64-+64-1", "relu", ("float32",), (64,)),
)


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type."""
    found = []
    for sizes, activation, dtypes, batches in _QUICK if quick else _NETWORKS:
        for dtype in dtypes if quick or device == "cuda" else _CPU_DTYPES:
            for m in batches:
                network = sizes, activation, m
                found += [_case(device, dtype, d, *network, quick) for d in BOTH_MODES]
    return found


def _case(
    device: str, dtype: str, direction: str, sizes: str, activation: str, m: int, quick: bool
) -> Case:
    skips = [i - 1 for i, size in enumerate(sizes.split("-")) if size.startswith("+")]
    sizes = sizes.replace("+", "")
    widths = tuple(map(int, sizes.split("-")))
    numbers = sum(k * n for k, n in pairwise(widths))
    while device == "cpu" and 6 * m * numbers > _MOST_CPU_FLOPS:
        m //= 4
    return Case(
        experiment="mlps",
        family="mlp",
        dims=(("M", m), ("L", len(widths) - 1)),
        dtype=dtype,
        device=device,
        direction=direction,
        metrics=timed_on(device),
        options=(
            *(("sizes", sizes), ("activation", activation), ("final", "none")),
            *(("bias", "yes"), ("caches", "warm")),
            *((("skips", " ".join(map(str, skips))),) if skips else ()),
        ),
        light=quick,
        without=("compile_max_autotune",) if device == "cpu" else (),
    )
