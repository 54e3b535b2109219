"""Experiment ``groups``: many small linear layers, every way to compute them in its own layout.

The first cases are those that decide; then group sizes from 8 to 512 at about the same traffic, and
batches, of which few rows are hard to win.
"""

from __future__ import annotations

from benchmarks.harness.case import BOTH_MODES, Case, timed_on

# M, G, K, N
_HEADLINE = (
    (4096, 100, 100, 100),
    (16384, 64, 64, 64),
    (16384, 256, 32, 32),
    (16384, 16, 256, 256),
)
_MORE = ((512, 100, 100, 200), (64, 8, 100, 100))
_ODD = ((2048, 64, 150, 150), (2048, 32, 250, 250))  # rows that do not begin at 16 bytes
_SIZES = (8, 16, 24, 48, 64, 96, 100, 128, 144, 200, 256, 512)  # of a group
_BATCHES = (1, 16, 256, 1024)
_CPU = (
    (256, 100, 100, 100),
    (1024, 100, 100, 100),
    (256, 16, 64, 64),
    (1024, 16, 64, 64),
    (64, 100, 16, 16),
    (16, 8, 100, 100),
    (1, 100, 100, 100),
    (256, 8, 256, 256),
)
_QUICK = ((64, 8, 20, 20), (256, 16, 64, 64))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type, most telling first."""
    if quick:
        return [_case(*s, "float32", device, d) for s in _QUICK for d in BOTH_MODES]
    return _cuda() if device == "cuda" else _cpu()


def _cuda() -> list[Case]:
    decisive = [(sizes, "bfloat16", "relu") for sizes in (*_HEADLINE, *_MORE, *_ODD)]
    decisive += [(_HEADLINE[0], "float32", "relu")]
    decisive += [(sizes, "bfloat16", "none") for sizes in _HEADLINE]
    sized = [(2048, max(1, 8192 // size), size, size) for size in _SIZES]
    wide = [(sizes, dtype) for dtype in ("bfloat16", "float32") for sizes in sized]
    wide += [((m, 100, 100, 100), "bfloat16") for m in _BATCHES]
    wide += [(sizes, "float16") for sizes in _HEADLINE]
    found = [_case(*s, t, "cuda", d, act) for s, t, act in decisive for d in BOTH_MODES]
    found += [_case(*s, t, "cuda", d, light=True) for s, t in wide for d in BOTH_MODES]
    return found


def _cpu() -> list[Case]:
    return [
        _case(*sizes, dtype, "cpu", direction, light=dtype == "bfloat16")
        for dtype in ("float32", "bfloat16")
        for sizes in _CPU
        for direction in BOTH_MODES
    ]


def _case(
    m: int,
    groups: int,
    k: int,
    n: int,
    dtype: str,
    device: str,
    direction: str,
    activation: str = "relu",
    *,
    light: bool = False,
) -> Case:
    return Case(
        experiment="groups",
        family="grouped_linear",
        dims=(("M", m), ("G", groups), ("K", k), ("N", n)),
        dtype=dtype,
        device=device,
        direction=direction,
        metrics=timed_on(device),
        options=(("activation", activation), ("bias", "yes")),
        light=light,
    )
