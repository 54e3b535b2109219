"""The analytic order of a chain's backends on a GPU in inference, where no measurement covers it.

Read off the H200's grid of 1120 measurements (``results/nvidia-h200/overhead.jsonl.gz``), which
``tests/families/mlp/test_mlp_defaults.py`` holds it to. Backends that cannot serve are passed over.
"""

from __future__ import annotations

from fastlinear.core.problem import Problem
from fastlinear.families.mlp.problem import widths_of

_NARROW = 128
"""Widest layers of which one multiprocessor holds a whole chain."""
_FEW = 4
"""16-bit rows from which on single layers have kernels of their own."""


def inference_order(p: Problem) -> tuple[str, ...]:
    """Backends of a forward without gradients, the likely fastest first."""
    order = ["layerwise", "eager"]
    if _in_triton(p):
        order.insert(0, "whole_triton")
    if _in_cuda(p):
        # of narrow chains the host's part is the same; the device's is Triton's from 512 rows on
        order.insert(int(order[0] == "whole_triton" and p.dim("M") > 128), "whole_cuda")
    return tuple(order)


def _in_triton(p: Problem) -> bool:
    """Whether a narrow chain's launch beats a launch a layer."""
    m, layers, widest = p.dim("M"), p.dim("L"), max(widths_of(p))
    if widest > _NARROW:
        return False
    if p.dtype != "float32":
        return layers > 1 or m < _FEW or (p.captured and widest <= 64)
    if m > 4096:
        return widest <= 64
    few = m <= 16  # layers one by one have kernels for these
    return not few or (layers > 1 and not p.captured)


def _in_cuda(p: Problem) -> bool:
    """Whether one launch over several multiprocessors beats a launch a layer."""
    m, layers, widest = p.dim("M"), p.dim("L"), max(widths_of(p))
    if p.dtype == "float32":
        if m > 128 or widest > 1024:
            return False
        if m >= 32:
            return widest <= 512 or (m <= 64 and layers > 1)
        if p.captured:
            return m >= 16 and layers > 4 and widest <= 256
        return layers > 1 and widest <= 512
    if layers == 1:
        return m < _FEW and widest <= 256
    if m > 512:
        return False
    if m > 128:
        return widest <= (_NARROW if p.captured else 256)
    if p.captured and layers == 2:  # launches are free: several multiprocessors must pay
        if p.option("widths") != "equal":
            return widest <= _NARROW
        return m <= 64 if widest <= 512 else 32 <= m <= 64
    return True
