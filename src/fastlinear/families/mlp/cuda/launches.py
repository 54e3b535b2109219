"""Layout 3 of backend ``whole_cuda``: a launch a layer, each begun while the one before still runs.

``launches.cu`` holds the kernel. Weights of the next layers come on their way before their
input is there, so a chain too wide for shared memory runs near the rate at which its weights are
read. The first launch of a call waits, like any other, for all that lies before it on the stream.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES, CUDA_HEADER, cuda_macros
from fastlinear.fastpath.recorder import Recording
from fastlinear.kernels.cuda.prepared import record_block
from fastlinear.native import cuda_driver as driver

__all__ = ["Launches", "LaunchesPlan", "source"]

Widths = tuple[int, ...]

KERNEL = "whole_mlp_layer"
_NAMES = ("device.cu", "launches.cu")
SOURCES = [CUDA_HEADER, *(Path(__file__).with_name(name) for name in _NAMES)]
MAX_BLOCK_ROWS = 64

_SHARED_LIMIT = 232_448  # bytes a Hopper block may have
_SHARED_UNIT = 233_472  # bytes of a multiprocessor, 1 KB of which each block takes for itself
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_FIELDS = struct.Struct("<5Qq4i")  # x, w, bias, y, pre, x_stride, rows, N, K, activation
_Params = ctypes.c_char * _FIELDS.size


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Launches:
    """How one layer is shared out.

    Attributes:
        cluster: blocks that share K, and the columns of one cluster.
        tiles: column tiles (of 16) of a warp.
        columns: groups of warps along the columns of a cluster.
        k_groups: groups of warps along a block's slice of K.
        stages: blocks of 64 bytes of K that a warp's weights are ahead.
        x_blocks: blocks of 64 bytes of K of x in shared memory at once.
        per_unit: blocks of a multiprocessor at once.
    """

    cluster: int
    tiles: int
    columns: int
    k_groups: int = 1
    stages: int = 8
    x_blocks: int = 16
    per_unit: int = 2

    @property
    def warps(self) -> int:
        """Warps of one block."""
        return self.columns * self.k_groups

    def blocks(self, width: int) -> int:
        """Blocks for ``width`` columns."""
        return _ceil_div(width, 16 * self.tiles * self.columns) * self.cluster

    def shared_bytes(self, rows: int) -> int:
        """Dynamic shared memory: activations and weights, later partial sums in their place."""
        row_tiles = _ceil_div(min(rows, MAX_BLOCK_ROWS), 8)
        used = self.x_blocks * row_tiles * 512 + self.warps * self.stages * self.tiles * 1024
        share = _ceil_div(row_tiles * self.tiles * self.columns, self.cluster)
        return max(used, share * self.cluster * self.k_groups * 512)

    def invalid(self, rows: int, itemsize: int) -> str | None:
        """Why this configuration cannot be built, or None."""
        if self.cluster not in (1, 2, 4, 8):
            return f"a cluster of {self.cluster}"
        if min(self.tiles, self.columns, self.k_groups, self.stages, self.per_unit) < 1:
            return f"nothing in {self}"
        if self.warps > 32 // self.per_unit or self.x_blocks % self.k_groups or self.x_blocks < 1:
            return f"{self.warps} warps, {self.x_blocks} blocks of x"
        row_tiles = _ceil_div(min(rows, MAX_BLOCK_ROWS), 8)
        if self.tiles * row_tiles * (2 if itemsize == 4 else 1) > 24:
            return f"{self.tiles} tiles of {row_tiles * 8} rows do not fit the registers"
        needed = self.shared_bytes(rows)
        if needed > min(_SHARED_LIMIT, _SHARED_UNIT // self.per_unit - 1024):
            return f"{self.per_unit} times {needed} bytes of shared memory"
        return None


def source(config: Launches, rows: int, dtype: torch.dtype) -> str:
    """The complete CUDA C++ source of one specialisation: any widths, ceil(rows / 8) row tiles."""
    macros = {
        "DTYPE": _DTYPES[dtype],
        "CLUSTER": config.cluster,
        "T": config.tiles,
        "CG": config.columns,
        "KG": config.k_groups,
        "STAGES": config.stages,
        "NB": _ceil_div(min(rows, MAX_BLOCK_ROWS), 8),
        "XB": config.x_blocks,
        "PER_SM": config.per_unit,
        "KS": 1,
        **cuda_macros("fast" if dtype.itemsize == 2 else "product"),
    }
    return "".join(f"#define {k} {v}\n" for k, v in macros.items()) + "".join(
        file.read_text() for file in SOURCES
    )


class LaunchesPlan:
    """Prepared launches: fixed shapes, any addresses. Not safe to share without a lock.

    Args:
        kernels: per layer, in their configuration.
        configs: per layer.
        widths: n_0 … n_L.
        rows: M.
        dtype: of all tensors.
        names: activations of hidden layers and of the last.
        save: SAVE of ``whole.cu``; 0 nothing.
    """

    def __init__(
        self,
        kernels: Sequence[driver.Kernel],
        configs: Sequence[Launches],
        widths: Widths,
        rows: int,
        dtype: torch.dtype,
        names: tuple[str, str],
        save: int,
    ) -> None:
        layers = len(widths) - 1
        self._layers = []
        for i, (kernel, config, (k, n)) in enumerate(
            zip(kernels, configs, pairwise(widths), strict=True)
        ):
            params = _Params()
            launch = driver.Launch(kernel, 32 * config.warps, config.cluster, [params])  # type: ignore[list-item]
            if i > 0:
                launch.begin_early()
            launch.set_grid(config.blocks(n))
            launch._config.grid[1] = _ceil_div(rows, MAX_BLOCK_ROWS)
            name = names[0] if i < layers - 1 else names[1]
            pre = bool(save) and (save in (1, 3) if i == layers - 1 else save in (1, 4))
            self._layers.append((launch, params, k, n, CODES[name], pre))
        self._rows, self._save = rows, bool(save)
        self._hidden = (2, rows * max(widths[1:-1], default=0))

    def run(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        stream: int,
        recording: Recording | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Enqueue on a raw stream, or record; y and what the backward reads, as
        ``whole_cuda.forward``."""
        rows, last = self._rows, len(self._layers) - 1
        if x.stride(0) * x.itemsize & 15 or x.data_ptr() & 15:
            x = x.clone(memory_format=torch.contiguous_format)
        y = x.new_empty((rows, self._layers[-1][3]))
        saved: list[Tensor] = []
        spaces = x.new_empty(self._hidden) if not self._save and last > 0 else None
        source, stride = x, x.stride(0)
        for i, (launch, params, k, n, number, pre) in enumerate(self._layers):
            if i == last:
                out = y
            elif spaces is not None:
                out = spaces[i & 1]
            else:
                out = x.new_empty((rows, n))
            kept = None
            if self._save:
                kept = torch.empty_like(out) if pre else None
                saved.append(out if kept is None else kept)
            tensors = source, weights[i], biases[i], out, kept
            addresses = [0 if t is None else t.data_ptr() for t in tensors]
            _FIELDS.pack_into(params, 0, *addresses, stride, rows, n, k, number)
            if recording is None:
                launch.run(stream)
            else:
                record_block(
                    recording, launch, params, [(8 * j, t, 0) for j, t in enumerate(tensors)]
                )
            source, stride = out, n
        return y, tuple(saved)
