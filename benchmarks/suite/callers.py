"""Which forwards that call linears can be traced, whatever became of the linears."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastlinear.core.progress import silent
from fastlinear.profile.capture import capture
from fastlinear.profile.state import preserved
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import fusable

UNTRACED_CODES = frozenset({"untraceable", "gradients"})
_LONGEST = 300


def untraced(model: nn.Module, inputs: Any, mode: str) -> list[dict[str, Any]]:
    """Why forwards that call linears cannot be traced: a dict a reason, the most flops first.

    Rules that join linears with what lies around them need the trace; a linear alone does not.

    Args:
        model: run once, and left as it was.
        inputs: as ``optimize_`` takes them.
        mode: ``"inference"`` or ``"train"``.

    Returns:
        Dicts of ``reason``, ``modules`` (classes of the callers), ``sites`` (how many linears) and
        ``flops`` (of these in one forward).
    """
    profile, seen = capture(
        model, inputs, mode, loss_fn=None, steps=1, progress=silent, samples=True
    )
    known: dict[str, str | None] = {}
    found: dict[str, dict[str, Any]] = {}
    with preserved(model, mode):
        for site in profile.sites:
            if site.parent_fqn is None:
                continue
            if site.parent_fqn not in known:
                parent = model.get_submodule(site.parent_fqn)
                traced = fusable(parent, seen.arguments[parent], {}, sequential=True)
                refused = isinstance(traced, Refusal) and traced.code in UNTRACED_CODES
                known[site.parent_fqn] = traced.reason if refused else None  # type: ignore[union-attr]
            reason = known[site.parent_fqn]
            if reason is None:
                continue
            first = {"reason": reason[:_LONGEST], "modules": [], "sites": 0, "flops": 0.0}
            one = found.setdefault(reason, first)
            name = type(model.get_submodule(site.parent_fqn)).__name__
            one["modules"] += [] if name in one["modules"] else [name]
            one["sites"] += 1
            one["flops"] += 2.0 * site.rows * site.in_features * site.out_features
    return sorted(found.values(), key=lambda one: -one["flops"])
