"""Experiment ``strassen``: chains of four wide layers, where Strassen's scheme should pay."""

from __future__ import annotations

from benchmarks.harness.case import Case, timed_on

_LAYERS = 4
_CUDA = (
    (4096, 2048),
    (4096, 4096),
    (4096, 8192),
    (16384, 2048),
    (16384, 4096),
    (4097, 4095),
    (2048, 2048),
    (1024, 2048),
    (4096, 1024),
)
_CPU = ((512, 1024), (1024, 2048))
_QUICK = ((64, 128), (65, 127))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cells for a device type, where it should pay before where it does not."""
    cuda = device == "cuda"
    cells = _QUICK if quick else _CUDA if cuda else _CPU
    return [
        Case(
            experiment="strassen",
            family="mlp",
            dims=(("M", m), ("L", _LAYERS), ("H", h)),
            dtype="float32",
            device=device,
            direction="forward",
            metrics=timed_on(device),
            options=(("activation", "relu"), ("bias", "yes"), ("caches", "warm")),
            light=quick,
        )
        for m, h in cells
    ]
