"""Function modes that know fastlinear's calls."""

from __future__ import annotations

from torch.overrides import TorchFunctionMode


class KnowingMode(TorchFunctionMode):
    """A function mode that is shown fastlinear's calls whole.

    Under any other one a rewritten module runs its own forward, so that the mode sees the functions
    of PyTorch's that it knows.
    """
