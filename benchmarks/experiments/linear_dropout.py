"""Training steps of MLPs with dropout: ``python -m benchmarks.experiments.linear_dropout``.

Each MLP is drawn from a seed. One interleaved run times PyTorch, ``torch.compile`` and the model
that ``optimize_`` has rewritten, and a row says which rules it kept.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.environment import environment
from fastlinear.core.timing import interleave, paired_ratio


def drawn(seed: int) -> tuple[nn.Module, Tensor, dict[str, Any]]:
    """An MLP in training, rows for it, and the facts of both."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    widths = [draw.choice((64, 96, 128, 200, 256, 384, 512)) for _ in range(draw.randint(3, 5))]
    rows, rate = draw.choice((64, 128, 256, 512, 1024)), draw.choice((0.1, 0.2, 0.5))
    layers: list[nn.Module] = []
    for k, n in pairwise(widths):
        layers += [nn.Linear(k, n), nn.ReLU(), nn.Dropout(rate)]
    facts = {"seed": seed, "widths": widths, "rows": rows, "rate": rate}
    model = nn.Sequential(*layers, nn.Linear(widths[-1], 8)).train()
    return model, torch.randn(rows, widths[0]), facts


def step(
    model: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor
) -> Callable[[], Any]:
    """Forward and backward of a scalar loss, gradients set anew."""

    def run() -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(x).square().mean(), parameters)

    return run


def measured(seed: int, rounds: int, peers: bool) -> dict[str, Any]:
    """The row of one MLP."""
    model, x, facts = drawn(seed)
    runs = {"eager": step(model, list(model.parameters()), x)}
    if peers:
        twin = copy.deepcopy(model)
        runs["compile"] = step(torch.compile(twin), list(twin.parameters()), x)
    ours = copy.deepcopy(model)
    result = fl.optimize_(ours, x, config=fl.Config(mode="train"))
    runs["fastlinear"] = step(ours, list(ours.parameters()), x)
    for run in runs.values():
        run()
    times = interleave(runs, device=torch.device("cpu"), metric="wall", rounds=rounds, budget_s=20)
    row: dict[str, Any] = {"experiment": "linear-dropout", **facts}
    row["kept"] = dict(Counter(s.rule for s in result.sites if s.status == "kept"))
    for name, samples in times.items():
        row[f"{name}_us"] = list(samples.us)
        if name != "fastlinear":
            ratio = paired_ratio(samples, times["fastlinear"])
            row[f"speedup_over_{name}"] = [ratio.median, ratio.low, ratio.high]
    return row


def main() -> None:
    """Measure, print a line each, append rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(6)))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--no-peers", action="store_true", help="without torch.compile")
    parser.add_argument("--out", type=Path, help="append rows to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    env = environment("cpu")
    for seed in given.seeds:
        row = {**measured(seed, given.rounds, not given.no_peers), "env": env}
        ratios = {k: row[k] for k in row if k.startswith("speedup")}
        said = ", ".join(f"{k} {m:.2f} [{lo:.2f}, {hi:.2f}]" for k, (m, lo, hi) in ratios.items())
        print(f"{row['widths']} x {row['rows']}, rate {row['rate']}: kept {row['kept']}; {said}")
        if given.out:
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
