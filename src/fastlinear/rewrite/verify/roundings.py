"""How far rounding alone moves PyTorch's own results.

A gradient whose true value is 0, of a bias before a softmax say, holds nothing but rounding. One
run of PyTorch does not show how much: the oracle may share most of it, or one number may be exact
by chance. So the model runs again with the operands of every product off by up to one rounding,
which is what a backward stable product may do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import unit_rounding
from fastlinear.core.function_mode import KnowingMode
from fastlinear.profile.observe import multiplied

RUNS = 2
"""How often the model runs with other roundings, for each draw."""
NO_BIT = 0.5
"""A relative error from which not one bit of a result is right."""


class OtherRoundings(KnowingMode):
    """While on, every product with a parameter takes operands off by up to one rounding of the
    dtype it is computed in; gradients pass through. The global generators are left alone."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.generators: dict[torch.device, torch.Generator] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls ``func``."""
        kwargs = kwargs or {}
        found = multiplied(func, args, kwargs)
        if found is None or not found[0].is_floating_point():
            return func(*args, **kwargs)
        x, device = found[0], found[0].device.type
        autocast = torch.is_autocast_enabled(device)
        rounding = unit_rounding(torch.get_autocast_dtype(device) if autocast else x.dtype)
        moved = [self._moved(a, rounding) for a in args]
        return func(*moved, **{n: self._moved(v, rounding) for n, v in kwargs.items()})

    def _moved(self, t: Any, rounding: float) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        if t.device not in self.generators:
            self.generators[t.device] = torch.Generator(t.device).manual_seed(self.seed)
        ones = torch.rand(
            t.shape, generator=self.generators[t.device], dtype=t.dtype, device=t.device
        )
        with torch.no_grad():
            step = t * ((2 * ones - 1) * rounding)
        return t + step


@dataclass(frozen=True)
class Spread:
    """What rounding alone does to PyTorch's gradients on one input.

    Attributes:
        errors: result → root mean square of the distance to the oracle, over PyTorch's own run
            and those with other roundings.
        noise: the results of which not one bit is right in those runs, all inputs together.
    """

    errors: Mapping[str, float]
    noise: frozenset[str]


def spreads(
    cases: Iterable[tuple[int, dict[str, Tensor], Iterable[dict[str, Tensor]]]], prefix: str
) -> dict[int, Spread]:
    """One Spread for each input.

    Args:
        cases: a number for the input, the oracle's results, and those of PyTorch's runs.
        prefix: how the names of the results to look at begin.
    """
    errors: dict[int, dict[str, float]] = {}
    sizes: dict[str, float] = {}
    totals: dict[str, float] = {}
    for i, exact, runs in cases:
        squares: dict[str, list[float]] = {}
        for results in runs:
            for n, t in results.items():
                if n.startswith(prefix) and n in exact and t.shape == exact[n].shape:
                    squares.setdefault(n, []).append(_square(t.double() - exact[n].double()))
        errors[i] = {n: math.sqrt(sum(s) / len(s)) for n, s in squares.items()}
        for n, error in errors[i].items():
            sizes[n] = sizes.get(n, 0.0) + _square(exact[n].double())
            totals[n] = totals.get(n, 0.0) + error**2
    noise = frozenset(n for n, total in totals.items() if total > NO_BIT**2 * sizes[n])
    return {i: Spread(found, noise) for i, found in errors.items()}


def _square(t: Tensor) -> float:
    """The sum of the squares of what is finite."""
    return float(torch.linalg.vector_norm(t.masked_fill(~torch.isfinite(t), 0.0))) ** 2
