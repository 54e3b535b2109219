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
    load, processors = load_average(), os.cpu_count() or 1
    if load is not None and load >= processors + 1:  # tuning itself fills the processors at most
        found.append(f"the machine was busy (load {load:.1f}, {processors} processors)")
    return "; ".join(found)
