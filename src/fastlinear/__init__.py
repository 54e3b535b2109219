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
from fastlinear.families import declared as _declared  # noqa: F401
from fastlinear.op import library as _library

if TYPE_CHECKING:
    from fastlinear import nn
    from fastlinear.cuda_graphs.graphed import graphed
    from fastlinear.dispatch.batch_invariant import batch_invariant
    from fastlinear.dispatch.first_use import tune_at_first_use
    from fastlinear.families.diagonal import diagonal_linear
    from fastlinear.families.experts import experts
    from fastlinear.families.explain import explain
    from fastlinear.families.gated import gated_linear, gated_mlp
    from fastlinear.families.grouped import grouped_linear
    from fastlinear.families.grouped.ragged import ragged_linear
    from fastlinear.families.grouped.unequal import unequal_linear
    from fastlinear.families.linear import linear_act
    from fastlinear.families.mlp import mlp
    from fastlinear.kernels.cpu.allocator import release_memory
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
    "batch_invariant",
    "diagonal_linear",
    "experts",
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
    "tune_at_first_use",
    "unequal_linear",
]

_HOMES = {  # where the names that are loaded at first access are defined
    "apply_": "fastlinear.rewrite",
    "batch_invariant": "fastlinear.dispatch.batch_invariant",
    "diagonal_linear": "fastlinear.families.diagonal",
    "experts": "fastlinear.families.experts",
    "explain": "fastlinear.families.explain",
    "gated_linear": "fastlinear.families.gated",
    "gated_mlp": "fastlinear.families.gated",
    "graphed": "fastlinear.cuda_graphs.graphed",
    "grouped_linear": "fastlinear.families.grouped",
    "linear_act": "fastlinear.families.linear",
    "mlp": "fastlinear.families.mlp",
    "optimize_": "fastlinear.rewrite",
    "profile": "fastlinear.rewrite",
    "ragged_linear": "fastlinear.families.grouped.ragged",
    "release_memory": "fastlinear.kernels.cpu.allocator",
    "tune_at_first_use": "fastlinear.dispatch.first_use",
    "unequal_linear": "fastlinear.families.grouped.unequal",
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
