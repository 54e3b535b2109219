"""Experiment ``unequal``: layers of different sizes, as the towers of a recommender have them.

Sizes are multiples of 8 between two numbers, or any numbers between them.
"""

from __future__ import annotations

from benchmarks.harness.case import BOTH_MODES, Case, timed_on

# M rows of a group, G, features
_CUDA = (
    (64, 26, "16-512"),
    (2048, 26, "16-512"),
    (16384, 26, "16-512"),
    (256, 100, "8-64"),
    (2048, 26, "any 16-512"),
    (256, 100, "any 8-64"),
)
_CPU = ((64, 26, "16-512"), (512, 26, "16-512"), (64, 100, "8-64"))
_QUICK = ((16, 6, "8-64"), (16, 6, "any 8-64"))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type, most telling first."""
    sizes = _QUICK if quick else _CUDA if device == "cuda" else _CPU
    dtype = "bfloat16" if device == "cuda" and not quick else "float32"
    found = [_case(*dims, dtype, device, d) for dims in sizes for d in BOTH_MODES]
    if device == "cuda" and not quick:
        single = [dims for dims in sizes if dims[0] != 16384]
        found += [
            _case(*dims, "float32", device, d, light=True) for dims in single for d in BOTH_MODES
        ]
    return found


def _case(
    m: int,
    groups: int,
    sizes: str,
    dtype: str,
    device: str,
    direction: str,
    *,
    light: bool = False,
) -> Case:
    return Case(
        experiment="unequal",
        family="unequal_linear",
        dims=(("M", m), ("G", groups)),
        dtype=dtype,
        device=device,
        direction=direction,
        metrics=timed_on(device),
        options=(("sizes", sizes), ("activation", "relu"), ("bias", "yes")),
        light=light,
    )
