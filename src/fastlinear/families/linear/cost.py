"""Least cost of linear_act's pieces."""

from __future__ import annotations

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.cost import Cost
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.families.linear.problem import PIECES, STEP, WHOLE_BACKWARD


def cost(p: Problem) -> Cost:
    """Least flops and bytes of one piece; saved tensors are counted where they are needed."""
    if p.piece == STEP:
        parts = [cost(p.with_piece(piece)) for piece in PIECES]
        return Cost(sum(c.flops for c in parts), sum(c.bytes for c in parts))
    m, k, n = p.dim("M"), p.dim("K"), p.dim("N")
    size = FLOAT_DTYPES[p.dtype].itemsize
    bias = n if p.option("bias") == "yes" else 0
    kept = activation_of(p.option("activation")).saved
    gemm = 2.0 * m * k * n
    saved = 0 if kept == "none" else m * n
    if p.piece == "forward":
        pre = m * n if p.needs_grad and kept == "pre" else 0
        return Cost(gemm, size * (m * k + n * k + bias + m * n + pre))
    if p.piece == WHOLE_BACKWARD:  # dpre need not be written
        return Cost(2 * gemm, size * (m * n + saved + 2 * m * k + 2 * n * k + bias))
    if p.piece == "grad_pre":
        return Cost(0.0, size * (2 * m * n + saved + bias))
    return Cost(gemm, size * (m * k + n * k + m * n))
