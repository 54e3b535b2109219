"""Experiments by name; each is a module of data."""

from __future__ import annotations

from collections.abc import Callable

from fastlinear.bench.case import Case
from fastlinear.bench.cases import linear, models

EXPERIMENTS: dict[str, Callable[[str, bool], list[Case]]] = {
    "linear": linear.cases,
    "models": models.cases,
}
"""Experiment → (device type, quick) → its cases, most telling first."""
