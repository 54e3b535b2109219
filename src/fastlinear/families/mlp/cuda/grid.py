"""Layout 2 of backend ``whole_cuda``: a wide chain of equal widths over all multiprocessors.

``grid.cu`` holds the kernel, ``grid_half.cu`` and ``grid_single.cu`` its parts by
dtype. Its blocks wait for one another over global memory: ``workspace.py``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES, CUDA_HEADER, cuda_macros
from fastlinear.families.mlp.cuda.plan import Places, WholePlan
from fastlinear.families.mlp.cuda.workspace import make_cooperative, workspace
from fastlinear.native import cuda_driver as driver

__all__ = ["Grid", "GridPlan", "source"]

Widths = tuple[int, ...]

KERNEL = "whole_mlp_grid"
MAX_LAYERS = 32
_NAMES = ("device", "exchange", "grid", "grid_half", "grid_single")
SOURCES = [CUDA_HEADER, *(Path(__file__).with_name(f"{name}.cu") for name in _NAMES)]

_SHARED_LIMIT = 232_448  # bytes a Hopper block may have
_BRING_WARPS = 2  # of a block, as in the source
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
# x, y, exchange, launches, weight[], bias[], saved[], x_stride | rows, layers
_POINTERS = 4 + 3 * MAX_LAYERS
_Params = ctypes.c_char * (8 * (_POINTERS + 1) + 8)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Grid:
    """How a chain of equal widths is shared out over the whole device.

    Attributes:
        cluster: blocks that share K, and the columns of one cluster.
        tiles: column tiles (of 8) of one cluster.
        slots: layers whose weights lie in shared memory at once.
        k_groups: 16-bit dtypes: warps that share the K of a tile of rows, 1 or 2.
    """

    cluster: int
    tiles: int
    slots: int
    k_groups: int = 1

    def blocks(self, width: int) -> int:
        """Blocks of the whole launch."""
        return _ceil_div(width // 8, self.tiles) * self.cluster

    def shared_bytes(self, width: int, rows: int, itemsize: int) -> int:
        """Dynamic shared memory: barriers, partial sums, weights; float32: activations, sums."""
        single = itemsize == 4
        row_tiles = _ceil_div(rows, 16)
        k = width // self.cluster
        halves = _ceil_div(2 * row_tiles, self.cluster)
        pad = 16 if single else 0 if k * itemsize // 64 % 2 else 32
        full = self.tiles * 256 if single else _ceil_div(self.tiles, 2) * 512
        barriers = _ceil_div(16 * self.slots, 128) * 128
        sums = 2 * halves * self.cluster * full
        pairs = 0 if single or self.k_groups == 1 else 2 * row_tiles * full
        weights = self.slots * self.tiles * 8 * (k * itemsize + pad)
        own = row_tiles * (k * 64 + self.tiles * 512) if single else 0
        return barriers + sums + pairs + weights + own

    def invalid(self, widths: Widths, rows: int, itemsize: int) -> str | None:
        """Why this configuration cannot be built, or None."""
        width = widths[0]
        if len(set(widths)) != 1 or len(widths) < 3:
            return "needs two or more layers of equal widths"
        if len(widths) - 1 > MAX_LAYERS:
            return f"{len(widths) - 1} layers are more than {MAX_LAYERS}"
        if self.cluster not in (2, 4, 8) or min(self.tiles, self.slots) < 1:
            return f"cluster {self.cluster}, tiles {self.tiles}, slots {self.slots}"
        if width % (self.cluster * 64 // itemsize):
            return f"a width of {width} is not whole 64-byte blocks of K for {self.cluster} blocks"
        row_tiles = _ceil_div(rows, 16)
        if self.k_groups not in (1, 2) or width // self.cluster * itemsize // 64 % self.k_groups:
            return f"{self.k_groups} groups of warps along K"
        if itemsize == 4 and (width // self.cluster * 4 * row_tiles) % 256:
            return f"{rows} rows of {width // self.cluster} numbers are not whole rounds"
        if row_tiles * self.k_groups > (4 if itemsize == 4 else 8):
            return f"{rows} rows do not fit the registers"
        needed = self.shared_bytes(width, rows, itemsize)
        if needed > _SHARED_LIMIT:
            return f"{needed} bytes of shared memory, more than {_SHARED_LIMIT}"
        return None


def source(
    grid: Grid,
    width: int,
    rows: int,
    dtype: torch.dtype,
    activation: str,
    final_activation: str,
    save: int = 0,
) -> str:
    """The complete CUDA C++ source of one specialisation, for up to ceil(rows / 16) * 16 rows."""
    macros = {
        "DTYPE": _DTYPES[dtype],
        "CLUSTER": grid.cluster,
        "H": width,
        "NT": grid.tiles,
        "MT": _ceil_div(rows, 16),
        "SLOTS": grid.slots,
        "KG": grid.k_groups,
        "KS": 1,
        "SAVE": save,
        "MAX_LAYERS": MAX_LAYERS,
        **cuda_macros("fast" if dtype.itemsize == 2 else "product", activation),
        "FINAL": CODES[final_activation],
    }
    return "".join(f"#define {k} {v}\n" for k, v in macros.items()) + "".join(
        file.read_text() for file in SOURCES
    )


class GridPlan(WholePlan):
    """One prepared launch: fixed shapes, any addresses. Not safe to share without a lock."""

    def __init__(
        self,
        kernel: driver.Kernel,
        grid: Grid,
        widths: Widths,
        rows: int,
        dtype: torch.dtype,
        save: int,
    ) -> None:
        width, layers = widths[0], len(widths) - 1
        blocks = grid.blocks(width)
        padded = _ceil_div(rows, 16) * 16
        itemsize = dtype.itemsize
        warps = (8 if itemsize == 4 else padded // 16 * grid.k_groups) + _BRING_WARPS
        self._device = kernel.device
        self._geometry = (grid, width, padded, layers, itemsize)
        self._exchange_bytes = 2 * (layers - 1) * padded * width * itemsize
        self._blocks = blocks
        self._params = _Params()
        struct.pack_into("<2i", self._params, 8 * (_POINTERS + 1), rows, layers)
        self._addresses = struct.Struct(f"<{4 + layers}Q")
        self._pointers = struct.Struct(f"<{layers}Q")
        self._stride = struct.Struct("<q")
        self.launch = driver.Launch(
            kernel,
            32 * warps,
            grid.cluster,
            [self._params],  # type: ignore[list-item]
        )
        self.launch.set_grid(blocks)
        self.runs_at_once = self.launch.max_clusters() * grid.cluster >= blocks
        make_cooperative(self.launch)
        self.places = Places(0, 8, 32, 8 * (4 + MAX_LAYERS), 8 * (4 + 2 * MAX_LAYERS), shared=True)
        self.out_shape = (rows, width)
        self.saved_shapes = [(rows, width)] * layers if save else []
        self.last_saves_pre = save in (1, 3)

    def fill(
        self,
        x: Tensor,
        y: Tensor,
        saved: Sequence[Tensor],
        weights: Sequence[int],
        biases: Sequence[int],
        stream: int,
    ) -> None:
        """As ``WholePlan.fill``."""
        params = self._params
        if saved:
            self._pointers.pack_into(
                params, 8 * (4 + 2 * MAX_LAYERS), *[t.data_ptr() for t in saved]
            )
        exchange = workspace(
            self._device, stream, self._geometry, self._exchange_bytes, self._blocks
        )
        self._addresses.pack_into(
            params,
            0,
            x.data_ptr(),
            y.data_ptr(),
            exchange,
            exchange + self._exchange_bytes,
            *weights,
        )
        self._pointers.pack_into(params, 8 * (4 + MAX_LAYERS), *biases)
        self._stride.pack_into(params, 8 * _POINTERS, x.stride(0))
