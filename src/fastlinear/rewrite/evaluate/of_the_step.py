"""Parts and the step they belong to: times of a part as the step's, and rivals on the step."""

from __future__ import annotations

from collections.abc import Mapping

from fastlinear.core.timing import Ratio
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.work import Work

_MOST_S = 4.0

SCALED = "measured alone they took longer than the whole step and are scaled to it"


def of_the_step(
    work: Work, before_us: float, after_us: float, calls: float
) -> tuple[float, float, str]:
    """Microseconds of one call before and after, and what is to be said of them.

    A part takes no more than the step: where it did by itself, on a machine that had become slower
    meanwhile or with caches that the model finds warm, both times are scaled, so that a gain is
    the step's as well.
    """
    total, step = before_us * calls, work.profile.step_us
    if total <= step or total == 0.0:
        return before_us, after_us, ""
    scale = step / total
    return before_us * scale, after_us * scale, SCALED


def on_the_step(
    work: Work, first: Mapping[str, Candidate], second: Mapping[str, Candidate], left: int
) -> Ratio | None:
    """The whole step with the first rewrites / with the second; None where there is no time for
    it, or where a step raises, which verification will tell.

    ``left``: how many comparisons may follow.
    """
    share_s = work.budget.share(2 * left, _MOST_S)
    if share_s < measure.shortest_s(2 * work.profile.step_us):
        return None
    try:
        with work.budget:
            return measure.model_pair(
                work.model,
                SwapSet(swaps_of(second.values())),
                work.runner,
                work.own_call(),
                budget_s=share_s,
                against=SwapSet(swaps_of(first.values())),
                patience_s=work.budget.left_s,
            ).speedup
    except Exception:  # noqa: BLE001  out of memory, say
        return None
