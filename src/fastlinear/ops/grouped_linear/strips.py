"""Forward of many narrow groups on Hopper, in CUDA C++: ``strips.cu``.

A few groups' columns that lie side by side, a strip, begin and end at 16 bytes where those of one
group need not: 4 groups of 100 16-bit numbers are 800 bytes. Rows of strips go through the copy
engine, and the weights stay in registers.
"""

from __future__ import annotations

import ctypes
import threading
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.grouped_linear import layout as layouts

ARCH = "sm_90a"
_SOURCE = Path(__file__).with_name("strips.cu")
_KERNEL = "grouped_linear_strips"
_ACTIVATIONS = (
    *("none", "relu", "relu2", "silu", "gelu", "gelu_tanh", "sigmoid", "tanh"),
    *("quick_gelu", "leaky_relu"),
)
_ROWS = 32
_SIZE = 2  # bytes of a number
_SHARED = 228 * 1024  # of a multiprocessor
_RESERVED = 1280  # bytes of a block: the system's, and the barriers
_MOST = 2**23
_SERVICE_WARPS = 2
_MAX_PLANS = 1024
_WEIGHT_REGISTERS = 112
_MAX_WARPS = 14
_HALF_WARPS = 6


@dataclass(frozen=True)
class StripsConfig:
    """One way to launch the kernel.

    Attributes:
        groups: groups of a strip.
        parts: warps that share the outputs of a group.
        stages, y_stages: tiles of x and of y in shared memory.
        blocks: blocks of a multiprocessor.
        waves: how often the launch fills the chip.
    """

    groups: int
    parts: int
    stages: int = 4
    blocks: int = 1
    waves: int = 1
    y_stages: int = 2


def _pitch(row_bytes: int) -> int:
    """Bytes between rows in shared memory such that 8 rows of 16 bytes share no bank."""
    pitch = row_bytes
    while pitch % 32 != 16:
        pitch += 16
    return pitch


def shared_bytes(config: StripsConfig, k: int, n: int, save_pre: bool) -> int:
    """Dynamic shared memory of a block."""
    x, y = (_ROWS * _pitch(config.groups * width * _SIZE) for width in (k, n))
    return config.stages * x + config.y_stages * y * (2 if save_pre else 1)


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    config: StripsConfig,
) -> str:
    """The complete CUDA C++ source of one specialisation."""
    macros = {
        "IS_BF16": int(dtype is torch.bfloat16),
        "K": k,
        "N": n,
        "P": config.groups,
        "PARTS": config.parts,
        "NT": -(-n // (8 * config.parts)),
        "STAGES": config.stages,
        "Y_STAGES": config.y_stages,
        "BLOCKS": config.blocks,
        "X_PITCH": _pitch(config.groups * k * _SIZE),
        "Y_PITCH": _pitch(config.groups * n * _SIZE),
        "ACT": _ACTIVATIONS.index(activation),
        "HAS_BIAS": int(has_bias),
        "SAVE_PRE": int(save_pre),
    }
    return "".join(f"#define {name} {v}\n" for name, v in macros.items()) + _SOURCE.read_text()


@cache
def _kernel(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    config: StripsConfig,
    device: int,
) -> driver.Kernel:
    text = source(dtype, k, n, activation, has_bias, save_pre, config)
    cubin = driver.compile_cubin(text, "strips.cu", ARCH)
    shared = shared_bytes(config, k, n, save_pre)
    return driver.Kernel(cubin, _KERNEL, shared, device)


@lru_cache(maxsize=1024)
def strips_config(groups: int, k: int, n: int, save_pre: bool) -> StripsConfig | None:
    """The configuration for such groups of 16-bit numbers; None where no strip of them fits.

    On an H200 two blocks of 2 groups of 100 to 100 features are as fast as one of 4; more stages
    of y than of x are a little faster than the reverse.
    """
    most = _WEIGHT_REGISTERS // (2 * -(-k // 16))  # each step takes two of a tile of 8 outputs
    if k % 2 or n % 2 or most < 1:
        return None
    sizes = (p for p in (1, 2, 4, 8) if groups % p == 0 and p * k % 8 == 0 and p * n % 8 == 0)
    strip = next(sizes, None)
    tiles = -(-n // 8)
    if strip is None:
        return None
    fewest = -(-tiles // most)
    parts = min(fewest, fewest + 1, key=lambda p: p * -(-tiles // p))
    warps = strip * parts
    if warps > _MAX_WARPS:
        return None
    for stages, y_stages in ((3, 5), (3, 4), (3, 3), (3, 2), (2, 2)):
        blocks = 2 if warps <= _HALF_WARPS else 1
        config = StripsConfig(strip, parts, stages, blocks, 1, y_stages)
        if (shared_bytes(config, k, n, save_pre) + _RESERVED) * blocks <= _SHARED:
            return config
    return None


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a forward Problem, or None."""
    if p.device != "cuda":
        return "its kernel runs on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.cuda.get_device_capability() != (9, 0):
        return "its kernel is written for compute capability 9.0"
    if p.dtype not in ("bfloat16", "float16"):
        return f"serves bfloat16 and float16, not {p.dtype}"
    if (p.option("order"), p.option("x"), p.option("w")) != ("tokens", "dense", "dense"):
        return "serves dense tensors, tokens first"
    groups, k, n = p.dim("G"), p.dim("K"), p.dim("N")
    if strips_config(groups, k, n, True) is None:
        return f"no strip of {groups} groups of {k} to {n} features fits: 16 bytes, registers"
    if max(p.dim("M"), groups * k, groups * n) > _MOST:
        return f"sizes must stay below {_MOST}"
    return None


def serves(x: Tensor, weight: Tensor, bias: Tensor | None, order: str) -> bool:
    """Whether the kernel takes such tensors: tokens first, dense groups, rows at 16 bytes."""
    batch, _, groups, k = x.shape
    return (
        batch == 1
        and x.element_size() == 2
        and order == "tokens"
        and (x.stride(3), x.stride(2)) == (1, k)
        and x.stride(1) * x.element_size() % 16 == 0
        and x.stride(1) >= groups * k
        and x.data_ptr() % 16 == 0
        and weight.is_contiguous()
        and weight.data_ptr() % 4 == 0
        and (bias is None or (bias.is_contiguous() and bias.data_ptr() % 4 == 0))
    )


_plans: dict[Any, Strips] = {}


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    order: str,
    *,
    config: StripsConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x_g W_gᵀ + b_g) in one kernel, float32 accumulation, deterministic.

    Args:
        x: (B, L, G, K); bfloat16 or float16. What ``serves`` refuses goes to the Triton
            backend.
        weight: (G, N, K), dtype of x.
        bias: (G, N), or None.
        activation: name of the activation.
        save_pre: also return the pre-activation.
        order: how the results lie in memory, a name in ``layout.ORDERS``.
        config: launch configuration; None picks ``strips_config``.

    Returns:
        y (B, L, G, N) in x's dtype; the pre-activation likewise, or None.
    """
    groups, n, k = weight.shape
    if config is None:
        config = strips_config(groups, k, n, save_pre)
    if config is None or not x.numel() * weight.numel() or not serves(x, weight, bias, order):
        from fastlinear.ops.grouped_linear import triton

        return triton.forward(x, weight, bias, activation, save_pre, order)
    key = (
        *(x.shape, x.stride(), n, x.dtype, x.device, bias is None),
        *(activation, save_pre, config),
    )
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _MAX_PLANS:
            _plans.clear()
        plan = _plans[key] = Strips(x, weight, bias, activation, save_pre, config)
    y = layouts.empty((*x.shape[:3], n), order, x, x.dtype)
    pre = torch.empty_like(y) if save_pre else None
    plan(x, weight, bias, y, pre)
    return y, pre


class Strips:
    """One prepared launch, for x, weight and bias of one kind at any address."""

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        save_pre: bool,
        config: StripsConfig,
    ) -> None:
        _, m, groups, k = x.shape
        n = weight.shape[1]
        assert x.device.index is not None
        self._device: int = x.device.index
        driver.make_current(self._device)
        with driver.loading_allowed():
            kernel = _kernel(
                x.dtype, k, n, activation, bias is not None, save_pre, config, self._device
            )
        strips = groups // config.groups
        slots = device_facts(x.device).units * config.blocks * config.waves
        chunks = max(1, min(slots // strips, -(-m // _ROWS)))
        self._lock = threading.Lock()
        self._pointers = tuple(ctypes.c_void_p(0) for _ in range(5))
        numbers = (
            ctypes.c_int(m),
            ctypes.c_uint64(x.stride(1) * x.element_size()),
            ctypes.c_int(strips),
            ctypes.c_int(chunks),
        )
        threads = 32 * (config.groups * config.parts + _SERVICE_WARPS)
        self._launch = driver.Launch(kernel, threads, 1, [*self._pointers, *numbers])
        self._launch.set_grid(strips * chunks)

    def __call__(self, *tensors: Tensor | None) -> None:
        """Launch on (x, weight, bias, y, pre); bias and pre may be None."""
        if self._device != torch._C._cuda_getDevice():
            with torch.cuda.device(self._device):
                self(*tensors)
            return
        with self._lock:
            for pointer, tensor in zip(self._pointers, tensors, strict=True):
                pointer.value = 0 if tensor is None else tensor.data_ptr()
            self._launch.run(torch._C._cuda_getCurrentRawStream(self._device))
