"""The calls of gated_mlp that a shipped table is made of, each with what it costs importance."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

from benchmarks.experiments.gated_mlp import MODELS
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import tuning_order
from fastlinear.families.gated.problem import problem

# What costs how much importance; the sum orders them among the layers, least first.
_DTYPES = {"bfloat16": 0.0, "float32": 1.5, "float16": 2.5}
_ORDERS = {"apart": 0.0, "gate_up": 0.5}
_BIASES = {"no": 0.0, "yes": 2.0}
_TOKENS = {4096: 0.0, 64: 0.25, 256: 0.5, 16: 0.5, 1024: 0.5, 16384: 0.75, 1: 1.0, 4: 2.0}
_MODEL = 0.2  # for each that is named before it
_LARGEST_ELEMENTS = 1 << 30  # of one tensor


def gated_problems(device: str = "cuda") -> list[tuple[float, int, Problem]]:
    """The gated MLPs of published models: (cost, place in a call, Problem) of the forward for
    inference and of every piece of a training step, with gate and up apart and stacked.

    Other activations are looked up under these, and so are biases on some of the products.
    """
    found = []
    sizes = list(dict.fromkeys(MODELS.values()))
    grid = product(enumerate(sizes), _DTYPES, _ORDERS, _BIASES, _TOKENS)
    for (i, (k, h, activation)), dtype, order, bias, m in grid:
        if 2 * m * h > _LARGEST_ELEMENTS:
            continue
        forward = problem(
            *("forward", m, k, h, k),
            dtype=dtype,
            device=device,
            activation=activation,
            bias=bias,
            order=order,
            precision=matmul_precision(FLOAT_DTYPES[dtype]),
        )
        cost = _DTYPES[dtype] + _ORDERS[order] + _BIASES[bias] + _TOKENS[m] + _MODEL * i
        calls = forward, *tuning_order(replace(forward, needs_grad=True))
        found += [(cost, place, p) for place, p in enumerate(calls)]
    return found
