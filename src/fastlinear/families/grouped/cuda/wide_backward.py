"""Backward of groups of more than 128 features on Hopper, in CUDA C++: ``wide_backward.cu``.

One pass over dy, what the forward saved, and x: dx leaves at once, dW and db stay in registers over
a block's tiles of tokens and leave as float32 shares, which a second launch adds up in order.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.problem import Problem
from fastlinear.families.grouped.cuda import group_map, packed_groups_tiles
from fastlinear.families.grouped.cuda import wide_backward_config as configs
from fastlinear.families.grouped.cuda.group_map import (
    COLUMNS,
    TOKENS,
    boxes_of,
    has_results,
    is_seen,
    padded,
    strides_of,
    tiles_of,
    weight_boxes,
)
from fastlinear.families.grouped.cuda.one_pass import OnePass, gradients
from fastlinear.families.grouped.cuda.wide_backward_config import (
    WideBackwardConfig,
    chunks_of,
    halves,
    shared_bytes,
    wide_backward_config,
)
from fastlinear.families.grouped.reference import Gradients, Needs
from fastlinear.families.grouped.sign_mask import Boxes, is_sign_mask
from fastlinear.kernels.cuda import hopper
from fastlinear.native import cuda_driver as driver

ARCH = hopper.ARCH
KERNEL, SUMS_KERNEL = "grouped_linear_wide_backward", "grouped_linear_wide_sums"
_HERE = Path(__file__).parent


def source(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: WideBackwardConfig,
    channels: bool = False,
    sign_mask: bool = False,
) -> str:
    """The complete CUDA C++ source of one specialisation.

    Args:
        channels: whether these come first.
        sign_mask: whether what was saved are the signs of y.
    """
    # products() of the shared headers: 64 features of each of two warpgroups, from one stage
    shape = {"BM": 128, "STAGES": 1, "PINGPONG": 0, "GROUP_M": 1}
    own = {
        "K": k,
        "N": n,
        "TILES": config.tiles,
        "PARTS": config.saved,
        "HELD": config.held,
        "OUTS": config.outs,
        "SPLIT": int(config.split),
        "CHANNELS": int(channels),
        "SIGNS": int(sign_mask),
        **{f"NEED_{name}": int(need) for name, need in zip(("DX", "DW", "DB"), needs, strict=True)},
    }
    macros = {**shape, "CLUSTER": 2 if config.cluster else 1, **own}
    header = _HERE / "wide_instructions.h"
    features_first = not channels, not channels  # of both operands of dW
    text = hopper.device_source(header, macros, padded(n), dtype, activation, *features_first)
    parts = "derivatives.h", "wide_backward.h", "wide_backward_tiles.h", "wide_backward.cu"
    return text + "".join((_HERE / part).read_text() for part in parts)


@cache
def _kernels(
    dtype: torch.dtype,
    k: int,
    n: int,
    activation: str,
    needs: Needs,
    config: WideBackwardConfig,
    channels: bool,
    sign_mask: bool,
    device: int,
) -> tuple[driver.Kernel, driver.Kernel]:
    text = source(dtype, k, n, activation, needs, config, channels, sign_mask)
    cubin = driver.compile_cubin(text, "wide_backward.cu", ARCH)
    shared = shared_bytes(config, n, activation != "none" and not sign_mask, needs)
    return driver.Kernel(cubin, KERNEL, shared, device), driver.Kernel(
        cubin, SUMS_KERNEL, 0, device
    )


def reason_not(p: Problem) -> str | None:
    """Why the kernel cannot serve a backward Problem, or None."""
    reason = group_map.reason_not(p)
    if reason is not None:
        return reason
    k, n = p.dim("K"), p.dim("N")
    if not configs.serves(k, n):
        return f"serves groups of 130 to 256 features, even numbers, not {k} to {n}"
    return None


def serves(dy: Tensor, saved: Tensor | None, x: Tensor, weight: Tensor, order: str) -> bool:
    """Whether the kernel takes such tensors: ``is_seen``, the weight dense. Signs are
    ``sign_mask.Boxes``."""
    given = [t for t in (dy, None if is_sign_mask(saved) else saved, x) if t is not None]
    return (
        configs.serves(weight.shape[2], weight.shape[1])
        and x.element_size() == packed_groups_tiles.SIZE
        and has_results(x.shape[1], weight.shape[2], order)
        and all(t.dtype is x.dtype and is_seen(t, order) for t in given)
        and weight.dtype is x.dtype
        and weight.is_contiguous()
        and weight.data_ptr() % 16 == 0
    )


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: Needs,
    order: str,
    *,
    config: WideBackwardConfig | None = None,
    chunks: int | None = None,
) -> Gradients:
    """(dx, dW, db), each None where not needed, in one pass and the sums of its shares.

    Args:
        dy: (B, L, G, N); bfloat16 or float16. What ``serves`` refuses, and db alone, goes to the
            Triton backend.
        saved: (B, L, G, N), dtype of dy: what the activation saves,
            its output y or the pre-activation; None for ``"none"``; for relu and leaky_relu also
            the signs of y, as ``sign_mask.Boxes`` says.
        x: (B, L, G, K), dtype of dy.
        weight: (G, N, K), dtype of dy.
        activation: name of the activation.
        needs: which of dx, dW and db are wanted.
        order: how dx lies in memory.
        config: launch configuration; None picks ``wide_backward_config``.
        chunks: into how many chunks a group's tokens are cut; None picks ``chunks_of``.

    Returns:
        dx (B, L, G, K), dW (G, N, K) and db (G, N) in dy's dtype. Products and sums accumulate
        in float32 over dpre rounded to dy's dtype, in a fixed order.
    """
    _, n, k = weight.shape
    if activation == "none":
        saved = None
    empty = not x.numel() * dy.numel() or not any(needs[:2])
    if empty or not serves(dy, saved, x, weight, order):
        from fastlinear.families.grouped.triton import backward as triton_backward

        if saved is not None and is_sign_mask(saved):
            batch, length, groups, _ = x.shape
            saved = Boxes(batch, length, groups, n).unpacked(saved, dy.dtype, order)
        return triton_backward.backward(dy, saved, x, weight, activation, needs, order)
    if config is None:
        config = _config(k, n, saved, needs, order)
    given = dy, saved, x, weight
    return gradients(WideBackward, *given, activation, needs, order, config, chunks)


def _config(k: int, n: int, saved: Tensor | None, needs: Needs, order: str) -> WideBackwardConfig:
    """The configuration for what was saved."""
    sign_mask, words = is_sign_mask(saved), configs.has_words(k, n, order, needs)
    config = wide_backward_config(
        k, n, saved is not None and not sign_mask, needs, sign_mask, words
    )
    assert config is not None
    return config


class WideBackward(OnePass):
    """The launches of ``wide_backward.cu``."""

    MAPS = ("dy", "saved", "x", "dx", "weight")
    POINTERS = ("weight", "dw", "db", "saved", "dx", "dy", "x")

    def __init__(
        self,
        dy: Tensor,
        saved: Tensor | None,
        x: Tensor,
        weight: Tensor,
        activation: str,
        needs: Needs,
        order: str,
        config: WideBackwardConfig,
        chunks: int | None = None,
    ) -> None:
        super().__init__(packed_groups_tiles.ordinal(x))
        groups, n, k = weight.shape
        sign_mask = is_sign_mask(saved)
        how = activation, needs, config, order == "channels", sign_mask
        with driver.loading_allowed():
            kernel, sums = _kernels(x.dtype, k, n, *how, self._device)
        tiles, each = tiles_of(x)
        if chunks is None:
            units = device_facts(x.device).units
            chunks = chunks_of(tiles * TOKENS, groups, k, n, units, any(needs[1:]))

        half, numbers_saved = TOKENS // 2, dy if saved is None or sign_mask else saved
        maps = [
            boxes_of(dy, n, order, half if config.split else TOKENS),
            boxes_of(numbers_saved, n, order, half),
            boxes_of(x, k, order, TOKENS),
            boxes_of(x, k, order, TOKENS, dense=True),
            weight_boxes(weight, COLUMNS),
        ]
        cluster, blocks = 2 if config.cluster else 1, groups * chunks * halves(k)
        of_outputs = strides_of(dy, n, order), strides_of(numbers_saved, n, order)
        of_inputs = strides_of(x, k, order), strides_of(x, k, order, dense=True)
        numbers = groups, chunks, tiles, each, x.shape[1], *chain(*of_outputs, *of_inputs)
        self._prepare_pass(driver.Launch, kernel, hopper.THREADS, cluster, blocks, maps, numbers)
        launch = hopper.EarlyLaunch
        at_once = 4 if n % 4 == 0 else 2
        self._prepare_sums(launch, sums, weight, needs, chunks, at_once, (groups, chunks))
