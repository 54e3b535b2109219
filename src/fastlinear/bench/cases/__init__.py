"""Experiments by name; each is a module of data."""

from __future__ import annotations

from collections.abc import Callable

from fastlinear.bench.case import Case
from fastlinear.bench.cases import graphed, linear, linear_bias, models, overhead, strassen

EXPERIMENTS: dict[str, Callable[[str, bool], list[Case]]] = {
    "graphed": graphed.cases,
    "linear": linear.cases,
    "linear-bias": linear_bias.cases,
    "models": models.cases,
    "overhead": overhead.cases,
    "strassen": strassen.cases,
}
"""Experiment → (device type, quick) → its cases, most telling first."""
