"""Wall time of small warm calls in two checkouts: ``python -m benchmarks.experiments.small_calls``.

A change of the front end may not slow calls whose kernels take no time. Each checkout runs in a
process of its own; the two take turns, and every turn times every call.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fastlinear.core.environment import environment
from fastlinear.core.timing import Samples, paired_ratio

_WORKER = """
import json, sys, time
import torch
import torch.nn.functional as F
import fastlinear as fl
from importlib import import_module as module
for names in (
    ("fastpath.lookup", "fastpath.autograd_node"),
    ("ops.common.fastpath", "ops.common.fastpath_node"),  # former names
    ("ops.common.door", "ops.common.door_node"),
):
    try:
        lookup, autograd_node = (module(f"fastlinear.{name}") for name in names)
        break
    except ImportError:
        pass

device, rounds = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
torch.set_num_threads(1)
draw = lambda *shape: torch.randn(shape, device=device)
x, w, b = draw(8, 32), draw(32, 32), draw(32)
stack, many = draw(4, 8, 8), draw(8, 32)
calls = {
    "linear_act": lambda: fl.linear_act(x, w, b, activation="gelu"),
    "mlp": lambda: fl.mlp(x, [w, w, w], [b, b, b], activation="relu"),
    "gated_mlp": lambda: fl.gated_mlp(x, w, w, w),
    "diagonal_linear": lambda: fl.diagonal_linear(x, b, b, activation="relu"),
    "grouped_linear": lambda: fl.grouped_linear(many, stack, activation="relu"),
}

def step(call):
    def run():
        y = call()
        y.backward(torch.ones_like(y))
    return run

def timed(run):
    for _ in range(50):
        run()
    if device == "cuda":
        torch.cuda.synchronize()
    count, found = 200, []
    for _ in range(rounds):
        begin = time.perf_counter()
        for _ in range(count):
            run()
        if device == "cuda":
            torch.cuda.synchronize()
        found.append((time.perf_counter() - begin) / count * 1e6)
    return found

for call in calls.values():
    call()
lookup.wait(120), autograd_node.wait(240)
times = {}
with torch.no_grad():
    for name, call in calls.items():
        times[name, "forward"] = timed(call)
for t in (x, w, b, stack, many):
    t.requires_grad_()
for name, call in calls.items():
    times[name, "forward+backward"] = timed(step(call))
calls["PyTorch's linear and gelu"] = lambda: F.gelu(F.linear(x, w, b))
for name, call in calls.items():
    run = torch.compile(call, fullgraph=True)
    times[name + ", compiled", "forward+backward"] = timed(step(run))
print(json.dumps([[*key, value] for key, value in times.items()]))
"""


def measured(checkout: Path, device: str, rounds: int) -> dict[tuple[str, str], list[float]]:
    """(call, direction) → microseconds a call, a number a round, in a process of its own."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(checkout / "src"), *_path()])}
    command = [sys.executable, "-c", _WORKER, device, str(rounds)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if run.returncode:
        raise RuntimeError(f"{checkout}: {run.stderr.strip()[-2000:]}")
    return {(name, way): times for name, way, times in json.loads(run.stdout.splitlines()[-1])}


def _path() -> list[str]:
    own = str(Path(__file__).parents[2] / "src")
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p and p != own]


def compared(
    before: Path, after: Path, device: str, *, turns: int, rounds: int
) -> list[dict[str, Any]]:
    """A row for each call: its time in both checkouts, and the ratio after / before with the 95%
    interval of a paired bootstrap. Turns go before, after, after, before."""
    found: dict[str, dict[tuple[str, str], list[float]]] = {"before": {}, "after": {}}
    for turn in range(turns):
        order = ("before", "after") if turn % 2 == 0 else ("after", "before")
        for name in order:
            checkout = before if name == "before" else after
            for key, times in measured(checkout, device, rounds).items():
                found[name].setdefault(key, []).append(float(np.median(times)))
    rows = []
    for (call, direction), old in found["before"].items():
        new = found["after"][call, direction]
        after_us, before_us = (Samples(call, tuple(us), "wall", 1, "clock") for us in (new, old))
        ratio = paired_ratio(after_us, before_us)
        rows.append(
            {
                "experiment": "small-calls",
                "call": call,
                "direction": direction,
                "device": device,
                "before_us": old,
                "after_us": new,
                "ratio": ratio.median,
                "ratio_ci95": [ratio.low, ratio.high],
            }
        )
    return rows


def main() -> None:
    """Compare, print a table, append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, required=True, help="the older checkout")
    parser.add_argument("--after", type=Path, default=Path(__file__).parents[2])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, help="append rows to this file")
    given = parser.parse_args()
    rows = compared(given.before, given.after, given.device, turns=given.turns, rounds=given.rounds)
    for row in rows:
        low, high = row["ratio_ci95"]
        before, after = (float(np.median(row[name])) for name in ("before_us", "after_us"))
        print(
            f"{row['call']:36} {row['direction']:17} {before:8.2f} → {after:8.2f} µs"
            f"  {row['ratio']:.3f} [{low:.3f}, {high:.3f}]"
        )
    if given.out is not None:
        facts = environment(given.device)
        with given.out.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps({**row, "env": facts}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
