"""The least work of a Linear in one step, and what is known of the step as a whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.cost import Ceilings, Cost
from fastlinear.profile.records import LinearSite

CeilingsOf = Callable[[str, str], Ceilings]
"""(dtype name, float32 matmul precision) → measured limits of the device."""

ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Step:
    """What diagnosis knows about the step as a whole.

    Attributes:
        mode: ``"inference"`` or ``"train"``.
        device: ``"cpu"`` or ``"cuda"``.
        step_us: wall time of one step.
        busy_us: time per step in which the device ran something.
        precision: the float32 matmul precision in force.
        op_us: host time of the smallest op torch can run, per call.
    """

    mode: str
    device: str
    step_us: float
    busy_us: float
    precision: str
    op_us: float


def linear_cost(site: LinearSite, mode: str, *, k: int | None = None, n: int | None = None) -> Cost:
    """Least work of one site in one step: forward, and in train mode dx, dW and db.

    Forward: 2MNK flops; reads x, W, b, writes y. Backward: reads dy and, for the activation's
    derivative, one (M, N) tensor; for dx 2MNK flops, reads W, writes dx; for dW and db 2MNK flops,
    reads x, writes both. Only gradients the step really computes are counted.
    """
    m = site.rows
    k, n = k or site.in_features, n or site.out_features
    size = ITEM_BYTES[site.dtype]
    bias = n if site.bias else 0
    cost = Cost(2.0 * m * n * k, size * (m * k + n * k + bias + m * n))
    if mode != "train":
        return cost
    if not (site.input_grad or site.weight_grad):
        return cost
    kept = m * n if saves(site) == "pre" else 0  # the forward writes it besides y
    saved = m * n if saves(site) != "none" else 0
    cost += Cost(0.0, size * (kept + m * n + saved))
    for needed in (site.input_grad, site.weight_grad):
        if needed:
            cost += Cost(2.0 * m * n * k, size * (m * k + n * k))
    return cost + Cost(0.0, size * bias if site.weight_grad else 0)


def saves(site: LinearSite) -> str:
    """What the activation's derivative needs: ``"none"``, ``"output"`` or ``"pre"``."""
    return ACTIVATIONS[site.activation or "none"].saved
