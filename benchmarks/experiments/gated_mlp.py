"""Experiment ``gated-mlp``: the gated MLPs of published models, whole, forward and with gradients.

The first cases are those that decide; then every model's sizes over numbers of tokens.
"""

from __future__ import annotations

from benchmarks.harness.case import BOTH_MODES, Case

# model → (K = N, H, activation)
MODELS: dict[str, tuple[int, int, str]] = {
    "small": (1024, 4096, "silu"),
    "wide": (2048, 8192, "silu"),
    "llama-7b": (4096, 11008, "silu"),
    "llama-70b": (8192, 28672, "silu"),
    "gemma-7b": (3072, 24576, "gelu_tanh"),
    "t5-v1.1-xl": (2048, 5120, "gelu_tanh"),
}
_DECISIVE = (("small", 4096), ("wide", 16384), ("llama-7b", 8192), ("llama-7b", 64))
_TOKENS = (16, 256, 4096, 16384)
# M, K, H
_CPU = ((256, 512, 2048), (64, 512, 2048), (1024, 512, 2048), (16, 1024, 4096), (1, 1024, 4096))
_CPU_FLOAT16 = ((16, 1024, 4096), (256, 512, 2048))
_QUICK = ((64, 128, 256), (8, 256, 512))


def cases(device: str, quick: bool = False) -> list[Case]:
    """The cases for a device type, most telling first."""
    if quick:
        return [_case(m, k, h, "float32", device, d) for m, k, h in _QUICK for d in BOTH_MODES]
    if device == "cuda":
        return _cuda()
    found = [
        _case(m, k, h, dtype, device, direction, light=dtype == "bfloat16")
        for dtype in ("float32", "bfloat16")
        for m, k, h in _CPU
        for direction in BOTH_MODES
    ]
    half = [_case(*sizes, "float16", device, "forward", light=True) for sizes in _CPU_FLOAT16]
    return [*found, *half]


def _cuda() -> list[Case]:
    decisive = [
        _case(m, *MODELS[name][:2], "bfloat16", "cuda", d, MODELS[name][2], bias=bias)
        for bias in ("no", "yes")
        for name, m in _DECISIVE
        for d in BOTH_MODES
    ]
    seen = {c.name for c in decisive}
    every = [
        _case(m, k, h, "bfloat16", "cuda", d, activation, light=True)
        for k, h, activation in MODELS.values()
        for m in _TOKENS
        for d in BOTH_MODES
    ]
    k, h, activation = MODELS["small"]
    others = [
        _case(4096, k, h, dtype, "cuda", d, activation, light=True)
        for dtype in ("float32", "float16")
        for d in BOTH_MODES
    ]
    return [*decisive, *(c for c in every if c.name not in seen), *others]


def _case(
    m: int,
    k: int,
    h: int,
    dtype: str,
    device: str,
    direction: str,
    activation: str = "silu",
    *,
    bias: str = "no",
    light: bool = False,
) -> Case:
    return Case(
        experiment="gated-mlp",
        family="gated_mlp",
        dims=(("M", m), ("K", k), ("H", h), ("N", k)),
        dtype=dtype,
        device=device,
        direction=direction,
        metrics=("device", "wall", "peak_memory") if device == "cuda" else ("wall",),
        options=(("activation", activation), ("bias", bias)),
        light=light,
    )
