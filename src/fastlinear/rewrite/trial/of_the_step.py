"""Times of a part, measured by itself, as a part of the step they belong to."""

from __future__ import annotations

from fastlinear.rewrite.work import Work

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
