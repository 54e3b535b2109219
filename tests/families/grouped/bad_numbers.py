"""That bad numbers of one group stay in it: what the tests of the backwards in CUDA C++ share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Given = tuple[Tensor, Tensor | None, Tensor, Tensor]


def check_backward(backward: Callable[..., Any], given: Given, activation: str, order: str) -> None:
    """Spoils x of group 1, W of 2, dy of 4 and what was saved of 6, of eight groups."""
    dy, saved, x, weight = given
    x[:, :, 1] = float("nan")
    weight[2] = float("inf")
    dy[:, :, 4] = float("nan")
    if saved is not None:
        saved[:, :, 6] = float("nan")
    dx, dw, db = backward(dy, saved, x, weight, activation, (True, True, True), order)
    assert dx is not None
    assert dw is not None
    assert db is not None
    good = [0, 3, 5, 7]
    assert dw[1].isnan().all()
    assert dx[:, :, 4].isnan().all()
    assert dx[:, :, [1, *good]].isfinite().all()
    assert dw[[2, *good]].isfinite().all()
    assert db[[1, 2, *good]].isfinite().all()
