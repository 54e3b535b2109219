"""Gains that are part of another finding's: each is claimed once."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from fastlinear.profile.records import Finding

_INSIDE = ("linear_activation", "grouped_linear")  # what one call of more computes as well


def covered(
    findings: Iterable[Finding], linears: Collection[str], by: Finding
) -> tuple[Finding, ...]:
    """``findings``, of which those on nothing but these linears claim no gain of their own.

    Args:
        findings: what is known of the model.
        linears: those that one call computes, by their names in the model.
        by: the finding of that call.
    """
    return tuple(_part(f, by) if _within(f, set(linears)) else f for f in findings)


def _within(f: Finding, linears: set[str]) -> bool:
    if f.code not in _INSIDE or f.part_of is not None:
        return False
    return set(f.details.get("linears", [f.fqn])) <= linears


def _part(f: Finding, by: Finding) -> Finding:
    text = f"Part of the {by.title}, in {by.fqn or 'the model'}: its gain is counted there."
    details = {k: v for k, v in f.details.items() if k != "advice"} | {"part_of": by.fqn}
    return replace(f, predicted_gain_us=0.0, message=f"{f.message} {text}", details=details)
