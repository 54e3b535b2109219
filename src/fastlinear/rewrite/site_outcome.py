"""What became of one linear of a model, as plain data."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

STATUSES = ("kept", "rejected", "refused", "undecided", "nothing_to_do")


@dataclass(frozen=True)
class SiteOutcome:
    """What became of one linear, of a grouped layer, of the model or a part of it as CUDA graphs,
    or of the model compiled.

    Attributes:
        fqn: its fully qualified name, of a linear written on parameters its weight's; ``""`` for
            the model as a whole.
        rule: the family that looked at it, ``"graphed"`` or ``"compiled"``.
        activation: what is, or would have been, fused; None when it was not looked at.
        problem: its Problem as JSON, or None.
        status: ``"kept"``, ``"rejected"`` (slower or less accurate), ``"refused"`` (must not be
            touched), ``"undecided"`` (a disturbed measurement, or none, leaves open whether a
            rewrite would help) or ``"nothing_to_do"``.
        code: the reason as one word.
        reason: the reason as one sentence.
        predicted_gain_us: expected gain per step, before measuring the site.
        before_us, after_us: measured time of this site per step (its calls in one step together);
            of linears that are one call, an equal share of the call's each, as is what is
            predicted; of rules ``"graphed"`` and ``"compiled"`` the whole step without and with it.
        speedup: median paired before / after.
        ci95: 95% interval of the speed-up.
        backends: piece → backend chosen.
        route: how it is rewritten, see ``plan.Rewrite``.
        calls: calls per step.
        part_of: the first linear of the call that computes this one as well; None where this is
            the first, or a call of its own.
    """

    fqn: str
    rule: str
    activation: str | None
    problem: dict[str, Any] | None
    status: str
    code: str
    reason: str
    predicted_gain_us: float | None = None
    before_us: float | None = None
    after_us: float | None = None
    speedup: float | None = None
    ci95: tuple[float, float] | None = None
    backends: dict[str, str] = field(default_factory=dict)
    route: str | None = None
    calls: int = 0
    part_of: str | None = None

    @property
    def backend(self) -> str | None:
        """The backend of its forward, or of the whole step where that is chosen as one."""
        return self.backends.get("forward") or self.backends.get("step")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready dict."""
        data = asdict(self)
        data["ci95"] = None if self.ci95 is None else list(self.ci95)
        return data
