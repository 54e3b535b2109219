"""What every rule reads from the names and sites of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import nn

from fastlinear.profile.effects import class_forward
from fastlinear.profile.recognise import recognise_module
from fastlinear.profile.records import LinearSite
from fastlinear.rewrite.match.eligible import refuse_module

FilterFn = Callable[[nn.Module, str], bool]


def activations_of(sites: Iterable[LinearSite]) -> dict[str, str]:
    """Activation modules that follow a linear: fully qualified name → activation name."""
    return {
        s.activation_fqn: s.activation
        for s in sites
        if s.how == "modules" and s.activation is not None and s.activation_fqn is not None
    }


def inside(parent_fqn: str, fqn: str) -> str | None:
    """``fqn`` as named inside its parent; None when it lies elsewhere."""
    if parent_fqn == "":
        return fqn
    return fqn[len(parent_fqn) + 1 :] if fqn.startswith(parent_fqn + ".") else None


def activation_of_module(module: nn.Module) -> str | None:
    """The activation that a module of a class of torch or transformers computes, or None."""
    home = getattr(class_forward(module), "__module__", "")
    if not home.startswith(("torch.nn.", "transformers.activations")):
        return None
    found = recognise_module(module) if refuse_module(module) is None else None
    return None if found is None else found.name
