"""The rule of numbers applied to what whole models return: any dtype, several draws, noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

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

_NOISE_FLOOR = 64.0  # a gradient below this many roundings of all gradients together may be noise
_NOISE_ERROR = 0.5  # and is, where PyTorch itself gets half of it wrong
LOSSES = ("loss", "optimizer steps: losses")
"""Results of one number or a few, in which PyTorch's own error may be 0 by luck."""
_LOSS_ROUNDINGS = 8.0  # of its dtype, forgiven in a loss: its last sums and products


def compare_all(
    ours: dict[str, Tensor],
    theirs: dict[str, Tensor],
    exact: dict[str, Tensor],
    exact_theirs: dict[str, Tensor] | None = None,
    *,
    factor: float = DEFAULT_FACTOR,
) -> dict[str, Verdict]:
    """One verdict for each of PyTorch's results, by name.

    Args:
        ours: results of the rewritten model.
        theirs: results of the model as it was, in the same dtypes.
        exact: the oracle's results.
        exact_theirs: the oracle for ``theirs``, where it is another one.
        factor: how many times PyTorch's error is allowed.
    """
    kinds = {t.dtype for t in theirs.values() if t.is_floating_point()}
    narrow = max(map(unit_rounding, kinds), default=0.0)
    grads = [o for n, o in exact.items() if n.startswith("grad.")]
    scale = math.hypot(*(float(torch.linalg.vector_norm(_finite(g.double()))) for g in grads))
    if exact_theirs is None:
        exact_theirs = exact
    found = {
        n: compare(n, ours.get(n), t, exact.get(n), scale, exact_theirs.get(n), factor=factor)
        for n, t in theirs.items()
    }
    for name in LOSSES:
        if name in found and theirs[name].is_floating_point():
            floor = loss_floor(theirs[name].dtype, narrow)
            verdict = found[name]
            found[name] = replace(verdict, limit=max(verdict.limit, floor))
    return found


def _finite(t: Tensor) -> Tensor:
    return t.masked_fill(~torch.isfinite(t), 0.0)


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
    factor: float = DEFAULT_FACTOR,
) -> Verdict:
    """One result against the oracle; a missing one, or one of another shape or dtype, fails.

    Integers are compared by the share of wrong elements. Numbers that are not finite must be the
    same; where no others are left, the verdict is ``unproven``. ``scale`` is the norm of all
    gradients together: a gradient that is 0 but for rounding is judged against that.
    """
    if ours is None or exact is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return Verdict(name, math.inf, 0.0, 0.0)
    if theirs.is_complex():
        parts = [None if t is None else torch.view_as_real(t) for t in (exact, exact_theirs)]
        ours, theirs = torch.view_as_real(ours), torch.view_as_real(theirs)
        return compare(name, ours, theirs, parts[0], scale, parts[1], factor=factor)
    if not theirs.is_floating_point():
        if theirs.numel() == 0:
            return Verdict(name, 0.0 if torch.equal(ours, theirs) else math.inf, 0.0, 0.0)
        wrong, usual = ((t != exact).double().mean().item() for t in (ours, theirs))
        return Verdict(name, wrong, usual, factor * usual)
    wide = exact.double()
    wide_theirs = wide if exact_theirs is None else exact_theirs.double()
    norm = float(torch.linalg.vector_norm(wide))
    rounding = unit_rounding(theirs.dtype)
    error, usual = relative_error(ours, wide), relative_error(theirs, wide_theirs)
    noise = norm <= _NOISE_FLOOR * rounding * scale and (norm == 0 or usual > _NOISE_ERROR)
    if name.startswith("grad.") and noise:
        # Zero but for rounding (a bias before a softmax, say): judged against all gradients.
        errors = [
            float(torch.linalg.vector_norm(t.double() - w)) / scale if scale else 0.0
            for t, w in ((ours, wide), (theirs, wide_theirs))
        ]
        return Verdict(name, errors[0], errors[1], factor * errors[1] + 2 * rounding)
    if math.isinf(usual):
        return judge(name, ours, theirs, wide, factor=factor)
    return counted(Verdict(name, error, usual, factor * usual + 2 * rounding), theirs, wide_theirs)


def pool(name: str, each: Sequence[Verdict]) -> Verdict:
    """The verdicts of several draws as one: root mean squares of errors and limits, over those
    draws that show something."""
    every, each = each, [v for v in each if not v.unproven]
    if not each:
        return every[0]
    if len(every) == 1:
        return every[0]

    def mean(values: list[float]) -> float:
        return math.sqrt(sum(v * v for v in values) / len(values))

    return Verdict(
        name,
        mean([v.error for v in each]),
        mean([v.torch_error for v in each]),
        mean([v.limit for v in each]),
        sum(v.numbers for v in every),
        sum(v.not_finite for v in every),
    )


_TOGETHER = ("output[", "optimizer steps: ")
"""Results of which one may show nothing where another does: a mask that a model returns, a
parameter that is in no use. A gradient has to show something by itself."""


def together(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts, where one that shows nothing beside others that do only counts its numbers."""
    shown = [v.name for v in verdicts if not v.unproven and v.numbers > v.not_finite]
    kinds = tuple(kind for kind in _TOGETHER if any(name.startswith(kind) for name in shown))
    return [replace(v, unproven="") if v.name.startswith(kinds) else v for v in verdicts]
