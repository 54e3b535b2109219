"""What became of a model's linears, in the words of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.suite.callers import UNTRACED_CODES
from fastlinear.rewrite import Result

KEPT, UNTRACED = "kept", "cannot be traced"
_WHOLE = frozenset({"graphed", "compiled"})  # rules about the model, not about a linear
_SLOWER = frozenset({"slower", "slower_model", "not_faster"})
_LONGEST = 300


def label(status: str, code: str) -> str:
    """An outcome in a few words: its status, with the code where that says more."""
    if status == KEPT:
        return KEPT
    if code in UNTRACED_CODES:
        return UNTRACED
    if code in _SLOWER:
        return "slower"
    if status in ("rejected", "refused"):
        return code.replace("_", " ")
    return status.replace("_", " ")


def sites_of(result: Result) -> list[dict[str, Any]]:
    """Every linear with its outcome, as JSON: flops of one forward, gain predicted and measured."""
    seen = {s.fqn: 2.0 * s.rows * s.in_features * s.out_features for s in result.profile.sites}
    found = []
    for site in result.sites:
        if site.rule in _WHOLE:
            continue
        timed = site.before_us is not None and site.after_us is not None
        found.append(
            {
                "fqn": site.fqn,
                "rule": site.rule,
                "outcome": label(site.status, site.code),
                "status": site.status,
                "code": site.code,
                "reason": site.reason[:_LONGEST],
                "backend": site.backend,
                "flops": seen.get(site.fqn, 0.0),
                "predicted_us": site.predicted_gain_us,
                "measured_us": (site.before_us or 0.0) - (site.after_us or 0.0) if timed else None,
            }
        )
    return found


def whole_of(results: Sequence[Result]) -> list[dict[str, str]]:
    """What became of the model, and of its parts, compiled and as CUDA graphs."""
    return [
        {"fqn": s.fqn, "rule": s.rule, "outcome": label(s.status, s.code), "reason": s.reason}
        for result in results
        for s in result.sites
        if s.rule in _WHOLE
    ]


def counts(sites: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Outcome → how many linears, the most frequent first."""
    return dict(Counter(site["outcome"] for site in sites).most_common())


def flops_of(sites: Sequence[Mapping[str, Any]], result: Result) -> dict[str, float]:
    """Flops of one forward: of all linears, of those kept, of those that cannot be traced, and of
    products by parameters that are no linear's."""
    return {
        "linear": sum(s["flops"] for s in sites),
        "kept": sum(s["flops"] for s in sites if s["outcome"] == KEPT),
        "untraced": sum(s["flops"] for s in sites if s["outcome"] == UNTRACED),
        "not_followed": sum(one.flops for one in result.not_followed),
    }


def reasons(sites: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Why linears cannot be traced, the most flops first."""
    found: dict[str, dict[str, Any]] = {}
    for site in sites:
        if site["outcome"] == UNTRACED:
            one = found.setdefault(
                site["reason"], {"reason": site["reason"], "sites": 0, "flops": 0.0}
            )
            one["sites"] += 1
            one["flops"] += site["flops"]
    return sorted(found.values(), key=lambda one: -one["flops"])


def calibration(sites: Iterable[Mapping[str, Any]]) -> list[float]:
    """Predicted gain over measured gain of every kept linear of which both are above 0."""
    return [
        site["predicted_us"] / site["measured_us"]
        for site in sites
        if site["outcome"] == KEPT
        and (site["predicted_us"] or 0.0) > 0.0
        and (site["measured_us"] or 0.0) > 0.0
    ]
