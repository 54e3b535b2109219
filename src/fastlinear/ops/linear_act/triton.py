"""Portable Triton backend of linear_act: y = act(x Wᵀ + b), its gradients, on sm_80 and later.

Inputs are 2-D and already validated; validation, reshaping, autograd and selection live in the op.
Importing this file imports Triton, so it is imported lazily.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from fastlinear.core.device import device_facts
from fastlinear.core.precision import allows_tf32
from fastlinear.ops.linear_act.triton_config import (
    GemmConfig,
    config_for,
    grad_config_for,
    reason_not,
)
from fastlinear.ops.linear_act.triton_elementwise import _grad_pre_kernel, _sum_rows_kernel
from fastlinear.ops.linear_act.triton_gemm import (
    _gemm_pointer_kernel,
    _gemm_tma_kernel,
    _sum_slices_kernel,
)

__all__ = ["forward", "grad_input", "grad_pre", "grad_weight", "reason_not"]

Tensor = torch.Tensor

_INTERPRETED_UNITS = 3  # persistent programs under the CPU interpreter: each walks several tiles
_SPLIT_BYTES_LIMIT = 1 << 28  # largest float32 workspace of a split product


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    *,
    config: GemmConfig | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x Wᵀ + b) in one kernel, float32 accumulation, deterministic.

    Args:
        x: (M, K) of any strides; float32, bfloat16 or float16.
        weight: (N, K) of any strides, dtype of x.
        bias: (N,) contiguous, dtype of x, or None.
        activation: name of the activation.
        save_pre: also return the pre-activation.
        config: launch configuration; None picks ``config_for``.

    Returns:
        y (M, N) contiguous in x's dtype; pre-activation likewise, or None.
    """
    M, N = x.shape[0], weight.shape[0]
    y = _empty((M, N), x)
    pre = _empty((M, N), x) if save_pre else None
    _gemm(x, weight.t(), bias, y, pre, activation, config)
    return _rounded(y, x), None if pre is None else _rounded(pre, x)


def grad_pre(
    dy: Tensor, saved: Tensor | None, activation: str, need_bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """dpre = dy * act'(pre) and db = column sums of dpre, in one pass over M x N.

    Args:
        dy: (M, N) of any strides.
        saved: (M, N), columns contiguous: the output y for relu, leaky_relu, sigmoid and tanh, the
            pre-activation for the others, None for ``"none"``.
        activation: name of the activation.
        need_bias_grad: whether db is wanted.

    Returns:
        dpre (M, N) in dy's dtype (dy itself for ``"none"``), and db (N,) or None. db sums the
        float32 values in two fixed-order stages, so it is deterministic.
    """
    M, N = dy.shape
    identity = activation == "none"
    if identity and not need_bias_grad:
        return dy, None
    dpre = None if identity else _empty((M, N), dy)
    if M == 0 or N == 0:
        db = torch.zeros(N, dtype=dy.dtype, device=dy.device) if need_bias_grad else None
        return (dy if dpre is None else _rounded(dpre, dy)), db
    block_m, block_n = 16, 256
    # Long chunks amortise the reduction; short ones fill the chip.
    chunk_rows = block_m * max(1, min(8, M * (-(-N // block_n)) // (block_m * 1024)))
    chunks = -(-M // chunk_rows)
    part = db = None
    if need_bias_grad:
        part = torch.empty((chunks, N), dtype=torch.float32, device=dy.device)
        db = _empty((N,), dy)
    _grad_pre_kernel[(-(-N // block_n), chunks)](
        dy,
        None if identity else saved,
        dpre,
        part,
        M,
        N,
        dy.stride(0),
        dy.stride(1),
        0 if saved is None else saved.stride(0),
        chunk_rows,
        ACTIVATION=activation,
        MATH=_math(dy.dtype, dy.device, backward=True),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        num_warps=4,
    )
    if part is not None and db is not None:
        _sum_rows_kernel[(-(-N // 32),)](part, db, chunks, N, BLOCK_M=64, BLOCK_N=32, num_warps=4)
        db = _rounded(db, dy)
    return (dy if dpre is None else _rounded(dpre, dy)), db


def grad_input(dpre: Tensor, weight: Tensor, *, config: GemmConfig | None = None) -> Tensor:
    """dx = dpre W: (M, N) x (N, K) → (M, K) in dpre's dtype, float32 accumulation.

    Operands may have any strides. Deterministic: slices of N are summed in a fixed order.
    """
    return _grad_gemm(dpre, weight, config)


def grad_weight(dpre: Tensor, x: Tensor, *, config: GemmConfig | None = None) -> Tensor:
    """dW = dpreᵀ x: (N, M) x (M, K) → (N, K) in dpre's dtype, float32 accumulation.

    Operands may have any strides. Deterministic: slices of M are summed in a fixed order.
    """
    return _grad_gemm(dpre.t(), x, config)


def _grad_gemm(a: Tensor, b: Tensor, config: GemmConfig | None) -> Tensor:
    """a @ b with a (rows, depth) and b (depth, cols), split over depth when that pays."""
    rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
    out = _empty((rows, cols), a)
    if config is None:
        tma = _tma_operands(a, b)
        config = grad_config_for(rows, cols, depth, a.dtype, _capability(a.device), tma)
        config = _served(config, a, b, out)
    _gemm(a, b, None, out, None, "none", config)
    return _rounded(out, a)


def _gemm(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    pre: Tensor | None,
    activation: str,
    config: GemmConfig | None,
) -> None:
    """Launch out = act(a @ b + bias), a (rows, depth), b (depth, cols); pre, when given, too."""
    rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
    if rows == 0 or cols == 0:
        return
    if config is None:
        capability = _capability(a.device)
        tma = _tma_operands(a, b)
        config = _served(config_for(rows, depth, cols, a.dtype, capability, tma), a, b, out)
    steps = -(-depth // config.block_d)  # of the whole depth, then of one slice
    slice_steps = -(-steps // min(config.splits, max(steps, 1)))
    splits = -(-steps // slice_steps) if steps else 1
    split_depth = slice_steps * config.block_d
    split_rows, target = rows, out
    if splits > 1:
        split_rows = -(-rows // config.block_r) * config.block_r if config.kind == "tma" else rows
        target = torch.empty((splits * split_rows, cols), dtype=torch.float32, device=a.device)
    launch = _launch_tma if config.kind == "tma" else _launch_pointer
    launch(a, b, bias, target, pre, activation, config, splits, split_depth, split_rows)
    if splits > 1:
        size = rows * cols
        _sum_slices_kernel[(-(-size // 1024),)](
            target, out, size, split_rows * cols, SLICES=splits, BLOCK=1024, num_warps=4
        )


def _launch_pointer(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    pre: Tensor | None,
    activation: str,
    config: GemmConfig,
    splits: int,
    split_depth: int,
    split_rows: int,
) -> None:
    rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
    tiles = -(-rows // config.block_r) * -(-cols // config.block_c)
    _gemm_pointer_kernel[(tiles, splits)](
        a,
        b,
        bias,
        out,
        pre,
        rows,
        cols,
        depth,
        a.stride(0),
        a.stride(1),
        b.stride(0),
        b.stride(1),
        cols,
        split_depth,
        ACTIVATION=activation,
        MATH=_math(a.dtype, a.device),
        PRECISION=_dot_precision(a.dtype),
        BLOCK_R=config.block_r,
        BLOCK_C=config.block_c,
        BLOCK_D=config.block_d,
        GROUP_R=config.group_r,
        EVEN_DEPTH=depth % config.block_d == 0,
        UPCAST=a.device.type == "cpu",
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _launch_tma(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    out: Tensor,
    pre: Tensor | None,
    activation: str,
    config: GemmConfig,
    splits: int,
    split_depth: int,
    split_rows: int,
) -> None:
    rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
    r, c, d = config.block_r, config.block_c, config.block_d
    a_depth_major = a.stride(1) != 1
    b_depth_major = b.stride(0) != 1
    tiles = -(-rows // r) * -(-cols // c) * splits
    units = _INTERPRETED_UNITS if a.device.type == "cpu" else device_facts(a.device).units
    programs = min(tiles, units * config.programs_per_unit)
    out_block = [r, c // config.subtile]
    _gemm_tma_kernel[(programs,)](
        _descriptor(a.t(), [d, r]) if a_depth_major else _descriptor(a, [r, d]),
        _descriptor(b, [d, c]) if b_depth_major else _descriptor(b.t(), [c, d]),
        bias,
        _descriptor(out, out_block),
        None if pre is None else _descriptor(pre, out_block),
        rows,
        cols,
        depth,
        split_depth,
        split_rows,
        SPLITS=splits,
        PROGRAMS=programs,
        ACTIVATION=activation,
        MATH=_math(a.dtype, a.device),
        PRECISION=_dot_precision(a.dtype),
        BLOCK_R=r,
        BLOCK_C=c,
        BLOCK_D=d,
        GROUP_R=config.group_r,
        A_DEPTH_MAJOR=a_depth_major,
        B_DEPTH_MAJOR=b_depth_major,
        SUBTILE=config.subtile,
        FLATTEN=config.flatten,
        UPCAST=a.device.type == "cpu",
        num_warps=config.warps,
        num_stages=config.stages,
    )


def _descriptor(t: Tensor, block: list[int]) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), list(t.stride()), block)


def _served(config: GemmConfig, a: Tensor, b: Tensor, out: Tensor) -> GemmConfig:
    """The configuration, less a split whose workspace would be too large."""
    if config.splits * out.numel() * 4 > _SPLIT_BYTES_LIMIT:
        return replace(config, splits=1)
    return config


def _tma_operands(a: Tensor, b: Tensor) -> bool:
    """Whether TMA can read both operands and write rows of b's columns: 16-byte alignment."""
    return _tma_readable(a) and _tma_readable(b) and b.shape[1] * a.element_size() % 16 == 0


def _tma_readable(t: Tensor) -> bool:
    """One unit stride, the other a positive multiple of 16 bytes, base aligned to 16 bytes."""
    outer, inner = t.stride()
    if inner != 1:
        outer, inner = inner, outer
    size = t.element_size()
    return inner == 1 and outer > 0 and outer * size % 16 == 0 and t.data_ptr() % 16 == 0


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; the CPU interpreter counts as 8.0 (pointer kernels by default)."""
    return (8, 0) if device.type == "cpu" else device_facts(device).capability


def _math(dtype: torch.dtype, device: torch.device, backward: bool = False) -> str:
    """How activations are evaluated for results of this dtype."""
    if dtype is torch.float32:
        return "exact"
    hardware = dtype is torch.bfloat16 and device.type == "cuda"
    return "hardware" if hardware else "fast"


def _dot_precision(dtype: torch.dtype) -> str:
    """Scheme of a float32 product under the user's matmul precision; 16-bit ones ignore it."""
    if dtype is not torch.float32:
        return "tf32"
    return "tf32" if allows_tf32(torch.get_float32_matmul_precision()) else "tf32x3"


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised result. The CPU interpreter truncates to bfloat16, so it gets float32."""
    narrow = like.device.type == "cpu" and like.dtype is torch.bfloat16
    dtype = torch.float32 if narrow else like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device)


def _rounded(t: Tensor, like: Tensor) -> Tensor:
    """The result in the dtype of ``like`` (a no-op on a GPU)."""
    return t if t.dtype is like.dtype else t.to(like.dtype)
