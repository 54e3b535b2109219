"""Products in Triton as launches: act(a @ b + bias), split over the depth where that pays.

Float32 operands whose depth is not contiguous are copied to where it is, where that pays: matrix
units take such numbers from shared memory only in 16 bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlinear.activations.reference import math_of
from fastlinear.core.device import device_facts
from fastlinear.families.linear.triton import product_config, single_config
from fastlinear.families.linear.triton.config import dot_precision
from fastlinear.families.linear.triton.elementwise import _turn_kernel
from fastlinear.families.linear.triton.gemm import (
    _gemm_pointer_kernel,
    _gemm_tma_kernel,
    _sum_slices_kernel,
)
from fastlinear.families.linear.triton.gemm_config import GemmConfig
from fastlinear.kernels.triton.launch import Launch

Tensor = torch.Tensor

_ONE_ORDER = ((9, 0),)
"""Compute capabilities whose matrix units add up in one order whatever the tile: all tiles in 16
bits, and in float32 those that take as much of the depth at a time (measured on an H200)."""
_ONE = {
    2: GemmConfig("pointer", 64, 64, 64, 4, 4),
    4: GemmConfig("pointer", 64, 64, 32, 4, 3),
}
"""Size of a number → the one configuration for all numbers of rows elsewhere."""
_INTERPRETED_UNITS = 3  # persistent programs under the CPU interpreter: each walks several tiles
_SPLIT_BYTES_LIMIT = 1 << 28  # largest float32 workspace of a split product
_TURNED_BYTES_LIMIT = 1 << 30  # of copies that lie where tensor cores can take them
_TURN_BLOCK = 64


class Product:
    """Launches of out = act(a @ b + bias) for operands of one kind.

    Args:
        a: (rows, depth).
        b: (depth, cols).
        activation: of out.
        config: how to launch it.
        precision: of float32 products; by default one that any number of rows has.
    """

    __slots__ = ("_launch", "_sum", "_transpose", "_workspace")

    def __init__(
        self,
        a: Tensor,
        b: Tensor,
        activation: str,
        config: GemmConfig,
        precision: str = "",
    ) -> None:
        rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
        r, c, d = config.block_r, config.block_c, config.block_d
        steps = -(-depth // d)  # of the whole depth, then of one slice
        slice_steps = -(-steps // min(config.splits, max(steps, 1)))
        splits = -(-steps // slice_steps) if steps else 1
        split_depth = slice_steps * d
        tiles = -(-rows // r) * -(-cols // c)
        interpreted = a.device.type == "cpu"
        own = activation if splits == 1 else "none"  # else the sum of the slices ends with it
        choices = (own, math_of(a.dtype), precision or dot_precision(depth), r, c, d)
        self._transpose = (False, False)
        split_rows = rows
        if config.kind == "tma":
            split_rows = rows if splits == 1 else -(-rows // r) * r
            units = _INTERPRETED_UNITS if interpreted else device_facts(a.device).units
            programs = min(tiles * splits, units * config.programs_per_unit)
            a_depth_major, b_depth_major = a.stride(1) != 1, b.stride(0) != 1
            self._transpose = (a_depth_major, not b_depth_major)
            out_block = [r, c // config.subtile]
            self._launch = Launch(
                _gemm_tma_kernel,
                (programs,),
                (
                    *(rows, cols, depth, split_depth, split_rows, splits, programs),
                    *choices,
                    *(config.group_r, a_depth_major, b_depth_major, config.subtile, interpreted),
                ),
                a.device,
                warps=config.warps,
                stages=config.stages,
                block_shapes={
                    0: [d, r] if a_depth_major else [r, d],
                    1: [d, c] if b_depth_major else [c, d],
                    3: out_block,
                    4: out_block,
                },
            )
        else:
            even = depth % d == 0
            by = _divisor(a, b)
            sizes = rows, cols, depth
            by_size = [by if size % by == 0 else 1 for size in sizes]
            told = [size // n for size, n in zip(sizes, by_size, strict=True)]
            strides = [s if s == 1 else s // by for s in (*a.stride(), *b.stride())]
            self._launch = Launch(
                _gemm_pointer_kernel,
                (tiles, splits),
                (
                    *(*told, *strides, told[1], split_depth),
                    *(*choices, config.group_r, even, interpreted, *by_size, by),
                    *(a.stride(1) == 1, b.stride(0) == 1),
                ),
                a.device,
                warps=config.warps,
                stages=config.stages,
            )
        self._workspace = None
        if splits > 1:
            self._workspace = (splits * split_rows, cols)
            self._sum = Launch(
                _sum_slices_kernel,
                (-(-rows * cols // 1024),),
                (rows * cols, cols, split_rows * cols, splits, activation, math_of(a.dtype), 1024),
                a.device,
                warps=4,
            )

    def run(
        self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None
    ) -> None:
        """Launch; out (rows, cols), not empty, and pre, if any, are contiguous."""
        a_view = a.t() if self._transpose[0] else a
        b_view = b.t() if self._transpose[1] else b
        if self._workspace is None:
            self._launch(a_view, b_view, bias, out, pre)
        else:
            parts = torch.empty(self._workspace, dtype=torch.float32, device=a.device)
            self._launch(a_view, b_view, None, parts, None)
            self._sum(parts, bias, out, pre)


class Turned:
    """As ``Product``, after operands whose depth is not contiguous were copied to where it is.

    Args:
        a: (rows, depth); turned where its depth is not contiguous, rows being so.
        b: (depth, cols), likewise.
        activation: of the product.
        config, precision: of the product of the copies.
    """

    __slots__ = ("_a", "_b", "_product")

    def __init__(
        self, a: Tensor, b: Tensor, activation: str, config: GemmConfig, precision: str = ""
    ) -> None:
        turn_a, turn_b = _across(a, b)
        self._a = Turn(a.t()) if turn_a else None
        self._b = Turn(b) if turn_b else None
        rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
        if turn_a:  # what it is like is all that matters here
            a = a.as_strided((rows, depth), (depth, 1))
        if turn_b:
            b = b.as_strided((depth, cols), (1, depth))
        self._product = Product(a, b, activation, config, precision)

    def run(
        self, a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor, pre: Tensor | None
    ) -> None:
        """Launch, as ``Product.run``."""
        if self._a is not None:
            a = self._a.run(a.t())
        if self._b is not None:
            b = self._b.run(b).t()
        self._product.run(a, b, bias, out, pre)


class Turn:
    """The launch of tᵀ, dense, for matrices t of one kind whose columns are contiguous; with zeros
    in its columns from t's rows on to ``columns``, if that is given."""

    __slots__ = ("_launch", "_shape")

    def __init__(self, t: Tensor, columns: int = 0) -> None:
        rows, cols = t.shape
        columns = columns or rows
        self._shape = (cols, columns)
        tiles = -(-columns // _TURN_BLOCK) * -(-cols // _TURN_BLOCK)
        rest = (rows, cols, t.stride(0), columns, _TURN_BLOCK)
        self._launch = Launch(_turn_kernel, (tiles,), rest, t.device, warps=4)

    def run(self, t: Tensor) -> Tensor:
        out = t.new_empty(self._shape)
        self._launch(t, out)
        return out


def product(a: Tensor, b: Tensor, activation: str = "none") -> Product | Turned:
    """Launches of act(a @ b + bias) for (rows, depth) and (depth, cols) of any strides: as the
    forward of a layer, or as one of its gradients, whatever should be fastest."""
    rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
    capability, aligned = capability_of(a.device), aligned_operands(a, b)
    if a.dtype is torch.float32:
        across = _across(a, b)
        turn = aligned and any(across) and _turning_pays(a, b)
        config = _single_config(a, b, turn or not any(across))
        config = _within(config, rows, cols)
        how = activation, config, dot_precision(depth, rows, cols)
        return Turned(a, b, *how) if turn else Product(a, b, *how)
    sizes = rows, depth, cols, a.dtype, capability
    config = product_config.config_for(*sizes, aligned, wide_operands(a, b))
    return Product(a, b, activation, config)


def batch_invariant_config(a: Tensor, b: Tensor) -> GemmConfig:
    """The configuration of a @ b by which a row is summed in the same order beside any others."""
    capability, aligned = capability_of(a.device), aligned_operands(a, b)
    if capability not in _ONE_ORDER:
        return _ONE[a.element_size()]
    rows, cols, depth = a.shape[0], b.shape[1], a.shape[1]
    if a.dtype is torch.float32:
        along = not any(_across(a, b))
        return single_config.config_for(
            *(rows, depth, cols, capability), aligned, along, one_order=True
        )
    sizes = rows, depth, cols, a.dtype, capability
    return product_config.config_for(*sizes, aligned, wide_operands(a, b), one_order=True)


def _single_config(a: Tensor, b: Tensor, along: bool) -> GemmConfig:
    return single_config.config_for(
        *(a.shape[0], a.shape[1], b.shape[1], capability_of(a.device)),
        aligned_operands(a, b),
        along,
    )


def _turning_pays(a: Tensor, b: Tensor) -> bool:
    across = _across(a, b)
    copied = sum(4 * t.numel() for t, turn in zip((a, b), across, strict=True) if turn)
    if copied > _TURNED_BYTES_LIMIT:
        return False
    sizes = a.shape[0], a.shape[1], b.shape[1]
    return single_config.turning_pays(*sizes, capability_of(a.device), across)


def _within(config: GemmConfig, rows: int, cols: int) -> GemmConfig:
    """The configuration, without slices where their sums would take too much memory."""
    too_large = config.splits * rows * cols * 4 > _SPLIT_BYTES_LIMIT
    return replace(config, splits=1) if too_large else config


def _across(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Whether the depth of a, and of b, is not contiguous."""
    return a.stride(1) != 1, b.stride(0) != 1


def aligned_operands(a: Tensor, b: Tensor) -> bool:
    """Whether both operands and rows of the result are aligned to 16 bytes, as TMA needs."""
    return _aligned(a) and _aligned(b) and b.shape[1] * a.element_size() % 16 == 0


def wide_operands(a: Tensor, b: Tensor) -> tuple[bool, bool]:
    """Of each operand, whether rows, or columns, begin at 16 bytes, all of which is loaded at
    once."""
    if aligned_operands(a, b):
        return True, True
    return _wide(a), _wide(b)


def _wide(t: Tensor) -> bool:
    inner, outer = sorted(t.stride())
    return inner == 1 and outer % 16 == 0 and t.data_ptr() % 16 == 0


def _divisor(a: Tensor, b: Tensor) -> int:
    """What Triton is to be told that it divides strides, and sizes: numbers in 16 bytes, where 16
    numbers, of which it knows, do not divide them; else 1."""
    if not aligned_operands(a, b):
        return 1
    known = all(stride == 1 or stride % 16 == 0 for stride in (*a.stride(), *b.stride()))
    return 1 if known else 16 // a.element_size()


def _aligned(t: Tensor) -> bool:
    """One unit stride, the other a multiple of 16 bytes without overlap, base aligned likewise."""
    (outer, inner), extent = t.stride(), t.shape[1]
    if inner != 1:
        outer, inner, extent = inner, outer, t.shape[0]
    size = t.element_size()
    return inner == 1 and outer >= extent and outer * size % 16 == 0 and t.data_ptr() % 16 == 0


def capability_of(device: torch.device) -> tuple[int, int]:
    """Compute capability; the CPU interpreter counts as 8.0 (pointer kernels by default)."""
    return (8, 0) if device.type == "cpu" else device_facts(device).capability
