"""What families written in torch share."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from torch import nn


def mlp(
    *widths: int, act: Callable[[], nn.Module] = nn.ReLU, final: nn.Module | None = None
) -> nn.Sequential:
    """Linear layers of these widths with an activation between them, and ``final`` behind."""
    layers: list[nn.Module] = []
    for k, n in pairwise(widths):
        layers += [nn.Linear(k, n), act()]
    return nn.Sequential(*layers[:-1], *(() if final is None else (final,)))
