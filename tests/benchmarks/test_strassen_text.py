"""What the README says of the committed rows is what they show."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness.rows import read_rows

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "benchmarks/experiments/strassen/README.md").read_text(encoding="utf-8")


def ratios(name: str, metric: str, dtype: str) -> dict[str, tuple[float, float]]:
    """Problem → µs of Strassen's chain and of the default."""
    found: dict[str, dict[str, float]] = {}
    for row in read_rows(ROOT / "results/nvidia-h200" / name):
        if row["median_us"] and (row["metric"], row["case"]["dtype"]) == (metric, dtype):
            found.setdefault(row["problem"], {})[row["contender"]] = row["median_us"]
    return {p: (us["fastlinear[strassen]"], us["fastlinear"]) for p, us in found.items()}


@pytest.mark.parametrize(
    ("name", "metric", "dtype", "cells", "said"),
    [
        ("strassen.jsonl.gz", "device", "float32", 9, "1.30 to 1.82 times"),
        ("strassen.jsonl.gz", "wall", "float32", 9, "1.28 to 1.87 times"),
        ("overhead.jsonl.gz", "device", "float32", 280, "1.32 to 11.2 times"),
        ("overhead.jsonl.gz", "device", "bfloat16", 280, "1.14 to 12.4"),
    ],
)
def test_the_default_is_faster_in_every_row(
    name: str, metric: str, dtype: str, cells: int, said: str
) -> None:
    found = sorted(ours / default for ours, default in ratios(name, metric, dtype).values())
    assert len(found) == cells
    assert found[0] > 1.0
    low, high = (f"{r:.3g}" if r >= 10 else f"{r:.2f}" for r in (found[0], found[-1]))
    assert said.startswith(f"{low} to {high}")
    assert said in " ".join(TEXT.split())


def test_the_table_has_the_rows_medians() -> None:
    for problem, (ours, default) in ratios("strassen.jsonl.gz", "device", "float32").items():
        _, m, _, h, _ = problem.split()
        cells = (
            f"| {m[1:]}, {h[1:]} |",
            f"| {ours:.0f} | **{default:.0f}** | {ours / default:.2f} |",
        )
        assert any(all(c in line for c in cells) for line in TEXT.splitlines()), problem


def test_in_how_many_cells_it_was_the_fastest_backend() -> None:
    cells: dict[tuple[str, ...], dict[str, float]] = {}
    for path in (ROOT / "results").glob("*/*.jsonl*"):
        if not path.name.startswith(("overhead", "strassen")):
            continue
        for row in read_rows(path):
            if row["valid"] and row["median_us"] and row["metric"] in ("wall", "device"):
                key = (str(path), row["problem"], row["direction"], row["metric"])
                own = row["contender"].startswith("fastlinear[") or row["contender"] == "eager"
                if own:
                    key = (row["case"]["device"], *key)
                    cells.setdefault(key, {})[row["contender"]] = row["median_us"]
    counts, gains = {"cuda": 0, "cpu": 0}, {"cuda": [0.0], "cpu": [0.0]}
    for key, us in cells.items():
        ours = us.pop("fastlinear[strassen]", None)
        if ours is not None:
            counts[key[0]] += 1
            if ours < min(us.values()):
                gains[key[0]].append(min(us.values()) / ours)
    assert counts == {"cuda": 1740, "cpu": 749}
    assert (len(gains["cuda"]) - 1, len(gains["cpu"]) - 1) == (0, 3)
    said = "in none of the 1,740 GPU cells and in 3 of the 749 CPU cells, there by at most 1.03"
    assert max(gains["cpu"]) < 1.035
    assert said in " ".join(TEXT.split())
