"""What a rewrite rule sees of an optimization under way."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import nn

from fastlinear.profile.records import LinearSite
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.sites import activations_of, inside


@dataclass(frozen=True)
class Session:
    """What a rewrite rule sees of an optimization under way.

    Attributes:
        model: the model, unchanged.
        train: whether steps have a backward.
        candidates: the linears that may be rewritten, by name; a rule takes none but these.
        sites: what the profile says about each linear.
        offers: name of a module → the trace of its forward, or why there is none.
        step: runs the model once; its argument says why, in the error of a model that raises.
    """

    model: nn.Module
    train: bool
    candidates: Mapping[str, Candidate]
    sites: Mapping[str, LinearSite]
    offers: Callable[[str], Fusable | Refusal]
    step: Callable[[str], None]

    def trace(self, fqn: str) -> Fusable | None:
        """The trace of a module's forward, Sequentials included, with its activations known; None
        where there is none."""
        found = self.offers(fqn)
        if isinstance(found, Refusal):
            return None
        known = activations_of(self.sites.values())
        names = {name: a for f, a in known.items() if (name := inside(fqn, f)) is not None}
        return found.flat({}, {**names, **found.modules})
