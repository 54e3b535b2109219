"""Experiment ``ragged``: rows sorted by group, as mixtures of experts have them.

Each size comes with balanced groups, with groups as unequal as 1/rank, and with most groups empty.
"""

from __future__ import annotations

from benchmarks.harness.case import BOTH_MODES, Case, timed_on

# M rows of all groups, G, K, N
_CUDA = (
    (512, 8, 512, 512),
    (8192, 8, 512, 512),
    (4096, 64, 1024, 512),
    (64, 8, 4096, 14336),
    (2048, 8, 4096, 14336),
    (4096, 8, 1024, 4096),
)
_CPU = ((64, 8, 256, 256), (1024, 8, 256, 256), (512, 32, 128, 256))
_QUICK = ((64, 4, 32, 48),)
_SIZES = ("balanced", "skewed", "sparse")
_ACTIVATED = (8192, 8, 512, 512)
_SINGLE = ((8192, 8, 512, 512), (65536, 64, 32, 32))  # in float32


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type, most telling first."""
    sizes = _QUICK if quick else _CUDA if device == "cuda" else _CPU
    dtype = "bfloat16" if device == "cuda" and not quick else "float32"
    found = [
        _case(*dims, how, dtype, device, d, light=how != "skewed")
        for how in _SIZES
        for dims in sizes
        for d in BOTH_MODES
    ]
    if device == "cuda" and not quick:
        act = ("skewed", dtype, device)
        found += [_case(*_ACTIVATED, *act, d, "gelu_tanh", "yes") for d in BOTH_MODES]
        single = ("balanced", "float32", device)
        found += [_case(*dims, *single, d, light=True) for dims in _SINGLE for d in BOTH_MODES]
    return found


def _case(
    m: int,
    groups: int,
    k: int,
    n: int,
    sizes: str,
    dtype: str,
    device: str,
    direction: str,
    activation: str = "none",
    bias: str = "no",
    *,
    light: bool = False,
) -> Case:
    return Case(
        experiment="ragged",
        family="ragged_linear",
        dims=(("M", m), ("G", groups), ("K", k), ("N", n)),
        dtype=dtype,
        device=device,
        direction=direction,
        metrics=timed_on(device),
        options=(("sizes", sizes), ("activation", activation), ("bias", bias)),
        light=light,
    )
