"""(act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)) Wdᵀ + bd, forward and backward, with and without Wd."""

from fastlinear.ops.gated_mlp import backends as _backends
from fastlinear.ops.gated_mlp import registered as _registered
from fastlinear.ops.gated_mlp.op import explain, gated_linear, gated_mlp

__all__ = ["explain", "gated_linear", "gated_mlp"]

del _backends, _registered
