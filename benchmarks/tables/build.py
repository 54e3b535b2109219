"""Building the tables shipped with the package: tuning over a grid of Problems, within a budget."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from benchmarks.contenders import mlp as chains
from benchmarks.harness.case import TIMED, Case
from benchmarks.harness.peer import OURS
from benchmarks.harness.rows import Row
from fastlinear.core.device import device_facts
from fastlinear.core.environment import environment
from fastlinear.core.errors import InputError
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress, silent
from fastlinear.core.timing import Samples
from fastlinear.dispatch import cache, tables
from fastlinear.dispatch.backend import families, family
from fastlinear.dispatch.tune import BASELINE, tune, winner
from fastlinear.families.linear.problem import STEP

# Above these times outside a CUDA graph the host no longer counts: one measurement serves both.
_HOST_COUNTS_US = {"step": 400.0, "piece": 120.0}

# Options a piece does not read: one measurement serves all their values.
_UNREAD = {"grad_input": ("activation", "bias", "x"), "grad_weight": ("activation", "bias", "w")}


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
    same = extend is not None and extend.get("torch") == str(torch.__version__)
    rows, aged = _by_age(extend) if extend is not None and same else ([], {})
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
            if _undecided(found.samples, found.best):  # by noise of the host, mostly
                found = tune(p, device=where, rounds=3 * rounds, budget_s=1.5, save=False)
        except Exception as error:  # noqa: BLE001 - recorded; one broken Problem must not end all
            reason = f"{type(error).__name__}: {str(error)[:300]}"
            failures.append({"problem": p.to_json(), "reason": reason})
            continue
        times = {name: round(s.median_us, 3) for name, s in found.samples.items()}
        done.update(twins[_computation(p)])
        if len(times) < 2:  # nothing to choose between
            continue
        for twin in twins[_computation(p)]:
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


def with_rows(table: Mapping[str, Any], measured: Sequence[Row]) -> dict[str, Any]:
    """A table with what an experiment's rows say of chains in inference: a cell outside CUDA graphs
    by its wall time, inside by its device time.

    Args:
        table: as ``build_table`` returns it.
        measured: rows of ``overhead`` measured with today's sources, on the table's device.

    Raises:
        InputError: rows of another device or version of torch, or none of a chain in inference.
    """
    found = dict(_cells(measured))
    for row in measured:
        env = row["env"]
        if (env["device"]["slug"], env["torch"]) != (table["device"], table["torch"]):
            raise InputError(
                "bench table --rows",
                f"rows of {table['device']} with torch {table['torch']}",
                f"{env['device']['slug']} with torch {env['torch']}",
                "Give rows measured where the table was.",
            )
    if not found:
        raise InputError(
            "bench table --rows",
            "timed rows of chains without gradients, eager and forced backends among them",
            f"{len(measured)} rows without any",
            "Run `fastlinear bench overhead --out FILE` first.",
        )
    rows, aged = _by_age(table)
    kept = [r for r in (*rows, *aged.values()) if Problem.from_json(r["problem"]) not in found]
    return {**table, "sources": _sources(), "rows": [*found.values(), *kept]}


def _cells(measured: Sequence[Row]) -> Iterator[tuple[Problem, dict[str, Any]]]:
    grouped: dict[tuple[str, str], dict[str, Row]] = {}
    for row in measured:
        chain = row["family"] == "mlp" and row["direction"] == "forward"
        if chain and row["metric"] in TIMED and row["valid"] and row["median_us"] is not None:
            key = json.dumps(row["case"], sort_keys=True), row["metric"]
            grouped.setdefault(key, {})[row["contender"]] = row
    for (case, metric), contenders in grouped.items():
        outside = chains.problem_of(Case.from_json(json.loads(case)))
        problem = outside if metric == "wall" else outside.other_regime()
        if problem is None:
            continue
        samples = {}
        for backend in family(problem.family).candidates(problem.piece):
            name = BASELINE if backend.name == BASELINE else f"{OURS}[{backend.name}]"
            own = contenders.get(name)  # whether it can serve was seen there, not on this machine
            if own is not None:
                us, inner = tuple(own["samples_us"]), own["calls_per_sample"]
                samples[backend.name] = Samples(backend.name, us, metric, inner, own["how"])
        if BASELINE in samples:
            times = {name: round(s.median_us, 3) for name, s in samples.items()}
            best, _ = winner(samples)
            yield problem, {"problem": problem.to_json(), "best": best, "times_us": times}


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


def _by_age(
    table: Mapping[str, Any],
) -> tuple[list[dict[str, Any]], dict[Problem, dict[str, Any]]]:
    """The rows measured with today's sources, and the others, with the sources they had."""
    rows: list[dict[str, Any]] = []
    aged: dict[Problem, dict[str, Any]] = {}
    for row in table["rows"]:
        earlier = _changed_sources(row, table)
        if earlier:
            aged[Problem.from_json(row["problem"])] = row | {"sources": earlier}
        else:
            rows.append({k: v for k, v in row.items() if k != "sources"})
    return rows, aged


def _changed_sources(row: Mapping[str, Any], table: Mapping[str, Any]) -> dict[str, str]:
    """Backend → hash of its source when the row was measured, where that is another one now."""
    p = Problem.from_json(row["problem"])
    name = f"{p.family}.{p.piece}"
    then = {**table.get("sources", {}).get(name, {}), **row.get("sources", {})}
    now = _sources()[name]
    return {b: then.get(b, "unknown") for b in row["times_us"] if then.get(b) != now.get(b)}


def _undecided(samples: Mapping[str, Samples], best: str) -> bool:
    """Whether what was chosen is not what took least, by more than 5%."""
    return samples[best].median_us > 1.05 * min(s.median_us for s in samples.values())


def _device_bound(p: Problem, times: Mapping[Problem, Mapping[str, float]]) -> bool:
    """Whether what was measured outside a CUDA graph holds inside as well."""
    outside = p.other_regime() if p.captured else None
    if outside is None or outside not in times:
        return False
    layers = p.dim("L") if p.family == "mlp" else 1  # each may ask the host for launches
    enough = _HOST_COUNTS_US["step" if p.piece == STEP else "piece"] * layers
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
