"""What comes after a Linear: first what a run showed, then what the caller's code says."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch import nn

from fastlinear.profile.graph import Untraceable, Use, trace, uses_of
from fastlinear.profile.observe import Call, Observation
from fastlinear.profile.recognise import Recognised, recognise, recognise_module


@dataclass(frozen=True)
class Follower:
    """What comes after a Linear; ``code`` says whether it is one activation and nothing else."""

    code: str
    reason: str
    use: Use | None = None
    known: Recognised | None = None


def follower_of(
    module: nn.Module,
    calls: list[Call],
    seen: Observation,
    real_calls: Counter[nn.Module],
    known: dict[nn.Module, Recognised | None],
) -> Follower:
    """What follows ``module``: an activation only where run and code agree on it.

    Args:
        module: a Linear-shaped module.
        calls: its calls in the observed run.
        seen: what that run showed.
        real_calls: how often each module runs when nothing but module hooks watches.
        known: activation modules recognised so far; filled.
    """
    if getattr(module, "activation", "none") != "none":
        return Follower("already_fused", f"It already computes {module.activation} itself.")
    if not calls or not real_calls[module]:
        return Follower(
            "not_called",
            "Its forward does not run in a step: the model uses its parameters directly, takes "
            "another path, or skips it.",
        )
    callers = {c.caller for c in calls}
    caller = calls[0].caller
    if len(callers) > 1:
        return Follower("several_callers", "Several modules call it, so no one forward holds it.")
    if caller is None:
        return Follower("no_activation", "The model is this layer alone.")
    if any(len(c.uses) > 1 and any(_recognised(u, known) for u in c.uses) for c in calls):
        return Follower("several_users", _readers(calls[0].uses))
    observed = {_recognised(c.uses[0], known) if c.uses else None for c in calls}
    if observed == {None}:
        readers = sorted({u.name for c in calls for u in c.uses})
        if not readers:
            return Follower("no_activation", "The forward that calls it does not read its output.")
        return Follower("no_activation", f"Its output goes to {', '.join(readers)}.")
    if len(observed) > 1:
        return Follower("mixed_use", "Its calls are not all followed by the same activation.")
    activation = calls[0].uses[0]
    if any(c.uses[0].module is not activation.module for c in calls):
        return Follower("mixed_use", "Its calls are followed by different activation modules.")
    return _confirmed(module, caller, activation, len(calls), seen, known)


def _confirmed(
    module: nn.Module,
    caller: nn.Module,
    activation: Use,
    calls: int,
    seen: Observation,
    known: dict[nn.Module, Recognised | None],
) -> Follower:
    """The same chain in the caller's traced graph, with exactly one reader of the output."""
    what = _recognised(activation, known)
    assert what is not None
    try:
        written = uses_of(trace(caller, seen.arguments[caller]), caller, module)
    except Untraceable as error:
        return Follower(
            "untraceable",
            f"{what.name} follows in this run, but the forward of {type(caller).__name__} cannot "
            f"be traced to prove that nothing else reads the output: {error}.",
        )
    runs, rest = divmod(calls, max(1, seen.module_calls[caller]))
    if rest or len(written) != runs:
        return Follower(
            "mixed_use", f"The traced forward calls it {len(written)} times, the run {calls}."
        )
    for uses in written:
        if len(uses) != 1:
            return Follower("several_users", _readers(uses))
        if uses[0].module is not activation.module or _recognised(uses[0], known) != what:
            return Follower("mixed_use", "The traced forward and the run disagree on what follows.")
    reason = f"Followed by {what.name} and read by nothing else."
    return Follower("ok", reason, written[0][0], what)


def _recognised(use: Use, known: dict[nn.Module, Recognised | None]) -> Recognised | None:
    if use.call is None:
        return None
    if use.module is None:
        return recognise(use.call)
    if use.module not in known:
        known[use.module] = recognise_module(use.module)
    return known[use.module]


def _readers(uses: Any) -> str:
    return f"Its output has {len(uses)} readers: {', '.join(u.name for u in uses)}."
