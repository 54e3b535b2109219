"""Building the tables shipped with the package: tuning over a grid of Problems, within a budget."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

import torch

from fastlinear.core.device import device_facts
from fastlinear.core.environment import environment
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress, silent
from fastlinear.dispatch import cache, tables
from fastlinear.dispatch.backend import families, family
from fastlinear.dispatch.tune import tune
from fastlinear.ops.linear_act.backends import STEP, problem
from fastlinear.ops.linear_act.selection import tuning_order
from fastlinear.ops.mlp import problem as mlp
from fastlinear.ops.mlp.selection import tuning_order as chain_order

# What costs how much importance; the sum orders the grid, least first.
_DTYPES = {"bfloat16": 0.0, "float32": 1.5, "float16": 2.5}
_ACTIVATIONS = {"gelu_tanh": 0.0, "none": 1.0, "relu": 1.5, "gelu": 3.0, "silu": 3.5}
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
    256: 0.75,
    64: 0.75,
    1: 1.0,
    16: 1.25,
    4: 2.0,
    65536: 2.5,
}
# The layers whose rows are published; their dtypes and activations count less.
_PUBLISHED = (
    (8192, 768, 3072),
    (8192, 1024, 4096),
    (8192, 4096, 4096),
    (64, 1024, 1024),
    (1, 4096, 4096),
)
_PUBLISHED_SHARE = 0.25
_LARGEST_ELEMENTS = 1 << 30  # of one tensor: larger Problems cost more time than they teach
_LARGEST_CHAIN = 1 << 24  # rows times width
_CAPTURED = 0.5  # what a call inside a CUDA graph costs more importance
# Above these times outside a CUDA graph the host no longer counts: one measurement serves both.
_HOST_COUNTS_US = {"step": 400.0, "piece": 120.0}

# Chains of equal widths; the sum orders them among the layers.
_CHAIN_DTYPES = {"bfloat16": 0.0, "float32": 0.5, "float16": 3.0}
_CHAIN_WIDTHS = {64: 0.0, 256: 0.0, 128: 0.5, 512: 0.5, 1024: 0.5, 2048: 2.0}
_CHAIN_LAYERS = {8: 0.0, 4: 0.5, 2: 1.0}
_CHAIN_TOKENS = {64: 0.0, 1: 0.5, 1024: 0.5, 16: 1.0, 256: 1.0, 4096: 1.0, 16384: 1.5, 65536: 2.0}
_CHAIN_TRAINING = 1.0

# Options a piece does not read: one measurement serves all their values.
_UNREAD = {"grad_input": ("activation", "bias", "x"), "grad_weight": ("activation", "bias", "w")}


def table_problems(device: str = "cuda") -> list[Problem]:
    """The grid of layers and chains, most important first, all pieces of each call next to each
    other."""
    weighted: list[tuple[float, int, Problem]] = []
    for dtype, a in _DTYPES.items():
        for activation, b in _ACTIVATIONS.items():
            for layout, c in _LAYOUTS.items():
                base = a + b + c
                first = _PUBLISHED_SHARE * (a + b) + c - 1.0
                for m, k, n in _PUBLISHED:
                    weighted += _pieces(first, (m, k, n), dtype, device, activation, layout)
                for i, (k, n) in enumerate(_SIZES):
                    for m, d in _TOKENS.items():
                        if max(m * k, m * n) <= _LARGEST_ELEMENTS:
                            cost = base + 0.2 * i + d
                            weighted += _pieces(cost, (m, k, n), dtype, device, activation, layout)
    weighted += _chains(device)
    weighted.sort(key=lambda item: item[:2])
    return list(dict.fromkeys(p for _, _, p in weighted))


def _chains(device: str) -> list[tuple[float, int, Problem]]:
    """The grid of mlp: chains of equal widths with relu."""
    found: list[tuple[float, int, Problem]] = []
    sizes = list(product(_CHAIN_WIDTHS.items(), _CHAIN_LAYERS.items(), _CHAIN_TOKENS.items()))
    for dtype, base in _CHAIN_DTYPES.items():
        for (h, b), (layers, c), (m, d) in sizes:
            if m * h > _LARGEST_CHAIN:
                continue
            forward = mlp.problem(
                "forward",
                m,
                (h,) * (layers + 1),
                dtype=dtype,
                device=device,
                precision=matmul_precision(FLOAT_DTYPES[dtype]),
            )
            cost = base + b + c + d
            step = chain_order(replace(forward, needs_grad=True))
            training = [p for p in step if p.family == forward.family]  # layers have their own grid
            calls = [(cost, forward), *((cost + _CHAIN_TRAINING, p) for p in training)]
            found += _both_regimes([(q, place, p) for place, (q, p) in enumerate(calls)])
    return found


def _both_regimes(
    calls: list[tuple[float, int, Problem]],
) -> list[tuple[float, int, Problem]]:
    inside = ((q, place, p.other_regime()) for q, place, p in calls)
    return calls + [(q + _CAPTURED, place, p) for q, place, p in inside if p is not None]


def _pieces(
    cost: float,
    sizes: tuple[int, int, int],
    dtype: str,
    device: str,
    activation: str,
    layout: str,
) -> list[tuple[float, int, Problem]]:
    """One call's Problems: the forward for inference, and every piece of a training step; on a
    GPU outside a CUDA graph and inside."""
    forward = problem(
        "forward",
        *sizes,
        dtype=dtype,
        device=device,
        activation=activation,
        w_layout=layout,
        precision=matmul_precision(FLOAT_DTYPES[dtype]),
    )
    calls = (forward, *tuning_order(replace(forward, needs_grad=True)))
    return _both_regimes([(cost, place, p) for place, p in enumerate(calls)])


def build_table(
    problems: Sequence[Problem],
    device: torch.device | str = "cuda",
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
        budget_s: start no further Problem after this many seconds.
        rounds: interleaved rounds of each measurement.
        extend: an earlier table of the same device and torch version. Its rows are kept and not
            measured again; those of which a backend's source has changed since are, and stay as
            they were where the budget does not reach them.
        progress: told about every Problem.

    Returns:
        ``{"format", "device", "torch", "created", "environment", "sources", "rows", "failures",
        "left"}``: ``sources`` are hashes of what was measured; a row is ``{"problem", "best",
        "times_us"}`` (device time for a Problem inside a CUDA graph, else wall time), with
        ``"sources"`` of its own for backends measured in an earlier state; ``failures``
        are the Problems that raised with the reason, ``left`` is how many the budget did not
        reach.
    """
    where = torch.device(device)
    with cache.in_memory():  # what is measured here decides what a step's pieces are
        return _build(list(problems), where, budget_s, rounds, extend, progress)


def _build(
    problems: Sequence[Problem],
    where: torch.device,
    budget_s: float,
    rounds: int,
    extend: Mapping[str, Any] | None,
    progress: Progress,
) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    aged: dict[Problem, dict[str, Any]] = {}
    if extend is not None and extend.get("torch") == str(torch.__version__):
        for row in extend["rows"]:
            earlier = _changed_sources(row, extend)
            if earlier:
                aged[Problem.from_json(row["problem"])] = row | {"sources": earlier}
            else:
                rows.append({k: v for k, v in row.items() if k != "sources"})
    for row in rows:
        _remember(Problem.from_json(row["problem"]), row["best"], row["times_us"])
    done = {Problem.from_json(row["problem"]) for row in rows}
    rows_of = {Problem.from_json(row["problem"]): dict(row["times_us"]) for row in rows}
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
        if _device_bound(p, rows_of):
            done.add(p)
            continue
        progress(p.describe(), i, len(waiting))
        try:
            found = tune(p, device=where, rounds=rounds, budget_s=0.5, save=False)
        except Exception as error:  # noqa: BLE001 - recorded; one broken Problem must not end all
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            failures.append({"problem": p.to_json(), "reason": reason})
            continue
        times = {name: round(s.median_us, 3) for name, s in found.samples.items()}
        for twin in twins[_computation(p)]:
            done.add(twin)
            rows.append({"problem": twin.to_json(), "best": found.best, "times_us": times})
            rows_of[twin] = times
            _remember(twin, found.best, times)
    progress("done", len(waiting), len(waiting))
    failed = {Problem.from_json(f["problem"]) for f in failures}
    rows += [row for p, row in aged.items() if p not in done and p not in failed]
    return {
        "format": 1,
        "device": device_facts(where).slug,
        "torch": str(torch.__version__),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": environment(where),
        "sources": _sources(),
        "rows": rows,
        "failures": failures,
        "left": left,
    }


def _remember(p: Problem, best: str, times_us: Mapping[str, float]) -> None:
    measured = [b for b in family(p.family).candidates(p.piece) if b.name in times_us]
    cache.store(p, measured, best, dict(times_us))


def _sources() -> dict[str, dict[str, str]]:
    """``family.piece`` → backend → hash of its source."""
    return {
        f"{f.name}.{piece}": {b.name: b.source_hash() for b in f.candidates(piece)}
        for f in families().values()
        for piece in f.pieces
    }


def _changed_sources(row: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, str]:
    """Backend → hash of its source when the row was measured, where that is another one now."""
    p = Problem.from_json(row["problem"])
    name = f"{p.family}.{p.piece}"
    then = {**table.get("sources", {}).get(name, {}), **row.get("sources", {})}
    now = _sources()[name]
    return {b: then.get(b, "unknown") for b in row["times_us"] if then.get(b) != now.get(b)}


def _device_bound(p: Problem, times: Mapping[Problem, Mapping[str, float]]) -> bool:
    """Whether what was measured outside a CUDA graph holds inside as well."""
    outside = p.other_regime() if p.captured else None
    if outside is None or outside not in times:
        return False
    enough = _HOST_COUNTS_US["step" if p.piece == STEP else "piece"]
    return min(times[outside].values()) > enough


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
