"""Experiment ``linear-bias``: is the bias of ``nn.Linear`` a second kernel, and its cost."""

from __future__ import annotations

from benchmarks.harness.case import Case

_CUDA = (
    (8192, 768, 3072, "rows"),
    (8192, 768, 3072, "batch"),
    (8192, 768, 3072, "batch_strided"),
    (8192, 4096, 4096, "rows"),
    (64, 1024, 1024, "rows"),
    (1, 4096, 4096, "rows"),
)
_CPU = (
    (512, 768, 3072, "rows"),
    (512, 768, 3072, "batch"),
    (512, 768, 3072, "batch_strided"),
    (64, 256, 256, "rows"),
    (1, 1024, 1024, "rows"),
)
_QUICK = ((64, 256, 256, "rows"), (64, 256, 256, "batch_strided"))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type."""
    cuda = device == "cuda"
    shapes = _QUICK if quick else _CUDA if cuda else _CPU
    return [
        Case(
            experiment="linear-bias",
            family="linear",
            dims=(("M", m), ("K", k), ("N", n)),
            dtype=dtype,
            device=device,
            direction="forward",
            metrics=("kernels", "device", "wall") if cuda else ("kernels", "wall"),
            options=(("x", layout),),
        )
        for dtype in ("bfloat16", "float32")
        for m, k, n, layout in shapes
    ]
