"""Backends of ragged groups beside PyTorch's own operations and float64, for several tests."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.families.grouped.ragged import products
from tests.families.planes_places import values

ALL = (True, True, True)


def drawn(
    rows: int, groups: int, k: int, n: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, weight, bias and dy."""
    weight = values(groups, n, k, seed=2) * k**-0.5
    given = values(rows, k), weight, values(groups, n, seed=3), values(rows, n, seed=1)
    x, weight, bias, dy = (t.to(dtype) for t in given)
    return x, weight, bias, dy


def check(
    backend: ModuleType,
    given: tuple[Tensor | None, ...],
    sizes: list[int],
    activation: str,
    needs: Any = ALL,
    counted: Tensor | None = None,
) -> None:
    """Forward and backward of a backend; x, weight, bias and dy, and the sizes of groups."""
    x, weight, bias, dy = given
    assert x is not None
    keeps, of_device = ACTIVATIONS[activation].saved, counted
    if of_device is None:
        of_device = torch.tensor(sizes, dtype=torch.int32)
    results: list[list[Tensor | None]] = []
    for dtype in (x.dtype, torch.float64):
        a, w, b, d = (None if t is None else t.to(dtype) for t in given)
        y, pre = products.forward(a, w, sizes, b, activation, True)  # type: ignore[arg-type]
        saved = {"none": None, "output": y, "pre": pre}[keeps]
        found = products.gradients(d, saved, a, w, sizes, activation, needs)  # type: ignore[arg-type]
        results.append([y, *found])
    y, pre, _ = backend.forward(x, weight, of_device, bias, activation, True)
    kept = {"none": None, "output": y, "pre": pre}[keeps]
    ours = [y, *backend.backward(dy, kept, x, weight, of_device, activation, needs)]
    for own, theirs, oracle in zip(ours, *results, strict=True):
        assert (own is None) == (theirs is None)
        if own is not None:
            verdict = judge("ragged", own, theirs, oracle)
            assert verdict.passed, str(verdict)
    total = sum(sizes)
    assert not ours[0][total:].any()
    assert ours[1] is None or not ours[1][total:].any()
    for g, size in enumerate(sizes):
        assert size or ours[2] is None or not ours[2][g].any()
        assert size or ours[3] is None or not ours[3][g].any()


def check_neighbours(
    backend: ModuleType,
    given: tuple[Tensor, ...],
    sizes: list[int],
    which: int,
    value: float,
) -> None:
    """A number of the second of three groups that is not finite, of x (0), its weight (1) or dy
    (3), or with ``which`` negative of rows of no group: others have the bits of before."""
    counted, second = torch.tensor(sizes), slice(sizes[0], sizes[0] + sizes[1])
    clean, rest = list(given), len(given[0]) - sum(sizes)
    given = tuple(t.clone() for t in clean)
    if which < 0:
        given[0][sum(sizes) :], given[3][sum(sizes) :] = value, value
    else:
        (given[which][1] if which == 1 else given[which][second])[5, 7] = value

    def results(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> list[Tensor]:
        y = backend.forward(x, weight, counted, bias, "none", False)[0]
        dx, dw, _ = backend.backward(dy, None, x, weight, counted, "none", ALL)
        return [*y.split([*sizes, rest]), *dx.split([*sizes, rest]), *dw]

    found, before = results(*given), results(*clean)
    x, weight, bias, dy = (t.double() for t in given)
    y = products.forward(x, weight, sizes, bias, "none", False)[0]
    dx, dw, _ = products.gradients(dy, None, x, weight, sizes, "none", ALL)
    assert dx is not None
    assert dw is not None
    right = [*y.split([*sizes, rest]), *dx.split([*sizes, rest]), *dw]
    kind = given[0].dtype
    for i, (ours, without, oracle) in enumerate(zip(found, before, right, strict=True)):
        if which < 0 or i not in (1, 5, 9):
            assert torch.equal(ours, without)
        assert torch.equal(ours.isnan(), oracle.to(kind).isnan())
        assert torch.equal(ours.isfinite(), oracle.to(kind).isfinite())
