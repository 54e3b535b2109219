"""What the tests of signs share: inputs whose outputs are of every kind, and that a backward has
from signs what it has from outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fastlinear.families.grouped import layout as layouts

ALL = (True, True, True)


def drawn(
    shape: tuple[int, int], sizes: tuple[int, int, int], dtype: torch.dtype, order: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x (B, L, G, K), weight, bias, dy; among pre-activations are 0, -0, NaN and infinities."""
    groups, k, n = sizes
    x = torch.randn(*shape, groups, k, device="cuda")
    x[:, ::7] = 0.0  # where the bias is 0 or -0, so is y
    x[:, 3::50, 0] = float("nan")
    x[:, 5::50, 1] = float("inf")
    weight = torch.randn(groups, n, k, device="cuda") / k**0.5
    bias = torch.randn(groups, n, device="cuda")
    bias[:, ::3], bias[:, 1::3] = 0.0, -0.0
    dy = layouts.dense(torch.randn(*shape, groups, n, device="cuda").to(dtype), order)
    return layouts.dense(x.to(dtype), order), weight.to(dtype), bias.to(dtype), dy


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bit for bit but for what NaN looks like."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(), b.nan_to_num())


def check_gradients(
    backward: Callable[..., Any], dy: Tensor, y: Tensor, kept: Tensor, *rest: Any
) -> None:
    """``rest``: x, weight, the activation, and the order, before which the needs belong."""
    *before, order = rest
    for needs in (ALL, (True, False, False), (False, True, True)):
        expected = backward(dy, y, *before, needs, order)
        found = backward(dy, kept, *before, needs, order)
        for a, b in zip(found, expected, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or same(a, b)
