"""What tests of compiled models share."""

from __future__ import annotations

from typing import Any

import torch

from fastlinear.core.settings import Config

X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
COMPILE = Config(compile=True, draws=2, optimizer_steps=2)
torch_compile: Any = torch.compile


def region(result: Any) -> Any:
    (found,) = [s for s in result.sites if s.rule == "compiled"]
    return found
