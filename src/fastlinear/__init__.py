"""fastlinear: the nn.Linear-shaped work of PyTorch models, as fast as the hardware allows."""

from fastlinear import nn
from fastlinear.core.settings import Config
from fastlinear.ops.linear_act import explain, linear_act

__version__ = "0.1.0"

__all__ = ["Config", "__version__", "explain", "linear_act", "nn"]
