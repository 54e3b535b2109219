"""CUDA C++ backend of linear_act for Hopper: TMA, wgmma, epilogue hidden under the next tile.

``gemm.cu`` holds the device source; this file chooses a tile configuration, compiles it with NVRTC
(once per configuration and process), prepares TMA descriptors and launches. Accumulation is in
float32, every element is written by exactly one block in a fixed order: results are deterministic.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear.cuda.gemm_config import Config, config_for, writes_directly
from fastlinear.kernels.cuda.hopper import (
    ARCH,
    BK,
    EPILOGUE,
    HALF_DTYPES,
    THREADS,
    EarlyLaunch,
    device_source,
    operand_layout,
)
from fastlinear.kernels.cuda.prepared import Place, Plans, Prepared
from fastlinear.native import cuda_driver as driver

_SOURCE = Path(__file__).with_name("gemm.cu")
_KERNEL = "linear_act_gemm"
_MAX_SIZE = 1 << 30  # tile coordinates are 32-bit


def reason_not(
    M: int,
    K: int,
    N: int,
    dtype: torch.dtype,
    x_strides: tuple[int, ...],
    w_strides: tuple[int, ...],
    capability: tuple[int, int] | None,
) -> str | None:
    """Why this backend cannot serve the problem, or None. Pure: never touches CUDA.

    Args:
        M, K, N: x is (M, K), weight is (N, K).
        dtype: of x, weight and bias.
        x_strides, w_strides: element strides of the two matrices.
        capability: the device's compute capability; None without a CUDA device.
    """
    if capability is None:
        return "needs a CUDA device"
    if tuple(capability) != (9, 0):
        return f"needs compute capability 9.0 (Hopper), not {capability[0]}.{capability[1]}"
    if dtype not in HALF_DTYPES:
        return f"needs bfloat16 or float16, not {dtype}"
    if min(M, K, N) < 1:
        return "an empty dimension"
    if max(M, K, N) > _MAX_SIZE:
        return f"sizes must stay below 2^30, got M={M}, K={K}, N={N}"
    for name, shape, strides in (("x", (M, K), x_strides), ("weight", (N, K), w_strides)):
        if operand_layout(shape, strides) is None:
            return (
                f"{name} of shape {shape} has strides {tuple(strides)}: one must be 1 and the "
                "other a multiple of 8 at which nothing overlaps"
            )
    return None


def source(
    config: Config,
    dtype: torch.dtype,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    a_mn: bool = False,
    b_mn: bool = False,
    direct: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation; ``direct``: y has odd rows."""
    macros = {
        "BM": config.bm,
        "STAGES": config.stages,
        "OUT_BUFS": config.out_bufs,
        "CLUSTER": config.cluster,
        "PINGPONG": int(config.pingpong),
        "GROUP_M": config.group_m,
        "HAS_BIAS": int(has_bias),
        "SAVE": int(save_pre),
        "DIRECT": int(direct),
        "BY_ROWS": 0,
    }
    text = device_source(EPILOGUE, macros, config.bn, dtype, activation, a_mn, b_mn)
    return text + _SOURCE.read_text()


class _Plan:
    """One prepared launch: fixed shapes and layouts, any addresses."""

    def __init__(
        self,
        config: Config,
        a: Tensor,
        b: Tensor,
        out: Tensor,
        bias: Tensor | None,
        activation: str,
        save_pre: bool,
    ) -> None:
        (M, K), N = a.shape, b.shape[0]
        dtype, device = HALF_DTYPES[a.dtype], a.device.index
        direct = writes_directly(N)
        a_mn, a_stride = operand_layout(a.shape, a.stride())  # type: ignore[misc]
        b_mn, b_stride = operand_layout(b.shape, b.stride())  # type: ignore[misc]
        kernel = _kernel(
            config, a.dtype, activation, bias is not None, save_pre, a_mn, b_mn, direct, device
        )

        def operand(t: Tensor, mn: bool, stride: int, box: int) -> driver.TensorMap:
            rows, cols = (K, t.shape[0]) if mn else (t.shape[0], K)
            return driver.TensorMap(dtype, rows, cols, stride, box, 64, t.data_ptr(), device)

        a_map = operand(a, a_mn, a_stride, BK if a_mn else config.bm)
        b_map = operand(b, b_mn, b_stride, (BK if b_mn else config.bn) // config.cluster)
        of_y: Place = ctypes.c_void_p(0)
        of_pre: Place = ctypes.c_void_p(0)
        maps = [a_map, a_map]  # read by no kernel that gets addresses
        addresses = [of_y, of_pre, ctypes.c_int(M)]
        if not direct:
            maps = [driver.TensorMap(dtype, M, N, N, 16, 64, out.data_ptr(), device) for _ in "yp"]
            (of_y, of_pre), addresses = maps, []
        of_bias = ctypes.c_void_p(0)
        tiles_m, tiles_n = -(-M // (config.bm * config.cluster)), -(-N // config.bn)
        launch = EarlyLaunch(
            kernel,
            THREADS,
            config.cluster,
            [
                a_map,
                b_map,
                *maps,
                of_bias,
                ctypes.c_int(N),
                ctypes.c_int(tiles_m),
                ctypes.c_int(tiles_n),
                ctypes.c_int(-(-K // BK)),
                *addresses,
            ],
        )
        launch.set_grid(min(tiles_m * tiles_n, launch.max_clusters()) * config.cluster)
        places = [(a_map, 0), (b_map, 1), (of_y, 2), (of_pre, 3), (of_bias, 4)]
        self.run = Prepared(launch, device, places, {4: 3})  # a, b, y, pre, bias


_kernels: dict[tuple[object, ...], driver.Kernel] = {}
_plans: Plans[_Plan] = Plans()


def _kernel(
    config: Config,
    dtype: torch.dtype,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    a_mn: bool,
    b_mn: bool,
    direct: bool,
    device: int,
) -> driver.Kernel:
    key = (config, dtype, activation, has_bias, save_pre, a_mn, b_mn, direct, device)
    kernel = _kernels.get(key)
    if kernel is None:
        text = source(config, dtype, activation, has_bias, save_pre, a_mn, b_mn, direct)
        cubin = driver.compile_cubin(text, "gemm.cu", ARCH)
        kernel = _kernels[key] = driver.Kernel(cubin, _KERNEL, config.shared_bytes, device)
    return kernel


def gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    activation: str = "none",
    save_pre: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """act(a bᵀ + bias) with either operand in either layout.

    Args:
        a: (M, K) bfloat16 or float16; one stride 1, the other a multiple of 8.
        b: (N, K), likewise.
        bias: (N,) of the same dtype, or None.
        activation: a public activation name.
        save_pre: also return a bᵀ + bias.
        config: tile configuration; chosen by :func:`config_for` when None.

    Returns:
        (out, pre): (M, N) contiguous; pre is None unless asked for.

    Raises:
        UnsupportedError: where :func:`reason_not` gives a reason.
    """
    index = a.device.index
    if a.data_ptr() % 16:
        a = a.clone()
    if b.data_ptr() % 16:
        b = b.clone()
    if bias is not None and (bias.stride(0) != 1 or bias.data_ptr() % 4):
        bias = bias.clone(memory_format=torch.contiguous_format)
    key = (
        a.shape,
        b.shape[0],
        a.stride(),
        b.stride(),
        a.dtype,
        bias is None,
        activation,
        save_pre,
        config,
        index,
    )
    out = a.new_empty((a.shape[0], b.shape[0]))
    saved = torch.empty_like(out) if save_pre else None
    plan = _plans.of(key, lambda: _new_plan(a, b, out, bias, activation, save_pre, config))
    plan.run(a, b, out, saved, bias)
    return out, saved


def _new_plan(
    a: Tensor,
    b: Tensor,
    out: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    config: Config | None,
) -> _Plan:
    (M, K), N = a.shape, b.shape[0]
    capability = torch.cuda.get_device_capability(a.device) if a.is_cuda else None
    reason = reason_not(M, K, N, a.dtype, a.stride(), b.stride(), capability)
    if reason is None and config is not None:
        reason = config.invalid()
    if reason is not None:
        raise UnsupportedError(
            "linear_act (cuda backend)",
            "a problem this backend serves",
            reason,
            "Choose another backend or leave the choice to dispatch.",
        )
    driver.make_current(a.device.index)
    with torch.cuda.device(a.device), driver.loading_allowed():
        return _Plan(
            config or config_for(M, K, N, save_pre, activation),
            a,
            b,
            out,
            bias,
            activation,
            save_pre,
        )


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """y = act(x weightᵀ + bias), and the pre-activation in the input's dtype if asked.

    Args:
        x: (M, K) bfloat16 or float16, M > 0.
        weight: (N, K), either dimension contiguous.
        bias: (N,) or None.
        activation: a public activation name.
        save_pre: also return x weightᵀ + bias.

    Returns:
        (y, pre): both (M, N) contiguous; pre is None unless asked for.

    Raises:
        UnsupportedError: where :func:`reason_not` gives a reason.
    """
    if activation == "none":
        y, _ = gemm(x, weight, bias)
        return y, y if save_pre else None
    return gemm(x, weight, bias, activation, save_pre)
