"""Experiment ``pseudo-linear``: a linear layer against one whose weight is a diagonal.

The pseudo-Linear document's widths, forward and training, with its ReLU and without, at its large
batch and at a small one, and a single row, from the narrowest there is. Then a few of them with
other activations and dtypes, and as a scaled branch beside a residual, as LayerScale is.
Data are made beforehand, and every contender computes x ∘ w + b alone.
"""

from __future__ import annotations

from benchmarks.harness.case import Case

_WIDTHS = (128, 256, 512, 1024, 2048, 4096, 8192, 16384, 24576)
_LARGE, _SMALL = 32768, 64
_ROW = (16, 1024, 16384)  # widths of a single row
_MOST_NUMBERS_ON_CPU = 1 << 25
# Of the full layer's forward: a quarter of a second on a few cores. The next width's weight and
# gradients take 24 GB with the float64 oracle's.
_MOST_CPU_FLOPS = 7e10
_QUICK = ((64, 128), (64, 512), (2048, 256))
_FEW = tuple((m, k) for m in (_LARGE, _SMALL) for k in (128, 1024, 4096))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type: the document's first, then the small batch, then with ReLU, then
    the other kinds of layer."""
    cuda = device == "cuda"
    whole = tuple((m, k) for m in (_LARGE, _SMALL) for k in _WIDTHS) + tuple((1, k) for k in _ROW)
    own = ("float32", "bfloat16") if cuda else ("float32",)
    others = ("float16",) if cuda else ("bfloat16", "float16")
    sizes = _QUICK if quick else whole
    kinds: list[tuple[str, str, tuple[str, ...], tuple[tuple[int, int], ...]]]
    kinds = [("none", "", own, sizes), ("relu", "", own, sizes)]
    if not quick:
        kinds += [("none", "", others, _FEW), ("none", "yes", own + others, _FEW)]
        kinds += [("gelu", "", own, _FEW), ("silu", "", own, _FEW)]
    return [
        Case(
            experiment="pseudo-linear",
            family="diagonal_linear",
            dims=(("M", m), ("K", k)),
            dtype=dtype,
            device=device,
            direction=direction,
            metrics=("wall", "device") if cuda else ("wall",),
            options=_options(activation, residual),
            light=quick,
        )
        for activation, residual, dtypes, sizes in kinds
        for dtype in dtypes
        for direction in ("forward", "forward+backward")
        for m, k in sizes
        if cuda or (m * k <= _MOST_NUMBERS_ON_CPU and 2.0 * m * k * k <= _MOST_CPU_FLOPS)
    ]


def _options(activation: str, residual: str) -> tuple[tuple[str, str], ...]:
    """Of a layer, which has a bias, or of a scaled branch, which has none."""
    if residual:
        return (("activation", activation), ("bias", "no"), ("residual", residual))
    return (("activation", activation), ("bias", "yes"))
