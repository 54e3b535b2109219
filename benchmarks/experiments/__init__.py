"""Experiments by name; each is a module of data."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.experiments import (
    gated_mlp,
    graphed,
    groups,
    linear,
    linear_bias,
    linear_modules,
    mlps,
    models,
    overhead,
    pseudo_linear,
    ragged,
    unequal,
)
from benchmarks.harness.case import Case

EXPERIMENTS: dict[str, Callable[[str, bool], list[Case]]] = {
    "gated-mlp": gated_mlp.cases,
    "graphed": graphed.cases,
    "groups": groups.cases,
    "linear": linear.cases,
    "linear-bias": linear_bias.cases,
    "linear-modules": linear_modules.cases,
    "mlps": mlps.cases,
    "models": models.cases,
    "overhead": overhead.cases,
    "pseudo-linear": pseudo_linear.cases,
    "ragged": ragged.cases,
    "unequal": unequal.cases,
}
"""Experiment → (device type, quick) → its cases, most telling first."""
