"""What a rewrite rule sees of an optimization under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import nn

from fastlinear.core.timing import Ratio
from fastlinear.profile.graph import Observed
from fastlinear.profile.records import LinearSite, Record
from fastlinear.rewrite.finding import Told
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.sites import FilterFn, activations_of, inside
from fastlinear.rewrite.site_outcome import SiteOutcome

T = TypeVar("T")


@dataclass(frozen=True)
class Times:
    """What one call of a fusion takes: of the model's own ops, and as one call.

    Attributes:
        before_us, after_us: in microseconds; no more than its share of the step.
        speedup: how much faster that is.
        said: what is to be said of the times, or nothing.
    """

    before_us: float
    after_us: float
    speedup: Ratio
    said: str = ""

    @property
    def faster(self) -> bool:
        """Whether that is beyond noise."""
        return self.speedup.low > 1.0


@dataclass(eq=False, kw_only=True)
class Session:
    """What a rewrite rule sees of an optimization under way.

    Attributes:
        model: the model, unchanged.
        train: whether steps have a backward.
        device: where it runs.
        sites: what the profile says about each linear.
        records: what it says about each module's time.
        arguments: module → what its first call was given, tensors left out.
        backends: family → the backend that settings force.
        filter_fn: the caller's say on every module; False leaves it alone.
        offers: name of a module → the trace of its forward, or why there is none.
        step: runs the model once; its argument says why, in the error of a model that raises.
        forward: the same without a backward.
        times: measures a fusion for a finding, or knows the times that decided about it. Its second
            argument says how many may follow. Gives why not where there is no time.
        finding: what is said of a fusion, by such times; None where nothing is to be gained.
        candidates: the linears that may be rewritten, by name; a rule takes none but these.
        found: what the rules before this one have found.
        left_alone: filled with why linears are part of no fusion, by the first of them.
        outcomes: what becomes of each linear, once that is decided.
        offered: linears that ``optimize_`` would try as part of a fusion, where it only advises.
    """

    model: nn.Module
    train: bool
    device: torch.device
    sites: Mapping[str, LinearSite]
    records: tuple[Record, ...]
    arguments: Mapping[nn.Module, Observed]
    backends: Mapping[str, str]
    filter_fn: FilterFn | None
    offers: Callable[[str], Fusable | Refusal]
    step: Callable[[str], None]
    forward: Callable[[str], None]
    times: Callable[[Fusion, int], Times | str]
    finding: Callable[[Fusion, int], Told | None]
    candidates: Mapping[str, Candidate]
    left_alone: dict[str, str]
    outcomes: Mapping[str, SiteOutcome]
    found: list[Fusion] = field(default_factory=list)
    offered: frozenset[str] = frozenset()
    _known: dict[Any, Any] = field(default_factory=dict)

    def once(self, look: Callable[[Session], T]) -> T:
        """``look(self)``, the first time it is asked for; a rule keeps there what it has found."""
        if look not in self._known:
            self._known[look] = look(self)
        known: T = self._known[look]
        return known

    def trace(self, fqn: str) -> Fusable | None:
        """The trace of a module's forward, Sequentials included, with its activations known; None
        where there is none."""
        found = self.offers(fqn)
        if isinstance(found, Refusal):
            return None
        known = activations_of(self.sites.values())
        names = {name: a for f, a in known.items() if (name := inside(fqn, f)) is not None}
        return found.flat({}, {**names, **found.modules})

    def why_not(self, name: str, *callers: str) -> str | None:
        """Why a linear is no part of a call that one of these modules makes: it is no candidate,
        or others call it as well. None where it may be."""
        if name not in self.candidates:
            return f"its linear {name!r} is left alone itself"
        if self.sites[name].parent_fqn not in callers:
            return f"its linear {name!r} is called by another module as well"
        return None

    def taken(self) -> set[str]:
        """The linears of what was found before, but for what gives way."""
        return {name for fusion in self.found if fusion.competes for name in fusion.names}

    def kept(self, name: str, rules: tuple[str, ...]) -> SiteOutcome | None:
        """The outcome of a linear that is rewritten by one of these rules; else None."""
        found = self.outcomes.get(name)
        known = found is not None and found.status == "kept" and found.rule in rules
        return found if known else None
