"""Backend ``addcmul``: PyTorch's own fused multiply-add, b + x ∘ w in one pass, then the rest.

One op fewer than ``eager``; the activation and the residual work in the result's own memory. Serves
every device, dtype and layout, with ``out`` and without.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.diagonal import reference


def reason_not(problem: Problem) -> str | None:
    """Why this backend cannot serve a forward Problem, or None."""
    return "there is no bias to add" if problem.option("bias") == "no" else None


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    residual: Tensor | None,
    out: Tensor | None,
) -> Tensor:
    """act(x ∘ w + b) + r: x, residual and out (M, K), weight and bias (K,) → (M, K).

    bfloat16 rounds between the steps, as PyTorch does; so does float16 on a GPU. On a CPU it
    computes in float32 and rounds once.
    """
    assert bias is not None
    more = activation != "none" or residual is not None  # one pass rounds once anyhow
    if more and reference.widens(x):
        return reference.forward(x, weight, bias, activation, residual, out)
    y = torch.addcmul(bias, x, weight, out=out)
    found = activation_of(activation).over(y)
    y = found if out is None or found is y else y.copy_(found)
    return y if residual is None else y.add_(residual)
