"""The grid of Problems a shipped table is made of, most important first."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from benchmarks.contenders import mlp as chains
from benchmarks.experiments import overhead
from benchmarks.tables.diagonal_grid import diagonal_problems
from benchmarks.tables.gated_grid import gated_problems
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.families.linear.problem import problem
from fastlinear.families.linear.selection import tuning_order
from fastlinear.families.mlp import problem as mlp
from fastlinear.families.mlp.selection import tuning_order as chain_order

# What costs how much importance; the sum orders the grid, least first.
_DTYPES = {"bfloat16": 0.0, "float32": 1.5, "float16": 2.5}
_ACTIVATIONS = {"gelu_tanh": 0.0, "none": 1.0, "relu": 1.5, "gelu": 3.0, "silu": 3.5}
_LAYOUTS = {"nk": 0.0, "kn": 2.5}
_SIZES = (
    (768, 3072),
    (1024, 4096),
    (4096, 4096),
    (3072, 768),
    (4096, 1024),
    (768, 768),
    (1024, 1024),
    (4096, 14336),
    (14336, 4096),
    (256, 1024),
    (8192, 8192),
    (4095, 4095),
    (1000, 1000),
)
_TOKENS = {
    4096: 0.0,
    16384: 0.5,
    1024: 0.5,
    256: 0.75,
    64: 0.75,
    1: 1.0,
    16: 1.25,
    4: 2.0,
    65536: 2.5,
}
# The layers whose rows are published; their dtypes and activations count less.
_PUBLISHED = (
    (8192, 768, 3072),
    (8192, 1024, 4096),
    (8192, 4096, 4096),
    (64, 1024, 1024),
    (1, 4096, 4096),
)
_PUBLISHED_SHARE = 0.25
_LARGEST_ELEMENTS = 1 << 30  # of one tensor: larger Problems cost more time than they teach
_LARGEST_CHAIN = 1 << 24  # rows times width
_CAPTURED = 0.5  # what a call inside a CUDA graph costs more importance
# Chains of equal widths; the sum orders them among the layers.
_CHAIN_DTYPES = {"bfloat16": 0.0, "float32": 0.5, "float16": 3.0}
_CHAIN_WIDTHS = {64: 0.0, 256: 0.0, 128: 0.5, 512: 0.5, 1024: 0.5, 2048: 2.0}
_CHAIN_LAYERS = {8: 0.0, 4: 0.5, 2: 1.0}
_CHAIN_TOKENS = {64: 0.0, 1: 0.5, 1024: 0.5, 16: 1.0, 256: 1.0, 4096: 1.0, 16384: 1.5, 65536: 2.0}
_CHAIN_TRAINING = 1.0
# (rows, width) of chains of four wide layers in float32
_WIDE_CHAINS = {
    "cuda": (
        *((4096, 2048), (4096, 4096), (4096, 8192), (16384, 2048), (16384, 4096)),
        *((4097, 4095), (2048, 2048), (1024, 2048), (4096, 1024)),
    ),
    "cpu": ((512, 1024), (1024, 2048)),
}
_PUBLISHED_CHAIN = -2.0  # the cells of the published grids come before all else
_PUBLISHED_TRAINING = -1.5


def table_problems(device: str = "cuda") -> list[Problem]:
    """The grid of layers, chains and gated MLPs, most important first, all pieces of each call next
    to each other."""
    weighted: list[tuple[float, int, Problem]] = []
    for dtype, a in _DTYPES.items():
        for activation, b in _ACTIVATIONS.items():
            for layout, c in _LAYOUTS.items():
                base = a + b + c
                first = _PUBLISHED_SHARE * (a + b) + c - 1.0
                for m, k, n in _PUBLISHED:
                    weighted += _pieces(first, (m, k, n), dtype, device, activation, layout)
                for i, (k, n) in enumerate(_SIZES):
                    for m, d in _TOKENS.items():
                        if max(m * k, m * n) <= _LARGEST_ELEMENTS:
                            cost = base + 0.2 * i + d
                            weighted += _pieces(cost, (m, k, n), dtype, device, activation, layout)
    weighted += _chains(device)
    weighted += _both_regimes(gated_problems(device))
    weighted.sort(key=lambda item: item[:2])
    return list(dict.fromkeys((*(p for _, _, p in weighted), *diagonal_problems(device))))


def _chains(device: str) -> list[tuple[float, int, Problem]]:
    """The grid of mlp: chains of equal widths with relu."""
    published = enumerate(published_chains(device))
    trained = enumerate(published_training(device))
    found = [(_PUBLISHED_CHAIN, place, p) for place, p in published]
    found += [(_PUBLISHED_TRAINING, place, p) for place, p in trained]
    sizes = list(product(_CHAIN_WIDTHS.items(), _CHAIN_LAYERS.items(), _CHAIN_TOKENS.items()))
    for dtype, base in _CHAIN_DTYPES.items():
        for (h, b), (layers, c), (m, d) in sizes:
            if m * h > _LARGEST_CHAIN:
                continue
            forward = mlp.problem(
                "forward",
                m,
                (h,) * (layers + 1),
                dtype=dtype,
                device=device,
                precision=matmul_precision(FLOAT_DTYPES[dtype]),
            )
            cost = base + b + c + d
            step = chain_order(replace(forward, needs_grad=True))
            training = [p for p in step if p.family == forward.family]  # layers have their own grid
            calls = [(cost, forward), *((cost + _CHAIN_TRAINING, p) for p in training)]
            found += _both_regimes([(q, place, p) for place, (q, p) in enumerate(calls)])
    return found


def published_chains(device: str) -> list[Problem]:
    """Wide chains of four layers and the cells of experiment ``overhead`` in inference, the widest
    first: each after the layers it may be made of, outside a CUDA graph and inside."""
    found: list[Problem] = []
    cases = [c for c in overhead.cases(device) if not c.needs_grad and not c.left_out]
    (first, *_) = [c for c in cases if c.dtype == "float32"]
    sizes = [(("M", m), ("L", 4), ("H", h)) for m, h in _WIDE_CHAINS[device]]
    cases = [*(replace(first, dims=dims) for dims in sizes), *cases]
    for case in sorted(cases, key=lambda c: -c.dim("H")):
        cell = chains.problem_of(case)
        for p in (cell, cell.other_regime()):
            found += [] if p is None else chain_order(p)
    return list(dict.fromkeys(found))


def published_training(device: str) -> list[Problem]:
    """The cells of experiment ``overhead`` with gradients, in its order: each after the layers it
    may be made of, outside a CUDA graph and inside."""
    found: list[Problem] = []
    for case in overhead.cases(device):
        if case.needs_grad and not case.left_out:
            pieces = chain_order(chains.problem_of(case))
            inside = (p.other_regime() for p in pieces)
            found += [*pieces, *(p for p in inside if p is not None)]
    return list(dict.fromkeys(found))


def _both_regimes(
    calls: list[tuple[float, int, Problem]],
) -> list[tuple[float, int, Problem]]:
    inside = ((q, place, p.other_regime()) for q, place, p in calls)
    return calls + [(q + _CAPTURED, place, p) for q, place, p in inside if p is not None]


def _pieces(
    cost: float,
    sizes: tuple[int, int, int],
    dtype: str,
    device: str,
    activation: str,
    layout: str,
) -> list[tuple[float, int, Problem]]:
    """One call's Problems: the forward for inference, and every piece of a training step; on a
    GPU outside a CUDA graph and inside."""
    forward = problem(
        "forward",
        *sizes,
        dtype=dtype,
        device=device,
        activation=activation,
        w_layout=layout,
        precision=matmul_precision(FLOAT_DTYPES[dtype]),
    )
    calls = (forward, *tuning_order(replace(forward, needs_grad=True)))
    return _both_regimes([(cost, place, p) for place, p in enumerate(calls)])
