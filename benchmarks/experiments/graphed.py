"""Experiment ``graphed``: a chain of linears and a transformer block from CUDA graphs.

Inference and a training step in wall time, which is what launches cost. One input set, warm caches,
as for a model that runs over and over.
"""

from __future__ import annotations

from benchmarks.harness.case import Case

_MLP = (("M", 64), ("L", 8), ("H", 256))
_BLOCK = (("B", 1), ("T", 64), ("H", 512), ("L", 1))
_QUICK = ((("M", 8), ("L", 2), ("H", 64)), (("B", 1), ("T", 8), ("H", 64), ("L", 1)))
_WARM = (("caches", "warm"),)


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type; quick ones are small and leave the compiler out."""
    mlp, block = _QUICK if quick else (_MLP, _BLOCK)
    chain = (("activation", "relu"), ("bias", "yes"), *_WARM)
    return [
        Case(
            experiment="graphed",
            family="graphed",
            dims=dims,
            dtype="bfloat16" if device == "cuda" else "float32",
            device=device,
            direction=direction,
            metrics=("wall",),
            options=options,
            light=quick,
        )
        for direction in ("forward", "step")
        for dims, options in ((mlp, chain), (block, (("model", "block"), *_WARM)))
    ]
