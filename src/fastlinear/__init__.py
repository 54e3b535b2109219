"""fastlinear: the nn.Linear-shaped work of PyTorch models, as fast as the hardware allows.

Public names are loaded at first access. ``import fastlinear`` itself loads the errors and settings,
and declares the registered ops, which exported programs name.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
from fastlinear.op import library as _library
from fastlinear.ops import declared as _declared  # noqa: F401

if TYPE_CHECKING:
    from fastlinear import nn
    from fastlinear.nn.graphed import graphed
    from fastlinear.ops.common.cpu_allocator import release_memory
    from fastlinear.ops.diagonal_linear import diagonal_linear
    from fastlinear.ops.explain import explain
    from fastlinear.ops.gated_mlp import gated_linear, gated_mlp
    from fastlinear.ops.grouped_linear import grouped_linear
    from fastlinear.ops.linear_act import linear_act
    from fastlinear.ops.mlp import mlp
    from fastlinear.ops.ragged_linear import ragged_linear
    from fastlinear.ops.unequal_linear import unequal_linear
    from fastlinear.rewrite import apply_, optimize_, profile

__version__ = "0.2.0"
_library.set_revision(__version__)

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

_HOMES = {  # where the names that are loaded at first access are defined
    "apply_": "fastlinear.rewrite",
    "diagonal_linear": "fastlinear.ops.diagonal_linear",
    "explain": "fastlinear.ops.explain",
    "gated_linear": "fastlinear.ops.gated_mlp",
    "gated_mlp": "fastlinear.ops.gated_mlp",
    "graphed": "fastlinear.nn.graphed",
    "grouped_linear": "fastlinear.ops.grouped_linear",
    "linear_act": "fastlinear.ops.linear_act",
    "mlp": "fastlinear.ops.mlp",
    "optimize_": "fastlinear.rewrite",
    "profile": "fastlinear.rewrite",
    "ragged_linear": "fastlinear.ops.ragged_linear",
    "release_memory": "fastlinear.ops.common.cpu_allocator",
    "unequal_linear": "fastlinear.ops.unequal_linear",
}

# The function of this name is public. Importing the package later would replace it by the package.
import_module("fastlinear.profile")
del globals()["profile"]

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> Any:
        if name == "nn":
            return import_module("fastlinear.nn")
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
