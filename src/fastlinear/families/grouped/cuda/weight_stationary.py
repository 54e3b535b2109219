"""Forward of wide groups on Hopper, in CUDA C++: ``weight_stationary.cu``.

A block keeps a group's weight in shared memory while tiles of its tokens come and go through the
copy engine, so that beside x and y nothing moves.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.problem import Problem
from fastlinear.families.grouped.cuda import group_map
from fastlinear.families.grouped.cuda import weight_stationary_config as configs
from fastlinear.families.grouped.cuda.group_map import (
    COLUMNS,
    TOKENS,
    boxes_of,
    has_results,
    is_seen,
    strides_of,
    tiles_of,
    weight_boxes,
)
from fastlinear.families.grouped.cuda.one_launch import OneLaunch, results
from fastlinear.families.grouped.cuda.packed_groups_tiles import ordinal
from fastlinear.families.grouped.cuda.weight_stationary_config import (
    StationaryConfig,
    blocks_of,
    shared_bytes,
    stationary_config,
)
from fastlinear.families.grouped.sign_mask import Boxes
from fastlinear.kernels.cuda import hopper
from fastlinear.native import cuda_driver as driver

KERNEL = "grouped_linear_resident"
_ROWS = 16  # tokens of a box of results
_HERE = Path(__file__).parent


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    config: StationaryConfig,
    channels: bool = False,
    sign_mask: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation.

    Args:
        channels: whether these come first.
        sign_mask: whether the signs of y are written.
    """
    # products() of the shared headers: 64 tokens of each of two warpgroups that take turns
    shape = {"BM": TOKENS, "PINGPONG": 1, "GROUP_M": 1, "CLUSTER": 1}
    own = {
        "K": k,
        "N": n,
        "PARTS": -(-n // config.outputs),
        "WEIGHTS": config.weights,
        "STAGES": config.stages,
        "OUT_BUFS": config.outs,
        "HAS_BIAS": int(has_bias),
        "SAVE": int(save_pre),
        "CHANNELS": int(channels),
        "SIGNS": int(sign_mask),
    }
    header, macros = _HERE / "wide_instructions.h", {**shape, **own}
    text = hopper.device_source(header, macros, config.outputs, dtype, activation, channels, False)
    return text + "".join(
        (_HERE / part).read_text() for part in ("derivatives.h", "weight_stationary.cu")
    )


@cache
def _kernel(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    has_bias: bool,
    save_pre: bool,
    config: StationaryConfig,
    channels: bool,
    sign_mask: bool,
    device: int,
) -> driver.Kernel:
    text = source(dtype, k, n, activation, has_bias, save_pre, config, channels, sign_mask)
    cubin = driver.compile_cubin(text, "weight_stationary.cu", hopper.ARCH)
    return driver.Kernel(cubin, KERNEL, shared_bytes(config, k), device)


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a forward Problem, or None."""
    reason = group_map.reason_not(p)
    if reason is not None:
        return reason
    k, n = p.dim("K"), p.dim("N")
    if not configs.serves(k, n):
        return (
            "serves even numbers of features, 64 or more, whose weights fit into shared memory by "
            f"four parts, not {k} to {n}"
        )
    return None


def serves(x: Tensor, weight: Tensor, bias: Tensor | None, order: str) -> bool:
    """Whether the kernel takes such tensors: ``is_seen``, the weight dense."""
    return (
        x.element_size() == 2
        and configs.serves(weight.shape[2], weight.shape[1])
        and is_seen(x, order)
        and has_results(x.shape[1], weight.shape[1], order)
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
        and (bias is None or (bias.is_contiguous() and bias.data_ptr() % 4 == 0))
    )


def forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
    order: str,
    *,
    config: StationaryConfig | None = None,
    sign_mask: Boxes | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = act(x_g W_gᵀ + b_g) in one kernel, float32 accumulation, deterministic.

    Args:
        x: (B, L, G, K); bfloat16 or float16. What ``serves`` refuses goes to the Triton backend.
        weight: (G, N, K), dtype of x.
        bias: (G, N), or None.
        activation: name of the activation.
        save_pre: also return the pre-activation.
        order: how the results lie in memory, a name in ``layout.ORDERS``.
        config: launch configuration; None picks ``stationary_config``.
        sign_mask: where the signs of y are, which are then returned in place of the pre-activation.

    Returns:
        y (B, L, G, N) in x's dtype; the pre-activation likewise, signs as ``Boxes`` says, or None.
    """
    _, n, k = weight.shape
    if not x.numel() * weight.numel() or not serves(x, weight, bias, order):
        from fastlinear.families.grouped.triton import forward as triton

        y, pre = triton.forward(x, weight, bias, activation, save_pre, order)
        return y, pre if sign_mask is None else sign_mask.packed(y, activation)
    if config is None:
        config = stationary_config(k, n)
        assert config is not None
    make = Stationary if sign_mask is None else StationaryWithSignMask
    return results(make, x, weight, bias, activation, save_pre, order, config, sign_mask)


class Stationary(OneLaunch):
    """The launch of ``weight_stationary.cu``."""

    MAPS = ("x", "weight", "y", "pre")
    POINTERS = ("bias", "pre", "weight", "x", "y")
    SIGNS = False

    def __init__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        activation: str,
        save_pre: bool,
        order: str,
        config: StationaryConfig,
    ) -> None:
        super().__init__(ordinal(x))
        groups, n, k = weight.shape
        how = activation, bias is not None, save_pre, config, order == "channels", self.SIGNS
        with driver.loading_allowed():
            kernel = _kernel(x.dtype, k, n, *how, self._device)
        rows = COLUMNS if order == "channels" else _ROWS
        maps = (
            boxes_of(x, k, order, TOKENS),
            weight_boxes(weight, config.outputs),
            boxes_of(x, n, order, rows, dense=True),
            boxes_of(x, n, order, rows, dense=True),
        )
        parts, (tiles, each) = groups * -(-n // config.outputs), tiles_of(x)
        blocks, lanes = blocks_of(parts, tiles, device_facts(x.device).units)
        strides = *strides_of(x, k, order), *strides_of(x, n, order, dense=True)
        numbers = parts, tiles, lanes, each, x.shape[1], *strides
        self._prepare(kernel, hopper.THREADS, blocks, maps, numbers)


class StationaryWithSignMask(Stationary):
    """The same that has the signs of y as a result."""

    MAPS = ("x", "weight", "y", "y")
    SIGNS = True
