"""Experiment ``overhead``: chains of Linear + ReLU over layers, batch and hidden width.

The grid of the GPU-overheads document, layers {8, 4, 2, 1} x batch {128 … 2} x hidden {128 …
4096}, with batches and a width beyond it, without gradients; then forward and backward at four of
the batches. One input set and warm caches, as there.
"""

from __future__ import annotations

from benchmarks.harness.case import BOTH_MODES, Case

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
TRAINED = (64, 8, 512, 2048)
"""Batches of the cells with gradients (of x, weights and biases)."""
_MOST_CPU_FLOPS = 4e10
_TOO_LARGE = "more than 4e10 floating-point operations a call: about a second on a few cores"
_QUICK = ((4, 16, 64), (4, 2, 64), (2, 64, 128))
_QUICK_TRAINED = _QUICK[:1]


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cells for a device type, the document's first; no peer that compiles when quick."""
    dtypes = ("float32", "bfloat16") if device == "cuda" else ("float32",)
    return [
        _case(device, dtype, direction, cell, quick)
        for direction in BOTH_MODES
        for dtype in dtypes
        for cell in _cells(direction, quick)
    ]


def _cells(direction: str, quick: bool) -> tuple[tuple[int, int, int], ...]:
    """(layers, batch, width) of every cell."""
    forward = direction == "forward"
    if quick:
        return _QUICK if forward else _QUICK_TRAINED
    batches = BATCHES if forward else TRAINED
    return tuple((n, m, h) for m in batches for n in LAYERS for h in WIDTHS)


def _case(device: str, dtype: str, direction: str, cell: tuple[int, int, int], quick: bool) -> Case:
    layers, m, h = cell
    compiled = COMPILED if device == "cuda" else _ON_CPU
    flops = 2.0 * m * layers * h * h * (1 if direction == "forward" else 3)
    return Case(
        experiment="overhead",
        family="mlp",
        dims=(("M", m), ("L", layers), ("H", h)),
        dtype=dtype,
        device=device,
        direction=direction,
        metrics=("wall", "device") if device == "cuda" else ("wall",),
        options=(("activation", "relu"), ("bias", "yes"), ("caches", "warm")),
        light=quick,
        without=tuple(name for name, batches in compiled.items() if m not in batches),
        left_out=_TOO_LARGE if device == "cpu" and flops > _MOST_CPU_FLOPS else "",
    )
