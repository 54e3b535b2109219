"""The rule of numbers applied to what whole models return: any dtype, several draws, noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.compare import (
    DEFAULT_FACTOR,
    Verdict,
    counted,
    judge,
    relative_error,
    unit_rounding,
)
from fastlinear.rewrite.verify.roundings import NO_BIT, Spread

GRADIENTS = "grad."
STEPS = "optimizer steps: "
"""How the names begin of results that may be 0 but for rounding."""
LOSSES = ("loss", "optimizer steps: losses")
"""Results of one number or a few, in which PyTorch's own error may be 0 by luck."""
_LOSS_ROUNDINGS = 8.0  # of its dtype, forgiven in a loss: its last sums and products


def compare_all(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    exact: dict[str, Tensor],
    exact_theirs: dict[str, Tensor] | None = None,
    *,
    spread: Spread | None = None,
) -> dict[str, Verdict]:
    """One verdict for each of PyTorch's results, by name.

    Args:
        ours: results of the rewritten model.
        theirs: results of the model as it was, in the same dtypes.
        exact: the oracle's results.
        exact_theirs: the oracle for ``theirs``, where it is another one.
        spread: what rounding alone does to PyTorch's results, where that was measured.
    """
    kinds = {t.dtype for t in theirs.values() if t.is_floating_point()}
    narrow = max(map(unit_rounding, kinds), default=0.0)
    scales = {prefix: _norm(exact, prefix) for prefix in (GRADIENTS, STEPS)}
    if exact_theirs is None:
        exact_theirs = exact
    found = {}
    for n, t in theirs.items():
        scale = next((s for prefix, s in scales.items() if n.startswith(prefix)), 0.0)
        how: dict[str, Any] = {}
        if spread is not None:
            how |= {"own": spread.errors.get(n, 0.0), "noise": n in spread.noise}
        found[n] = compare(n, ours.get(n), t, exact.get(n), scale, exact_theirs.get(n), **how)
    for name in LOSSES:
        if name in found and theirs[name].is_floating_point():
            floor = loss_floor(theirs[name].dtype, narrow)
            verdict = found[name]
            found[name] = replace(verdict, limit=max(verdict.limit, floor))
    return found


def _norm(results: dict[str, Tensor], prefix: str) -> float:
    """Of all results whose names begin so, losses left out, together."""
    found = [t.double() for n, t in results.items() if n.startswith(prefix) and n not in LOSSES]
    finite = (t.masked_fill(~torch.isfinite(t), 0.0) for t in found)
    return math.hypot(*(float(torch.linalg.vector_norm(t)) for t in finite))


def loss_floor(dtype: torch.dtype, narrow: float) -> float:
    """The relative error that a loss may have whatever PyTorch's own is.

    Eight unit roundings of its dtype. Where numbers of a narrower one go into it, one rounding of
    those as well (``narrow``): they are many, and their errors hardly add up.
    """
    own = unit_rounding(dtype)
    return _LOSS_ROUNDINGS * own + (narrow if narrow > own else 0.0)


def compare(
    name: str,
    ours: Tensor | None,
    theirs: Tensor,
    exact: Tensor | None,
    scale: float,
    exact_theirs: Tensor | None = None,
    *,
    own: float = 0.0,
    noise: bool | None = None,
) -> Verdict:
    """One result against the oracle; a missing one, or one of another shape or dtype, fails.

    Integers are compared by the share of wrong elements. Numbers that are not finite must be the
    same; where no others are left, the verdict is ``unproven``.

    A gradient, or a parameter after optimizer steps, may be 0 but for rounding: a bias before a
    softmax, say. Of two correct runs not one bit is then the same, which PyTorch's own show. Such
    a result is judged against all of its kind.

    Args:
        name: what is compared; its beginning says its kind.
        ours, theirs, exact, exact_theirs: as in ``compare_all``.
        scale: the norm of all results of its kind together.
        own: PyTorch's error over runs with other roundings, as a norm, where it was measured.
        noise: whether it is 0 but for rounding; by default where PyTorch's one run says so.
    """
    if ours is None or exact is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Verdict(name, math.inf, 0.0, 0.0)
    if theirs.is_complex():
        parts = [None if t is None else torch.view_as_real(t) for t in (exact, exact_theirs)]
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
        how: dict[str, Any] = {"own": own, "noise": noise}
        return compare(name, ours, theirs, parts[0], scale, parts[1], **how)
    if not theirs.is_floating_point():
        if theirs.numel() == 0:
            return Verdict(name, 0.0 if torch.equal(ours, theirs) else math.inf, 0.0, 0.0)
        wrong, usual = ((t != exact).double().mean().item() for t in (ours, theirs))
        return Verdict(name, wrong, usual, DEFAULT_FACTOR * usual)
    wide = exact.double()
    wide_theirs = wide if exact_theirs is None else exact_theirs.double()
    norm = float(torch.linalg.vector_norm(wide))
    rounding = unit_rounding(theirs.dtype)
    error, usual = relative_error(ours, wide), relative_error(theirs, wide_theirs)
    moved = name.startswith((GRADIENTS, STEPS)) and name not in LOSSES
    if moved and scale > 0 and math.isfinite(norm) and math.isfinite(usual):
        unit = norm or 1.0  # of a relative error
        usual = max(usual, own / unit)
        if norm == 0 or (usual > NO_BIT if noise is None else noise):
            error, usual = error * unit / scale, usual * unit / scale
    if math.isinf(usual):
        return judge(name, ours, theirs, wide)
    limit = DEFAULT_FACTOR * usual + 2 * rounding
    return counted(Verdict(name, error, usual, limit), theirs, wide_theirs)


def pool(name: str, each: Sequence[Verdict], alone: bool = False) -> Verdict:
    """The verdicts of several draws as one: root mean squares of errors and limits, over those
    draws that show something.

    ``alone``: each draw's error also counts in parts of its own limit, which one draw may pass by
    chance but not many times over. So a draw on which PyTorch's roundings do much, as they do where
    a decision hangs by one, excuses no other.
    """
    every, each = each, [v for v in each if not v.unproven]
    if not each:
        return every[0]
    if len(every) == 1:
        return every[0]

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v for v in values) / len(values))

    error, limit = mean([v.error for v in each]), mean([v.limit for v in each])
    if alone and limit > 0:
        error = max(error, limit * mean([_in_limits(v) for v in each]) / _CHANCE)
    return Verdict(
        name,
        error,
        mean([v.torch_error for v in each]),
        limit,
        sum(v.numbers for v in every),
        sum(v.not_finite for v in every),
    )


_CHANCE = 8.0  # times a limit that the roundings of one draw may reach


def _in_limits(v: Verdict) -> float:
    if v.limit > 0:
        return v.error / v.limit
    return 0.0 if v.error == 0 else math.inf


_TOGETHER = ("output[", STEPS)
"""Results of which one may show nothing where another does: a mask that a model returns, a
parameter that is in no use. A gradient has to show something by itself."""


def together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, where one that shows nothing beside others that do only counts its numbers."""
    shown = [v.name for v in verdicts if not v.unproven and v.numbers > v.not_finite]
    kinds = tuple(kind for kind in _TOGETHER if any(name.startswith(kind) for name in shown))
    return [replace(v, unproven="") if v.name.startswith(kinds) else v for v in verdicts]
