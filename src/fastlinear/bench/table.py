"""Building the tables shipped with the package: tuning over a grid of Problems, within a budget."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fastlinear.core.device import device_facts
from fastlinear.core.environment import environment
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress, silent
from fastlinear.dispatch import tables
from fastlinear.dispatch.tune import tune
from fastlinear.ops.linear_act.backends import PIECES, problem

# What costs how much importance; the sum orders the grid, least first.
_DTYPES = {"bfloat16": 0.0, "float32": 2.0, "float16": 2.5}
_ACTIVATIONS = {"gelu_tanh": 0.0, "none": 1.0, "relu": 1.5, "gelu": 1.5, "silu": 2.0}
_LAYOUTS = {"nk": 0.0, "kn": 2.5}
_SIZES = (
    (768, 3072),
    (1024, 4096),
    (4096, 4096),
    (3072, 768),
    (4096, 1024),
    (768, 768),
    (1024, 1024),
    (4096, 14336),
    (14336, 4096),
    (256, 1024),
    (8192, 8192),
)
_TOKENS = {
    4096: 0.0,
    16384: 0.5,
    1024: 0.5,
    256: 1.0,
    64: 1.5,
    1: 1.5,
    16: 2.0,
    4: 2.5,
    65536: 2.5,
}
_HEADLINE = ((8192, 768, 3072), (8192, 1024, 4096), (8192, 4096, 4096))
_LARGEST_ELEMENTS = 1 << 30  # of one tensor: larger Problems cost more time than they teach

# Options a piece does not read: one measurement serves all their values.
_UNREAD = {"grad_input": ("activation", "bias", "x"), "grad_weight": ("activation", "bias", "w")}


def table_problems(device: str = "cuda") -> list[Problem]:
    """The grid of linear_act, most important first, all pieces of each call next to each other."""
    weighted: list[tuple[float, int, Problem]] = []
    for dtype, a in _DTYPES.items():
        for activation, b in _ACTIVATIONS.items():
            for layout, c in _LAYOUTS.items():
                base = a + b + c
                for m, k, n in _HEADLINE:
                    weighted += _pieces(base - 1.0, (m, k, n), dtype, device, activation, layout)
                for i, (k, n) in enumerate(_SIZES):
                    for m, d in _TOKENS.items():
                        if max(m * k, m * n) <= _LARGEST_ELEMENTS:
                            cost = base + 0.4 * i + d
                            weighted += _pieces(cost, (m, k, n), dtype, device, activation, layout)
    weighted.sort(key=lambda item: item[:2])
    return list(dict.fromkeys(p for _, _, p in weighted))


def _pieces(
    cost: float,
    sizes: tuple[int, int, int],
    dtype: str,
    device: str,
    activation: str,
    layout: str,
) -> list[tuple[float, int, Problem]]:
    """One call's Problems: the forward for inference, and every piece of a training step."""
    forward = problem(
        "forward",
        *sizes,
        dtype=dtype,
        device=device,
        activation=activation,
        w_layout=layout,
        precision=matmul_precision(FLOAT_DTYPES[dtype]),
    )
    training = replace(forward, needs_grad=True)
    calls = (forward, *(training.with_piece(s) for s in PIECES))
    return [(cost, place, p) for place, p in enumerate(calls)]


def build_table(
    problems: Sequence[Problem],
    device: torch.device | str = "cuda",
    metric: str | None = None,
    *,
    budget_s: float = 120.0,
    rounds: int = 9,
    extend: Mapping[str, Any] | None = None,
    progress: Progress = silent,
) -> dict[str, Any]:
    """Tune every Problem in order until the budget is spent; returns a shipped table's JSON.

    Args:
        problems: what to measure, most important first, for example ``table_problems()``.
        device: where to measure.
        metric: ``"device"`` on CUDA and ``"wall"`` on a CPU unless given.
        budget_s: start no further Problem after this many seconds.
        rounds: interleaved rounds of each measurement.
        extend: an earlier table of the same device and torch version; its rows are kept and not
            measured again.
        progress: told about every Problem.

    Returns:
        ``{"format", "device", "torch", "created", "environment", "metric", "rows", "failures",
        "left"}``: a row is ``{"problem", "best", "times_us"}``, ``failures`` are the Problems
        that raised with the reason, ``left`` is how many the budget did not reach.
    """
    where = torch.device(device)
    metric = metric or ("device" if where.type == "cuda" else "wall")
    rows: list[dict[str, Any]] = []
    if extend is not None and extend.get("torch") == str(torch.__version__):
        rows = list(extend["rows"])
    done = {Problem.from_json(row["problem"]) for row in rows}
    failures: list[dict[str, Any]] = []
    waiting = [p for p in problems if p not in done]
    twins: dict[Problem, list[Problem]] = {}
    for p in waiting:
        twins.setdefault(_computation(p), []).append(p)
    start = time.monotonic()
    left = 0
    for i, p in enumerate(waiting):
        if p in done:
            continue
        if time.monotonic() - start > budget_s:
            left = sum(q not in done for q in waiting[i:])
            break
        progress(p.describe(), i, len(waiting))
        try:
            found = tune(p, device=where, metric=metric, rounds=rounds, budget_s=0.5, save=False)
        except Exception as error:  # noqa: BLE001 - recorded; one broken Problem must not end all
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            failures.append({"problem": p.to_json(), "reason": reason})
            continue
        times = {name: round(s.median_us, 3) for name, s in found.samples.items()}
        for twin in twins[_computation(p)]:
            done.add(twin)
            rows.append({"problem": twin.to_json(), "best": found.best, "times_us": times})
    progress("done", len(waiting), len(waiting))
    return {
        "format": 1,
        "device": device_facts(where).slug,
        "torch": str(torch.__version__),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(where),
        "metric": metric,
        "rows": rows,
        "failures": failures,
        "left": left,
    }


def _computation(p: Problem) -> Problem:
    """The Problem without what its piece does not read."""
    unread = _UNREAD.get(p.piece, ())
    return replace(p, options=tuple(o for o in p.options if o[0] not in unread))


def read_table(path: str | Path) -> dict[str, Any] | None:
    """An existing table, or None."""
    path = Path(path)
    return dict(json.loads(path.read_text())) if path.exists() else None


def table_path(device: torch.device | str) -> Path:
    """Where the shipped table of a device lives in the source tree."""
    return Path(tables.__file__).parent / f"{device_facts(device).slug}.json"


def write_table(data: Mapping[str, Any], path: str | Path) -> Path:
    """Write a table, one row a line, so that changes read well."""
    head = {k: v for k, v in data.items() if k != "rows"}
    lines = ",\n".join(json.dumps(row) for row in data["rows"])
    text = json.dumps(head, indent=1)[:-2] + f',\n "rows": [\n{lines}\n ]\n}}\n'
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path
