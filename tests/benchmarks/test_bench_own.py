"""Our default is held against our own backends: dispatch must pick the best of them."""

from __future__ import annotations

from typing import Any

from benchmarks.harness.own import default_behind_own, notes_own
from benchmarks.harness.page import page


def row(contender: str, *us: float, **more: Any) -> dict[str, Any]:
    median = sorted(us)[len(us) // 2]
    return {
        "experiment": "overhead",
        "problem": "relu M64 H4096 L8 float32",
        "contender": contender,
        "direction": "forward",
        "metric": "wall",
        "median_us": median,
        "ci95_us": [min(us), max(us)],
        "samples_us": list(us),
        "ratio_ci95": None,
        "ratio_to_best": None,
        "best_peer": None,
        "valid": True,
        "error": 0.0,
        "roofline": None,
        "chosen": {"forward": "eager (tuned)"},
        "env": {},
    } | more


OWN = row("fastlinear", 207.0, 189.0, 190.0, 207.0, 211.0)
WHOLE = row("fastlinear[whole_cpp]", 143.0, 133.0, 134.0, 155.0, 155.0)
LAYERS = row("fastlinear[layerwise]", 163.0, 160.0, 162.0, 164.0, 163.0)
CLOSE = row("fastlinear[whole_cpp]", 200.0, 195.0, 180.0, 214.0, 209.0)
TOLD = (
    "relu M64 H4096 L8 float32 forward wall: 1.418 of fastlinear[whole_cpp] "
    "(took forward: eager (tuned))"
)


def test_the_fastest_of_ours_that_is_ahead_beyond_noise_is_named() -> None:
    (loss,) = default_behind_own([OWN, LAYERS, WHOLE, row("eager", 90.0, 90.0, 90.0, 90.0, 90.0)])
    assert str(loss) == TOLD
    assert loss.low > 1.02
    head, line = notes_own([loss])
    assert head.endswith("behind a backend of ours, beyond noise, in 1 measurement")
    assert line == f"  {TOLD}"


def test_what_is_within_noise_wrong_or_of_another_kind_is_not() -> None:
    assert default_behind_own([OWN, CLOSE]) == []
    assert default_behind_own([WHOLE]) == []
    for other in (
        WHOLE | {"valid": False},
        WHOLE | {"metric": "device"},
        WHOLE | {"problem": "another"},
        WHOLE | {"direction": "step"},
        WHOLE | {"contender": "fastlinear_cuda_graph"},
    ):
        assert default_behind_own([OWN, other]) == []
    assert notes_own([])[0].endswith("in 0 measurements")


def test_rows_of_unlike_rounds_are_compared_by_their_intervals() -> None:
    short = row("fastlinear[whole_cpp]", 143.0, 133.0, 134.0)
    (loss,) = default_behind_own([OWN, short])
    assert (loss.ratio, loss.low) == (207.0 / 134.0, 189.0 / 143.0)
    assert default_behind_own([OWN, short | {"ci95_us": [130.0, 190.0]}]) == []


def test_the_page_lists_them() -> None:
    peer = row("eager", 210.0, 210.0, 210.0, 210.0, 210.0)
    own = OWN | {"best_peer": "eager", "ratio_to_best": 0.98, "ratio_ci95": [0.9, 1.0]}
    html = page([own, peer, WHOLE])
    assert "<b>1</b>default behind our own backend by more than 2%, beyond noise" in html
    assert TOLD in html
    html = page([own, peer, CLOSE])
    assert "<b>0</b>default behind our own backend" in html
    assert "Default behind our own backend</h2>" not in html
