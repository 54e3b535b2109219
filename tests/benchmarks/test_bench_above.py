"""Rows that beat the measured ceilings: each says why, and tables say it below them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.harness import above
from benchmarks.harness.above import notes_above, why_above
from benchmarks.harness.page import page
from fastlinear.core.device import cpu_cache_bytes

MIB = 1 << 20


def row(
    fraction: float, mib: float = 8.0, bound: str = "memory", contender: str = "eager", **env: Any
) -> dict[str, Any]:
    us = 100.0
    place = {"floor_us": us * fraction, "bound": bound, "fraction": fraction, "flops_per_s": 0.0}
    return {
        "experiment": "linear",
        "problem": "p",
        "contender": contender,
        "direction": "forward",
        "metric": "wall",
        "median_us": us,
        "ci95_us": None,
        "error": 0.0,
        "best_peer": None,
        "roofline": place | {"bytes_per_s": mib * MIB / us * 1e6},
        "cold_l2": env.pop("cold_l2", False),
        "env": env,
    }


FLOAT32 = {"case": {"dtype": "float32"}}
CUDA = {"device": {"kind": "cuda", "l2_bytes": 50 * MIB}, "cold_l2": True}


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (row(0.99), None),
        (row(1.0), None),
        (row(1.04), above.SPREAD),
        (row(1.5), above.PERHAPS),
        (row(1.5, mib=65), above.WRONG),
        (row(1.5, cache_bytes=32 * MIB), above.CACHES),
        (row(1.5, mib=40, cache_bytes=32 * MIB), above.WRONG),
        (row(1.25, bound="compute"), above.PRODUCT),
        (row(1.31, bound="compute"), above.NOT_CREDIBLE),
        (row(2.71, bound="compute"), above.NOT_CREDIBLE),
        (row(1.5, bound="compute", **CUDA), above.NOT_CREDIBLE),
        (row(1.5, bound="compute", **CUDA) | FLOAT32, above.PRODUCT),  # three TF32 products
        (row(1.5, mib=40, **CUDA), above.L2),
        (row(1.5, mib=60, **CUDA), above.WRONG),
        (row(1.5, mib=400, contender="fastlinear_bare_copy", **CUDA), above.BARE),
        (row(1.5) | {"roofline": None}, None),
    ],
)
def test_each_row_says_why(given: dict[str, Any], why: str | None) -> None:
    assert why_above(given) == why


def test_tables_tell_reasons_only_where_there_are_rows_above() -> None:
    below = [row(0.5), row(0.99) | {"roofline": None}]
    assert notes_above(below) == []
    lines = notes_above([*below, row(1.2, mib=400), row(1.5), row(1.6), row(1.02)])
    assert lines == [
        "above 100% of the measured roofline: 4 of 5 measurements, up to 160%",
        f"  2 (up to 160%): {above.PERHAPS}",
        f"  1 (up to 102%): {above.SPREAD}",
        f"  1 (up to 120%): {above.WRONG}",
    ]


def test_pages_tell_it_too() -> None:
    shown = page([row(1.5, cache_bytes=32 * MIB)])
    assert "above 100% of the measured roofline: 1 of 1" in shown.lower()
    assert "come from the processor" in shown
    assert "above 100%" not in page([row(0.5)]).lower()


def test_the_last_cache_is_read_from_the_system(tmp_path: Path) -> None:
    for i, (level, size) in enumerate([("1", "32K"), ("2", "1024K\n"), ("3", "32M"), ("x", "9G")]):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "level").write_text(level)
        (tmp_path / f"index{i}" / "size").write_text(size)
    assert cpu_cache_bytes.__wrapped__(tmp_path) == 32 * MIB
    assert cpu_cache_bytes.__wrapped__(tmp_path / "none") == 0
