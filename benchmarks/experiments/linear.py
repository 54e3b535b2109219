"""Experiment ``linear``: Linear with its activation, alone and in chains.

CUDA: single layers, forward and forward+backward. CPU: chains of 8 x (Linear+ReLU) and single
layers in float32, few rows in 16 bits. The layer without activation is the healthy baseline, where
nothing is to be gained; tiny and single-row shapes are there because they are hard to win, odd ones
because rows that begin anywhere are slow in every library.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.harness.case import Case

_HEADLINE = ((8192, 768, 3072), (8192, 1024, 4096), (8192, 4096, 4096))
_SMALL = ((64, 1024, 1024), (1, 4096, 4096))
_FLOAT32 = ((16384, 1024, 4096), (65536, 256, 256), (8192, 8192, 8192), (1024, 1024, 1024))
_ODD = ((4096, 4095, 4095), (8192, 770, 3070))
_DTYPES = ("bfloat16", "float16", "float32")
_FEW_ROWS = ((1, 1024, 1024), (1, 4096, 4096), (8, 1024, 4096), (16, 4096, 1024), (32, 1024, 4096))
_CHAIN_WIDTHS = (1024, 256, 64)
_CHAIN_BATCHES = (64, 1024, 1)


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type, most telling first."""
    if device == "cuda":
        return _cuda_quick() if quick else _cuda()
    return _cpu_quick() if quick else _cpu()


def _cuda() -> list[Case]:
    found = []
    for dtype in _DTYPES:
        for sizes in _HEADLINE:
            found += _pair(*sizes, dtype, "gelu_tanh", headline=True)
        for sizes in _SMALL:
            found += _pair(*sizes, dtype, "gelu_tanh")
        for activation in ("none", "relu", "gelu", "silu"):
            found += _pair(*_HEADLINE[0], dtype, activation)
            found += _pair(*_SMALL[0], dtype, activation)
        for sizes in _ODD:
            found += _pair(*sizes, dtype, "gelu_tanh")
    for sizes in _FLOAT32:
        found += _pair(*sizes, "float32", "gelu_tanh")
    return found


def _cuda_quick() -> list[Case]:
    found = _pair(1024, 768, 3072, "bfloat16", "gelu_tanh")
    found += _pair(1024, 768, 3072, "bfloat16", "none")
    found += _pair(64, 1024, 1024, "float32", "relu")
    return [replace(c, light=True) for c in found]


def _cpu() -> list[Case]:
    found = [_chain(h, m, "forward") for h in _CHAIN_WIDTHS for m in _CHAIN_BATCHES]
    found += [_chain(1024, m, "step") for m in (64, 1024)]
    for sizes in ((512, 768, 3072), (128, 768, 768)):
        for activation in ("gelu_tanh", "gelu", "none"):
            for direction in ("forward", "forward+backward"):
                found.append(_on_cpu(*sizes, 1, activation, direction))
    for dtype in ("bfloat16", "float16"):
        found += [_on_cpu(*sizes, 1, "silu", "forward", dtype) for sizes in _FEW_ROWS]
    return found


def _cpu_quick() -> list[Case]:
    found = [
        _chain(256, 64, "forward"),
        _chain(64, 1, "forward"),
        _chain(256, 64, "step"),
        _on_cpu(128, 256, 512, 1, "gelu_tanh", "forward"),
        _on_cpu(128, 256, 512, 1, "gelu_tanh", "forward+backward"),
        _on_cpu(128, 256, 512, 1, "none", "forward"),
    ]
    return [replace(c, light=True) for c in found]


def _chain(width: int, batch: int, direction: str) -> Case:
    return _on_cpu(batch, width, width, 8, "relu", direction)


def _pair(
    m: int, k: int, n: int, dtype: str, activation: str, *, headline: bool = False
) -> list[Case]:
    """Forward and forward+backward of one layer on CUDA."""
    timed = ("device", "wall")
    whole = (*timed, "first_call", "peak_memory") if headline else timed
    full = dtype == "bfloat16" and headline
    sizes = (m, k, n, 1)
    return [
        _case(sizes, dtype, "cuda", activation, "forward", timed, light=not full),
        _case(sizes, dtype, "cuda", activation, "forward+backward", whole, light=not full),
    ]


def _on_cpu(
    m: int,
    k: int,
    n: int,
    layers: int,
    activation: str,
    direction: str,
    dtype: str = "float32",
) -> Case:
    sizes = (m, k, n, layers)
    return _case(sizes, dtype, "cpu", activation, direction, ("wall",), light=False)


def _case(
    sizes: tuple[int, int, int, int],
    dtype: str,
    device: str,
    activation: str,
    direction: str,
    metrics: tuple[str, ...],
    *,
    light: bool,
) -> Case:
    return Case(
        experiment="linear",
        family="linear_act",
        dims=tuple(zip(("M", "K", "N", "L"), sizes, strict=True)),
        dtype=dtype,
        device=device,
        direction=direction,
        metrics=metrics,
        options=(("activation", activation), ("bias", "yes")),
        light=light,
    )
