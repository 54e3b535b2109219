"""Experiment ``overhead``: chains of Linear + ReLU over layers, batch and hidden width.

The grid of the GPU-overheads document, layers {8, 4, 2, 1} x batch {128 … 2} x hidden {128 …
4096}, with batches and a width beyond it. One input set and warm caches, as there.
"""

from __future__ import annotations

from fastlinear.bench.case import Case

LAYERS = (8, 4, 2, 1)
BATCHES = (128, 64, 32, 16, 8, 4, 2, 512, 2048, 8192)
WIDTHS = (64, 128, 256, 512, 1024, 2048, 4096)
COMPILED = {
    "compile": BATCHES,
    "compile_reduce_overhead": BATCHES,
    "compile_max_autotune": (64, 2048),
}
"""torch.compile's mode → the batches it takes part at.

Default and reduce-overhead compile in seconds, max-autotune in half a minute a product: it is shown
once where launches dominate and once where the products do. ``--peer`` has it in every cell.
"""
_ON_CPU = {"compile": (64,), "compile_max_autotune": (64,)}  # C++ compilers take longer
_MOST_CPU_FLOPS = 4e10  # about a second a call on a few cores
_QUICK = ((4, 16, 64), (4, 2, 64), (2, 64, 128))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cells for a device type, the document's first; no peer that compiles when quick."""
    dtypes = ("float32", "bfloat16") if device == "cuda" else ("float32",)
    cells = _QUICK if quick else tuple((n, m, h) for m in BATCHES for n in LAYERS for h in WIDTHS)
    compiled = COMPILED if device == "cuda" else _ON_CPU
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
            light=quick,
            without=tuple(name for name, batches in compiled.items() if m not in batches),
        )
        for dtype in dtypes
        for layers, m, h in cells
        if device == "cuda" or 2.0 * m * layers * h * h <= _MOST_CPU_FLOPS
    ]
