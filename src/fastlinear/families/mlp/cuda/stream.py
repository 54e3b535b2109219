"""Layout 4 of backend ``whole_cuda``: 16-bit chains whose weights do not fit shared memory.

``stream.cu`` holds the kernel: all multiprocessors, one launch, weights by TMA through a ring
in every block's shared memory. Blocks wait for one another over global memory, as those of a Grid:
``workspace.py``.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.activations.reference import CODES, CUDA_HEADER, cuda_macros
from fastlinear.families.mlp.cuda.plan import Places, WholePlan
from fastlinear.families.mlp.cuda.workspace import make_cooperative, workspace
from fastlinear.native import cuda_driver as driver

__all__ = ["Stream", "StreamPlan", "source"]

Widths = tuple[int, ...]

KERNEL = "whole_mlp_stream"
MAX_LAYERS = 16
_NAMES = ("device", "exchange", "tma", "stream")
SOURCES = [CUDA_HEADER, *(Path(__file__).with_name(f"{name}.cu") for name in _NAMES)]

_SHARED_LIMIT = 232_448  # bytes a Hopper block may have
_THREADS = 384
_MAX_IMAGES = 256
_MAP_BYTES = 128  # of a TMA descriptor
_DTYPES = {torch.bfloat16: 0, torch.float16: 1}

# weight[] (a TMA descriptor each) | x, y, exchange, launches, bias[], saved[], x_stride, set_bytes
# | rows, layers, first_out, width[]
_POINTERS = _MAP_BYTES * MAX_LAYERS
_BIASES = _POINTERS + 8 * 4
_SAVED = _BIASES + 8 * MAX_LAYERS
_STRIDE = _SAVED + 8 * MAX_LAYERS
_SIZES = _STRIDE + 16
_Params = ctypes.c_char * ((_SIZES + 4 * (4 + MAX_LAYERS) + 63) // 64 * 64)


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def column_tiles(n: int) -> int:
    """Tiles of 8 columns of n outputs, padded to pairs."""
    return _ceil_div(n, 16) * 2


def k_groups(rows: int) -> int:
    """Warpgroups that share K."""
    return 2 if rows <= 64 else 1


@dataclass(frozen=True)
class Stream:
    """How a chain is shared out.

    Attributes:
        cluster: blocks that share K, and the columns of one cluster.
        clusters: of the launch; each has its share of every layer's columns.
        stages: tiles of weights (a cluster's columns, 64 of K) in shared memory at once.
        held: tiles of K whose activations a warpgroup has in registers at once.
        again: tiles of those that are asked for again at once where numbers are missing.
        stay_bytes: of weights of the first layers, that stay in the L2 cache from call to call;
            the others are the first to leave it.
    """

    cluster: int
    clusters: int
    stages: int
    held: int
    again: int = 1
    stay_bytes: int = 32 << 20

    def tiles(self, widths: Widths) -> int:
        """Column tiles (of 8) of one cluster, in the widest layer."""
        return max(_ceil_div(column_tiles(n), self.clusters) for n in widths[1:])

    def slice_tiles(self, widths: Widths, rows: int) -> int:
        """Tiles of K of one warpgroup, in the layer with the widest input."""
        return _ceil_div(max(widths[:-1]), 64 * self.cluster * k_groups(rows))

    def shared_bytes(self, widths: Widths, rows: int) -> int:
        """Dynamic shared memory: tiles of weights, partial sums, barriers."""
        tiles = self.tiles(widths)
        share = _ceil_div(tiles * _ceil_div(rows, 16), self.cluster)
        return self.stages * (_ceil_div(tiles, 2) * 2048 + 16) + share * self.cluster * 512 + 16

    def first_out(self, widths: Widths) -> int:
        """The first layer whose weights leave the L2 cache first."""
        sizes = accumulate(2 * k * n for k, n in pairwise(widths))
        return sum(size <= self.stay_bytes for size in sizes)

    def invalid(self, widths: Widths, rows: int) -> str | None:
        """Why this configuration cannot be built, or None."""
        if not 1 <= len(widths) - 1 <= MAX_LAYERS:
            return f"{len(widths) - 1} layers are not 1 to {MAX_LAYERS}"
        if not 1 <= rows <= 128:
            return f"{rows} rows are not 1 to 128"
        if min(widths) < 1 or any(k % 8 for k in widths[:-1]):
            return "rows of weights have to start on 16 bytes"
        if self.cluster not in (2, 4, 8) or min(self.clusters, self.held, self.again) < 1:
            return f"a cluster of {self.cluster}, or nothing in {self}"
        tiles = self.tiles(widths)
        if tiles < 2:
            return f"{self.clusters} clusters are more than have two column tiles each"
        most = 200 if rows <= 64 else 168
        if not _uniform(widths):
            most -= 16
        if 4 * tiles + 16 * self.held > most or tiles > 32:
            return f"{tiles} tiles and {self.held} held do not fit the registers"
        if self.stages < 4 or self.stages % k_groups(rows):
            return f"{self.stages} stages are not shared out evenly"
        needed = self.shared_bytes(widths, rows)
        if needed > _SHARED_LIMIT:
            return f"{needed} bytes of shared memory, more than {_SHARED_LIMIT}"
        return None


def _uniform(widths: Widths) -> bool:
    """Whether the kernel is compiled for one width."""
    return len(set(widths)) == 1 and widths[0] % 16 == 0


def source(
    stream: Stream,
    widths: Widths,
    rows: int,
    dtype: torch.dtype,
    activation: str,
    final_activation: str,
    save: int = 0,
) -> str:
    """The complete CUDA C++ source of one specialisation, for up to ceil(rows / 16) * 16 rows.

    Of ``widths`` only the widest share of columns matters, or the width where all are equal.
    """
    tiles = stream.tiles(widths)
    macros = {
        "DTYPE": _DTYPES[dtype],
        "CLUSTER": stream.cluster,
        "CLUSTERS": stream.clusters,
        "WIDTH": widths[0] if _uniform(widths) else 0,
        "NT": tiles,
        "MT": _ceil_div(rows, 16),
        "STAGES": stream.stages,
        "HELD": stream.held,
        "AGAIN": min(stream.again, stream.held),
        "KS": 1,
        "SAVE": save,
        "MAX_LAYERS": MAX_LAYERS,
        **cuda_macros("fast", activation),
        "FINAL": CODES[final_activation],
    }
    return (
        "".join(f"#define {k} {v}\n" for k, v in macros.items())
        + _wgmma(tiles, dtype)
        + "".join(file.read_text() for file in SOURCES)
    )


def _wgmma(tiles: int, dtype: torch.dtype) -> str:
    """wgmma(acc, a0 … a3, desc): acc (64, 8 tiles) += A (64, 16) Bᵀ; wgmma_first: acc = A Bᵀ."""
    count = tiles * 4
    kind = "bf16" if dtype == torch.bfloat16 else "f16"
    registers = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))

    def function(name: str, constraint: str, accumulate: int) -> str:
        outputs = ", ".join(f'"{constraint}f"(d[{i // 4}][{i % 4}])' for i in range(count))
        return (
            f"__device__ __forceinline__ void {name}(float (&d)[{tiles}][4], unsigned a0,\n"
            "    unsigned a1, unsigned a2, unsigned a3, unsigned long long b) {\n"
            f'  asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {accumulate}, 0;\\n"\n'
            f'    "wgmma.mma_async.sync.aligned.m64n{8 * tiles}k16.f32.{kind}.{kind} "\n'
            f'    "{{{registers}}}, {{{a}}}, %{count + 4}, p, 1, 1, 0;\\n}}"\n'
            f'    : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));\n}}\n'
        )

    return function("wgmma", "+", 1) + function("wgmma_first", "=", 0)


class StreamPlan(WholePlan):
    """One prepared launch: fixed shapes, any addresses. Not safe to share without a lock.

    Args:
        kernel: in this configuration.
        stream: how the work is shared out.
        widths: n_0 … n_L.
        rows: M.
        dtype: of all tensors.
        save: SAVE of ``whole.cu``; 0 nothing.
    """

    def __init__(
        self,
        kernel: driver.Kernel,
        stream: Stream,
        widths: Widths,
        rows: int,
        dtype: torch.dtype,
        save: int,
    ) -> None:
        layers = len(widths) - 1
        padded = _ceil_div(rows, 16) * 16
        set_bytes = sum(column_tiles(n) * 8 * padded * 2 for n in widths[1:-1])
        self._device, self._dtype = kernel.device, str(dtype)[6:]
        self._geometry = ("stream", stream, widths, padded)
        self._exchange_bytes = max(128, 2 * set_bytes)
        self._blocks = stream.clusters * stream.cluster
        self._boxes = [
            (n, k, _ceil_div(column_tiles(n), stream.clusters) * 8) for k, n in pairwise(widths)
        ]
        self._weights: Sequence[int] = ()
        self._images: dict[tuple[int, ...], bytes] = {}
        self._params = _Params()
        struct.pack_into("<q", self._params, _STRIDE + 8, set_bytes)
        sizes = (rows, layers, stream.first_out(widths), *widths)
        struct.pack_into(f"<{len(sizes)}i", self._params, _SIZES, *sizes)
        self._addresses = struct.Struct("<4Q")
        self._pointers = struct.Struct(f"<{layers}Q")
        self._stride = struct.Struct("<q")
        self.launch = driver.Launch(
            kernel,
            _THREADS,
            stream.cluster,
            [self._params],  # type: ignore[list-item]
        )
        self.launch.set_grid(self._blocks)
        self.runs_at_once = self.launch.max_clusters() >= stream.clusters
        make_cooperative(self.launch)
        self.places = Places(_POINTERS, _POINTERS + 8, None, _BIASES, _SAVED, shared=True)
        self.out_shape = (rows, widths[-1])
        self.saved_shapes = [(rows, n) for n in widths[1:]] if save else []
        self.last_saves_pre = save in (1, 3)

    def _point_at(self, weights: Sequence[int]) -> None:
        """Put a descriptor of every layer's weights into the parameters.

        Descriptors know addresses and shapes only: those of earlier calls are kept for chains of
        one shape that take turns.
        """
        key = tuple(weights)
        image = self._images.get(key)
        if image is None:
            maps = [
                driver.TensorMap(self._dtype, n, k, k, box, 64, weight, self._device)
                for (n, k, box), weight in zip(self._boxes, weights, strict=True)
            ]
            image = b"".join(ctypes.string_at(m.pointer, _MAP_BYTES) for m in maps)
            if len(self._images) >= _MAX_IMAGES:
                self._images.clear()
            self._images[key] = image
        ctypes.memmove(self._params, image, len(image))
        self._weights = weights

    def aligned(self, x: Tensor) -> Tensor:
        """Rows at multiples of 16 bytes."""
        if x.stride(0) & 7 or x.data_ptr() & 15:
            x = x.clone(memory_format=torch.contiguous_format)
        return x

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
            self._pointers.pack_into(params, _SAVED, *[t.data_ptr() for t in saved])
        exchange = workspace(
            self._device, stream, self._geometry, self._exchange_bytes, self._blocks
        )
        if weights != self._weights:
            self._point_at(weights)
        self._addresses.pack_into(
            params,
            _POINTERS,
            x.data_ptr(),
            y.data_ptr(),
            exchange,
            exchange + self._exchange_bytes,
        )
        self._pointers.pack_into(params, _BIASES, *biases)
        self._stride.pack_into(params, _STRIDE, x.stride(0))
