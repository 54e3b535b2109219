"""What ``torch.jit.script`` is told of modules that it cannot read."""

from __future__ import annotations

from typing import NoReturn

from torch import nn

from fastlinear.core.errors import UnsupportedError

_OTHERS = "torch.jit.trace, torch.export and torch.compile take it as it is."


def refuse_script(received: str, remedy: str) -> NoReturn:
    """Raise the UnsupportedError in place of TorchScript's own error, which shows our code."""
    expected = "modules whose forward TorchScript can read"
    raise UnsupportedError("torch.jit.script", expected, received, f"{remedy} {_OTHERS}")


def script_layer(self: nn.Module) -> nn.Module:
    """``__prepare_scriptable__`` of fastlinear's layers; a subclass may have another forward."""
    if type(self).forward.__module__.startswith("fastlinear."):
        name = type(self).__name__
        remedy = "Script a model that has PyTorch's own layers in its place."
        refuse_script(f"fastlinear.nn.{name}, which chooses backends in Python", remedy)
    return self
