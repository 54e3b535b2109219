"""fastlinear: the nn.Linear-shaped work of PyTorch models, as fast as the hardware allows."""

from fastlinear import nn
from fastlinear.core.errors import (
    CacheWarning,
    FastlinearError,
    InputError,
    ModelLoadError,
    NumericsError,
    PlanError,
    UnsupportedError,
)
from fastlinear.core.settings import Config
from fastlinear.nn.graphed import graphed
from fastlinear.ops.common.kept_memory import release_memory
from fastlinear.ops.diagonal_linear import diagonal_linear
from fastlinear.ops.explain import explain
from fastlinear.ops.gated_mlp import gated_linear, gated_mlp
from fastlinear.ops.grouped_linear import grouped_linear
from fastlinear.ops.linear_act import linear_act
from fastlinear.ops.mlp import mlp
from fastlinear.ops.ragged_linear import ragged_linear
from fastlinear.ops.unequal_linear import unequal_linear
from fastlinear.rewrite import apply_, optimize_, profile

__version__ = "0.1.0"

__all__ = [
    "CacheWarning",
    "Config",
    "FastlinearError",
    "InputError",
    "ModelLoadError",
    "NumericsError",
    "PlanError",
    "UnsupportedError",
    "__version__",
    "apply_",
    "diagonal_linear",
    "explain",
    "gated_linear",
    "gated_mlp",
    "graphed",
    "grouped_linear",
    "linear_act",
    "mlp",
    "nn",
    "optimize_",
    "profile",
    "ragged_linear",
    "release_memory",
    "unequal_linear",
]
