"""The page of benchmark rows: whole, self-contained, losses included."""

from __future__ import annotations

import copy
from typing import Any

from benchmarks.harness.page import page
from tests.report import report_samples as samples


def sample() -> list[dict[str, Any]]:
    """Benchmark rows as JSON: a win, a loss, a skipped and a wrong contender."""
    rows = []
    for m, ours in ((64, 140.0), (1024, 320.0)):
        times = {"fastlinear": ours, "eager": 300.0, "compile": 290.0, "onednn": None, "bad": None}
        for name, us in times.items():
            rows.append(
                {
                    "experiment": "linear",
                    "family": "linear_act",
                    "problem": f"relu M{m} K1024 N1024 L1 float32",
                    "contender": name,
                    "ours": name == "fastlinear",
                    "direction": "forward",
                    "metric": "wall",
                    "median_us": us,
                    "ci95_us": us and [us * 0.98, us * 1.03],
                    "samples_us": [us] * 5 if us else [],
                    "peak_bytes": None,
                    "ratio_to_best": us and us / 290.0,
                    "ratio_ci95": us and [us / 290.0 * 0.99, us / 290.0 * 1.01],
                    "best_peer": us and "compile",
                    "valid": us is not None,
                    "skipped": "needs oneDNN" if name == "onednn" else None,
                    "error": 2.1e-7 if us else None,
                    "roofline": us and {"fraction": 90 / us, "bound": "compute", "floor_us": 90.0},
                    "chosen": {"forward": "onednn (tuned)"} if name == "fastlinear" else None,
                    "env": samples.ENVIRONMENT,
                    "command": "fastlinear bench linear",
                    "seed": 0,
                }
            )
    return rows


def test_page_is_whole_and_self_contained() -> None:
    rows = sample()
    before = copy.deepcopy(rows)
    samples.check_whole(page(rows))
    assert rows == before
    assert "No rows." in page([])


def test_bench_page_shows_losses_and_what_was_left_out() -> None:
    html = page(sample())
    assert "0.91×" in html
    assert "2.07×" in html
    assert "onednn (needs oneDNN)" in html
    assert "bad (less accurate than allowed)" in html


def test_a_gain_within_noise_is_not_counted() -> None:
    rows = sample()
    assert "<b>1</b>faster than the best peer by more than 2%" in page(rows)
    for row in rows:
        if row["ratio_ci95"]:
            row["ratio_ci95"] = [0.4, 1.2]
    html = page(rows)
    assert "<b>0</b>faster than the best peer by more than 2%" in html
    assert "<b>1</b>slower by more than 2%" in html  # a loss counts whatever the noise
