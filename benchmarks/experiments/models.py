"""Experiment ``models``: whole transformers models in inference, before and after ``optimize_``.

Built from their published configurations with random weights; nothing is downloaded.
"""

from __future__ import annotations

from benchmarks.harness.case import Case, timed_on

_SHAPES = (
    ("gpt2", 4, 128),
    ("gpt2", 1, 128),
    ("bert", 4, 128),
    ("bert", 1, 128),
    ("vit", 1, 197),
    ("vit", 4, 197),
    ("smollm", 4, 128),
    ("smollm", 1, 128),
    ("t5", 4, 128),
    ("t5", 1, 128),
)
_QUICK = (_SHAPES[1], _SHAPES[7])
_LAYERS = {"smollm": 30}


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type; quick ones have two layers instead of all."""
    dtypes = ("bfloat16", "float32") if device == "cuda" else ("float32",)
    shapes = _QUICK if quick else _SHAPES
    return [
        Case(
            experiment="models",
            family="model",
            dims=(("B", batch), ("T", tokens), ("L", 2 if quick else _LAYERS.get(name, 12))),
            dtype=dtype,
            device=device,
            direction="forward",
            metrics=timed_on(device),
            options=(("model", name),),
            light=quick,
        )
        for dtype in dtypes
        for name, batch, tokens in shapes
    ]
