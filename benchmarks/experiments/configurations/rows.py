"""Rows of configurations that were timed, and the numbers that explain them.

A row has a problem's sizes and options, a configuration's fields, and what a call took.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from benchmarks.experiments.configurations.kind import Kind, Problem
from benchmarks.harness.rows import opened

MEASURED = ("config", "us", "why", "sets", "chosen", "registers", "spills", "shared")
"""Fields of a row besides its problem's."""
_FOLDS = 4
_FAR = 0.15  # of a logarithm
_LEAST_SHARE = 1e-3  # of the time: less is nothing
_FEWEST = 4  # configurations of a problem that say which is best


class Timed(NamedTuple):
    """One configuration of a problem, what a call took, and whether it is what calls take."""

    problem: Problem
    config: Any
    us: float
    chosen: bool


def read(kind: Kind, *paths: Path) -> dict[str, list[Timed]]:
    """Group of problems → their rows, but for those that did not run."""
    found = defaultdict(list)
    for path in paths:
        with opened(path, "r") as file:
            for row in map(json.loads, file):
                if row["us"]:
                    problem = {name: v for name, v in row.items() if name not in MEASURED}
                    config = kind.config(problem, row["config"])
                    if not (kind.serves(problem, config) or row.get("chosen")):
                        continue
                    timed = Timed(problem, config, row["us"], row.get("chosen", False))
                    found[kind.group(problem)].append(timed)
    return found


def told(problem: Problem) -> str:
    """A problem in one string."""
    return " ".join(map(str, problem.values()))


def fitted(terms: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Microseconds of each term, none negative: the least errors of their sums' logarithms, of
    which far ones count less."""
    from scipy.optimize import least_squares, nnls

    first = nnls(terms / us[:, None], np.ones(len(us)))[0]
    least = _LEAST_SHARE * np.median(us) / terms.max(0).clip(1e-12)
    begin = np.log(np.maximum(first, least))

    def errors(logs: np.ndarray) -> np.ndarray:
        return np.log(terms @ np.exp(logs)) - np.log(us)

    def slopes(logs: np.ndarray) -> np.ndarray:
        parts = terms * np.exp(logs)
        return parts / parts.sum(1, keepdims=True)

    best = least_squares(errors, begin, jac=slopes, loss="soft_l1", f_scale=_FAR, max_nfev=100).x
    found: np.ndarray = np.exp(best)
    shares = terms * found / us[:, None]
    return np.where(shares.max(0) < _LEAST_SHARE, 0.0, found)


def regrets(rows: Sequence[Timed], predicted: np.ndarray) -> np.ndarray:
    """Of each problem, the time of the configuration that is predicted best over the best."""
    us = np.array([row.us for row in rows])
    groups = _by_problem(rows)
    return np.array([us[g[predicted[g].argmin()]] / us[g].min() for g in groups])


def regrets_of_chosen(rows: Sequence[Timed]) -> np.ndarray:
    """Of each problem that has them, the time of what calls take over the best."""
    groups = ([rows[i] for i in g] for g in _by_problem(rows))
    return np.array(
        [
            next(row.us for row in group if row.chosen) / min(row.us for row in group)
            for group in groups
            if any(row.chosen for row in group)
        ]
    )


def _by_problem(rows: Sequence[Timed]) -> list[np.ndarray]:
    found = defaultdict(list)
    for index, row in enumerate(rows):
        found[told(row.problem)].append(index)
    return [np.array(g) for g in found.values() if len(g) >= _FEWEST]


def mean(ratios: Iterable[float]) -> float:
    """Their geometric mean."""
    return float(np.exp(np.log(np.array(ratios)).mean()))


def report(kind: Kind, rows: Sequence[Timed]) -> str:
    """Regrets on problems left out of the fit and of what was chosen; then the fit to all."""
    us = np.array([row.us for row in rows])
    terms = np.array([kind.terms(row.problem, row.config) for row in rows])
    part = np.array([crc32(told(row.problem).encode()) % _FOLDS for row in rows])
    held_out = np.zeros(len(us))
    for fold in range(_FOLDS):
        out = part == fold
        held_out[out] = terms[out] @ fitted(terms[~out], us[~out])
    found, chosen = regrets(rows, held_out), regrets_of_chosen(rows)
    error = np.median(np.abs(np.log(held_out / us)))
    said = [f"{len(rows)} rows, {len(found)} problems"]
    said.append(f"regret {mean(found):.3f} on problems left out, at worst {found.max():.2f}")
    said.append(f"median error {error:.3f}")
    if len(chosen):
        said.append(f"regret of what was chosen {mean(chosen):.3f}, at worst {chosen.max():.2f}")
    return "; ".join(said) + "\n" + ", ".join(f"{v:.4g}" for v in fitted(terms, us))
