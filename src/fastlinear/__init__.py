"""fastlinear: the nn.Linear-shaped work of PyTorch models, as fast as the hardware allows."""

from fastlinear import nn
from fastlinear.core.settings import Config
from fastlinear.ops.linear_act import explain, linear_act
from fastlinear.profile import profile
from fastlinear.rewrite import apply_, optimize_

__version__ = "0.1.0"

__all__ = [
    "Config",
    "__version__",
    "apply_",
    "explain",
    "linear_act",
    "nn",
    "optimize_",
    "profile",
]
