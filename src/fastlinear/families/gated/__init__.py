"""(act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)) Wdᵀ + bd, forward and backward, with and without Wd."""

from fastlinear.families.gated import backends as _backends
from fastlinear.families.gated import registered as _registered
from fastlinear.families.gated.op import explain, gated_linear, gated_mlp

__all__ = ["explain", "gated_linear", "gated_mlp"]

del _backends, _registered
