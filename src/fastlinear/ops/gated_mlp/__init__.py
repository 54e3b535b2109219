"""(act(x Wgᵀ + bg) ∘ (x Wuᵀ + bu)) Wdᵀ + bd, forward and backward, with and without Wd."""

from fastlinear.ops.common import door as _door
from fastlinear.ops.gated_mlp import backends as _backends
from fastlinear.ops.gated_mlp import op as _op
from fastlinear.ops.gated_mlp import registered as _registered
from fastlinear.ops.gated_mlp.op import explain, gated_linear, gated_mlp

__all__ = ["explain", "gated_linear", "gated_mlp"]

_door.on_ready(_op._plans.clear)  # calls of kinds seen before are then made known to the door

del _backends, _door, _op, _registered
