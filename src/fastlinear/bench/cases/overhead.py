"""Experiment ``overhead``: chains of Linear + ReLU over layers, batch and hidden width.

The grid of the GPU-overheads document, layers {8, 4, 2, 1} x batch {128 … 2} x hidden {128 …
4096}, with batches and a width beyond it. One input set and warm caches, as there.
``torch.compile`` takes seconds to a minute a cell, so it takes part at one batch size unless asked
for by name.
"""

from __future__ import annotations

from fastlinear.bench.case import Case

LAYERS = (8, 4, 2, 1)
BATCHES = (128, 64, 32, 16, 8, 4, 2, 512, 2048, 8192)
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
_COMPILED_BATCH = 64
_MOST_CPU_FLOPS = 4e10  # about a second a call on a few cores
_QUICK = ((4, 16, 64), (4, 2, 64), (2, 64, 128))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cells for a device type, the document's first; no peer that compiles when quick."""
    dtypes = ("float32", "bfloat16") if device == "cuda" else ("float32",)
    cells = _QUICK if quick else tuple((n, m, h) for m in BATCHES for n in LAYERS for h in WIDTHS)
    return [
        Case(
            experiment="overhead",
            family="mlp",
            dims=(("M", m), ("L", layers), ("H", h)),
            dtype=dtype,
            device=device,
            direction="forward",
            metrics=("wall", "device") if device == "cuda" else ("wall",),
            options=(("activation", "relu"), ("bias", "yes"), ("caches", "warm")),
            light=quick or m != _COMPILED_BATCH,
        )
        for dtype in dtypes
        for layers, m, h in cells
        if device == "cuda" or 2.0 * m * layers * h * h <= _MOST_CPU_FLOPS
    ]
