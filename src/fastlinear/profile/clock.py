"""What a profile takes from the clock: a step, the smallest op, the device's ceilings."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

from fastlinear.core.cost import Ceilings, measure_ceilings
from fastlinear.core.interrupts import whole
from fastlinear.core.precision import float32_precision
from fastlinear.core.timing import first_call_us, interleave
from fastlinear.profile.step import Step

SLOW_STEP_US = 1e5
"""Above, fewer runs say enough: what disturbs one is small beside it."""
_TIMING_ROUNDS = 9
_TIMING_BUDGET_S = 1.0


def step_us(step: Step, device: torch.device) -> float:
    """Median wall time of a step that has run twice already."""
    once = first_call_us(step, device)
    if once > SLOW_STEP_US:
        return median((once, first_call_us(step, device), first_call_us(step, device)))
    timed = interleave(
        {"step": step}, device=device, rounds=_TIMING_ROUNDS, budget_s=_TIMING_BUDGET_S
    )
    return timed["step"].median_us


def smallest_op_us() -> float:
    """Host time of the smallest op torch can run, per call."""
    x = torch.zeros(1, device="cpu")
    with torch.no_grad():
        return interleave({"op": lambda: torch.relu(x)}, rounds=7)["op"].median_us


def ceilings(device: torch.device, dtype: str, precision: str) -> Ceilings:
    """Measured limits of the device for a dtype, for float32 at a matmul precision."""
    if dtype != "float32":
        return measure_ceilings(str(device), dtype)
    with _matmul_precision(precision):
        return measure_ceilings(str(device), dtype, precision)


@whole
def _matmul_precision(precision: str) -> Iterator[None]:
    if precision == float32_precision():
        yield
        return
    # The newer setting: the older one cannot be read, nor set, once a backend's own is in use.
    product: Any = torch.backends.cuda.matmul
    before = product.fp32_precision
    product.fp32_precision = "ieee" if precision == "highest" else "tf32"
    try:
        yield
    finally:
        product.fp32_precision = before
