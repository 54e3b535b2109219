"""What speaks against taking the winner of one tuning measurement for good."""

from __future__ import annotations

import os
from collections.abc import Mapping

from fastlinear.core.environment import load_average
from fastlinear.core.timing import Samples, paired_ratio

_WORTH_TAKING = 1.02  # a rival that much faster should have been the winner
_UNCERTAIN = 0.1  # width of the 95% interval of the winner's median, as a share of it


def rivals_of(best: str, samples: Mapping[str, Samples]) -> tuple[str, ...]:
    """Those that may be faster than the winner by more than 2% within the noise of the paired
    measurement, the one that may be fastest first."""
    own = samples[best]
    ahead = {n: paired_ratio(own, s).high for n, s in samples.items() if n != best}
    rivals = (n for n, most in ahead.items() if most > _WORTH_TAKING)
    return tuple(sorted(rivals, key=lambda n: -ahead[n]))


def doubt_of(best: str, samples: Mapping[str, Samples]) -> str:
    """Why the decision is open, in words: a rival that may be faster by more than 2% within the
    noise of the paired measurement, times of the winner that scatter, a machine that had more to
    run than it has processors. Empty where nothing speaks against it."""
    own = samples[best]
    found = []
    for rival in rivals_of(best, samples)[:1]:
        most = paired_ratio(own, samples[rival]).high
        found.append(f"within noise {rival} may be {most - 1:.0%} faster")
    low, high = own.ci95_us
    if high - low > _UNCERTAIN * own.median_us:
        found.append(f"the median of {best} lies between {low:.1f} and {high:.1f} us")
    if busy():
        found.append(f"the machine was busy ({load_in_words()})")
    return "; ".join(found)


def doubt_of_pair(before: Samples, after: Samples) -> str:
    """Why a comparison without a gain leaves open whether there is one, in words: one worth taking
    lies within its noise, on a machine that was busy or whose times scatter. Empty where nothing
    does."""
    most = paired_ratio(before, after).high
    scattered = spread_of({"before": before, "after": after}) > _UNCERTAIN
    if most <= _WORTH_TAKING or not (scattered or busy()):
        return ""
    return f"within noise it may be {most - 1:.0%} faster"


def spread_of(samples: Mapping[str, Samples]) -> float:
    """The widest 95% interval of a contender's median, as a share of that."""
    widths = ((s.ci95_us[1] - s.ci95_us[0]) / s.median_us for s in samples.values())
    return max(widths, default=0.0)


def busy() -> bool:
    """Whether the machine had more to run than it has processors."""
    load = load_average()
    return load is not None and load >= _processors() + 1  # tuning fills the processors at most


def load_in_words() -> str:
    """The load and the processors it is spread over."""
    load = load_average()
    known = "load unknown" if load is None else f"load {load:.1f}"
    return f"{known}, {_processors()} processors"


def _processors() -> int:
    return os.cpu_count() or 1
