"""Backend ``whole_cuda`` of mlp: every layer in one kernel for Hopper, in CUDA C++.

A cluster of up to 16 blocks carries a few rows of x through all layers; hidden activations go from
block to block through shared memory and never leave the chip. ``whole.cu`` holds the device source;
this file chooses how the work is shared out, compiles it with NVRTC (once per choice and process)
and launches it. Weights are read at every call from where they lie. Blocks wait for one another
only inside a cluster, which the hardware starts as a whole: no launch can deadlock.

Accumulation is in float32, in a fixed order: results are deterministic. float32 itself is computed
in three tf32 products per step, with an error like that of plain float32 arithmetic.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.mlp.problem import widths_of

__all__ = ["MAX_LAYERS", "MAX_ROWS", "MAX_WIDTH", "Config", "config_for", "forward", "reason_not"]

ARCH = "sm_90a"
MAX_WIDTH = 1024
MAX_LAYERS = 32
MAX_ROWS = 1024
"""Above, every block of rows reading all weights again costs more than separate layers."""

_SOURCE = Path(__file__).with_name("whole.cu")
_KERNEL = "whole_mlp"
_SHARED_LIMIT = 232_448  # bytes a Hopper block may have
_MAX_PLANS = 1024
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_DTYPE_NAMES = ("bfloat16", "float16", "float32")

Widths = tuple[int, ...]


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class Config:
    """How one chain is shared out.

    Attributes:
        cluster: blocks that share one block of rows; each computes its part of every layer's
            columns.
        rows: rows of x per cluster, a multiple of 8.
        groups: groups of warps in a block, each with its own columns.
        split_k: warps of a group, each with its own part of K.
        tiles: column tiles (of 16) a group computes at a time.
        unroll: 64-byte blocks of K per pipeline step.
        depth: pipeline steps of weights on their way.
        bulk: exchange by one bulk copy per pair of blocks instead of stores from every thread.
        simt: float32 only: plain multiply-adds instead of split tf32 products.
        direct: weights go from global memory straight to registers, ``depth`` 64-byte blocks of K
            per warp. For equal widths of whole passes.
        late: how many of those blocks are fetched only after a layer's results were sent.
    """

    cluster: int
    rows: int
    groups: int
    split_k: int
    tiles: int = 1
    unroll: int = 1
    depth: int = 8
    bulk: bool = False
    simt: bool = False
    direct: bool = False
    late: int = 0

    @property
    def warps(self) -> int:
        """Warps of one block."""
        return self.groups * self.split_k

    def shared_bytes(self, widths: Widths, itemsize: int) -> int:
        """Dynamic shared memory: barriers, weights under way, activations, staging, sums."""
        ring = 0 if self.direct else self.warps * self.depth * self.unroll * self.tiles * 1024
        activations = 2 * input_units(widths, itemsize) * (self.rows * 16 + 32)
        stage = self.warps * itemsize * 128
        parts = self.tiles * self.rows // 8
        sums = self.groups * parts * self.split_k * 512 if self.split_k > 1 else 0
        each = [_ceil_div(_column_tiles(n, itemsize), self.cluster) for n in widths[1:]]
        return 64 + ring + activations + stage + sums + 16 * itemsize * sum(each)

    def invalid(self, widths: Widths, itemsize: int) -> str | None:
        """Why this configuration cannot be built for these widths, or None."""
        if self.cluster not in (1, 2, 4, 8, 16):
            return f"cluster {self.cluster}: not 1, 2, 4, 8 or 16"
        if self.rows % 8 or not 8 <= self.rows <= 64:
            return f"rows {self.rows}: not a multiple of 8 up to 64"
        if not 1 <= self.warps <= 16 or (self.split_k > 1 and self.groups > 15):
            return f"{self.groups} groups of {self.split_k} warps"
        if min(self.tiles, self.unroll) < 1 or self.depth < 2:
            return f"tiles {self.tiles}, unroll {self.unroll}, depth {self.depth}"
        if self.simt and itemsize != 4:
            return "plain multiply-adds are for float32"
        if self.tiles * self.rows > (32 if self.simt else 64):
            return f"{self.tiles} tiles of {self.rows} rows do not fit the registers"
        if self.direct and not self._direct_fits(widths, itemsize):
            return "weights held in registers need equal widths, in whole blocks and one pass"
        needed = self.shared_bytes(widths, itemsize)
        if needed > _SHARED_LIMIT:
            return f"{needed} bytes of shared memory, more than {_SHARED_LIMIT}"
        return None

    def _direct_fits(self, widths: Widths, itemsize: int) -> bool:
        width = widths[0]
        return (
            len(set(widths)) == 1
            and self.unroll == 1
            and self.late <= self.depth
            and width % (self.depth * self.split_k * (64 // itemsize)) == 0
            and width == 16 * self.cluster * self.groups * self.tiles
        )

    def exact(self, widths: Widths, itemsize: int) -> bool:
        """Whether every layer is a whole number of steps and passes, so nothing is masked."""
        k_step = self.split_k * self.unroll * (64 // itemsize)
        n_step = 16 * self.cluster * self.groups * self.tiles
        return all(k % k_step == 0 for k in widths[:-1]) and all(
            n % n_step == 0 for n in widths[1:]
        )


def _column_tiles(n: int, itemsize: int) -> int:
    """Column tiles (of 16) of a layer of n columns, padded to 64 bytes."""
    return _ceil_div(n * itemsize, 64) * (4 // itemsize)


def input_units(widths: Widths, itemsize: int) -> int:
    """Units (16 bytes of columns) of the widest input of a layer, padded to 64 bytes."""
    return 4 * max(_ceil_div(k * itemsize, 64) for k in widths[:-1])


# Clusters of so many blocks that an H200 runs at once: not every GPC has all its SMs.
_CLUSTERS = {1: 132, 2: 66, 4: 30, 8: 15, 16: 7}


def config_for(widths: Widths, rows: int, itemsize: int) -> Config:
    """The sharing for a chain of these widths over that many rows, as measured on an H200.

    Args:
        widths: n_0 … n_L.
        rows: M.
        itemsize: bytes of an element.
    """
    for config in _candidates(max(widths), rows, itemsize):
        fitting = config
        while fitting.invalid(widths, itemsize) and fitting.depth > 2 and not fitting.direct:
            fitting = replace(fitting, depth=fitting.depth - 1)
        if fitting.invalid(widths, itemsize) is None:
            return fitting
    raise AssertionError(f"no configuration for {widths}, {rows} rows")


def _rows_for(rows: int, cluster: int, most: int) -> int:
    """Rows of one cluster: as few as let all clusters run at once, at most ``most``."""
    each = _ceil_div(_ceil_div(rows, _CLUSTERS[cluster]), 8) * 8
    return min(each, most)


def _candidates(width: int, rows: int, itemsize: int) -> list[Config]:
    """Preferred configurations, best first; the last ones fit every chain."""

    most = 16 if width > 512 and itemsize == 4 else 32  # so that two inputs fit shared memory

    def share(cluster: int, groups: int, split_k: int, **rest: int) -> Config:
        return Config(cluster, _rows_for(rows, cluster, most), groups, split_k, **rest)  # type: ignore[arg-type]

    simt = {"simt": True} if itemsize == 4 else {}
    if width <= 128 and rows > 512:  # many rows: no exchange, every SM on its own
        return [share(1, width // 16 or 1, 1, unroll=2, **simt), share(1, 4, 1, **simt)]
    if itemsize == 4:
        if width <= 64:
            return [share(4, 1, 4, **simt)]
        if width <= 128:
            return [share(8, 1, 4, unroll=2, **simt)]
        if width <= 256:
            return [share(8, 2, 4, unroll=2, **simt)]
        if width <= 512:
            return [share(8, 4, 4, unroll=2, **simt), share(8, 2, 4, **simt)]
        return [
            share(16, 2, 4, tiles=2, depth=8, direct=True, simt=True),
            share(16, 4, 4),
            share(16, 4, 2),
            share(16, 2, 2),
        ]
    if width <= 64:
        return [share(1, 4, 1, unroll=2)]
    if width <= 128:
        return [share(4, 2, 2, unroll=2)]
    if width <= 256:
        return [share(8, 2, 2, unroll=4)]
    if width <= 512:
        if rows <= 8 * _CLUSTERS[16]:
            return [share(16, 2, 2, unroll=2, depth=10)]
        return [share(8, 4, 2, unroll=2, depth=10), share(8, 4, 2)]
    few = _rows_for(rows, 16, most) <= 16
    best = [share(16, 4, 2, depth=16, direct=True)] if few else []
    return [*best, share(16, 4, 4, unroll=2), share(16, 4, 4), share(16, 4, 2)]


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if p.piece != "forward":
        return "computes the forward only"
    if p.device != "cuda":
        return "its kernel runs on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability != (9, 0):
        return f"needs compute capability 9.0 (Hopper), not {capability[0]}.{capability[1]}"
    if p.dtype not in _DTYPE_NAMES:
        return f"no kernel for {p.dtype}"
    if p.option("x") == "strided":
        return "needs rows of x that are contiguous"
    if p.option("w") == "mixed":
        return "needs contiguous weights"
    return _size_reason(widths_of(p), p.dim("M"))


def _size_reason(widths: Widths, rows: int) -> str | None:
    if min(widths) < 1 or rows < 1:
        return "an empty dimension"
    if max(widths) > MAX_WIDTH:
        return f"a width of {max(widths)} is more than {MAX_WIDTH}"
    if len(widths) - 1 > MAX_LAYERS:
        return f"{len(widths) - 1} layers are more than {MAX_LAYERS}"
    if rows > MAX_ROWS:
        return f"{rows} rows are more than {MAX_ROWS}"
    return None


def source(
    config: Config,
    widths: Widths,
    dtype: torch.dtype,
    activation: str,
    final_activation: str,
    save: int = 0,
    vec: int = 16,
) -> str:
    """The complete CUDA C++ source of one specialisation; only ``widths``' padding matters.

    Args:
        save: 0 nothing, else as ``save_mode`` gives it.
        vec: bytes at which every weight row is aligned.
    """
    macros = {
        "DTYPE": _DTYPES[dtype],
        "CLUSTER": config.cluster,
        "NB": config.rows // 8,
        "WN": config.groups,
        "KS": config.split_k,
        "TW": config.tiles,
        "UNROLL": config.unroll,
        "DEPTH": config.depth,
        "VEC": vec,
        "EXACT": int(vec == 16 and config.exact(widths, dtype.itemsize)),
        "WIDTH": widths[0] if len(set(widths)) == 1 else 0,
        "UNITS": input_units(widths, dtype.itemsize),
        "SAVE": save,
        "MAX_LAYERS": MAX_LAYERS,
        "EXCHANGE": int(config.bulk),
        "SIMT": int(config.simt),
        "DIRECT": int(config.direct),
        "LATE": config.late,
        **{f"ACT_{name.upper()}": number for number, name in enumerate(NAMES)},
        "ACT": f"ACT_{activation.upper()}",
        "FINAL": f"ACT_{final_activation.upper()}",
    }
    return "".join(f"#define {k} {v}\n" for k, v in macros.items()) + _SOURCE.read_text()


def save_mode(activation: str, final_activation: str, layers: int) -> int:
    """SAVE of ``whole.cu``: which of pre-activation and output each layer keeps."""
    hidden_pre = layers > 1 and activation_of(activation).saved == "pre"
    final_pre = activation_of(final_activation).saved == "pre"
    if hidden_pre:
        return 1 if final_pre else 4
    return 3 if final_pre else 2


# x, y, weight[], bias[], saved[] | x_stride | rows, layers, width[], padding
_POINTERS = 2 + 3 * MAX_LAYERS
_PARAM_BYTES = _ceil_div(8 * (_POINTERS + 1) + 4 * (2 + MAX_LAYERS + 1), 8) * 8
_Params = ctypes.c_char * _PARAM_BYTES


class _Plan:
    """One prepared launch: fixed shapes, any addresses."""

    def __init__(
        self,
        config: Config,
        widths: Widths,
        rows: int,
        dtype: torch.dtype,
        names: tuple[str, str],
        save: bool,
        vec: int,
        device: int,
    ) -> None:
        from fastlinear.ops.common import cuda_driver as driver
        from fastlinear.ops.common.cuda_launch import allow_cluster

        reason = _size_reason(widths, rows) or config.invalid(widths, dtype.itemsize)
        if reason is None and torch.cuda.get_device_capability(device) != (9, 0):
            reason = "the device is not a Hopper GPU"
        if reason is not None:
            raise _unsupported(reason)
        layers = len(widths) - 1
        mode = save_mode(*names, layers) if save else 0
        text = source(config, widths, dtype, *names, mode, vec)
        driver.make_current(device)
        with driver.loading_allowed():
            shared = config.shared_bytes(widths, dtype.itemsize)
            kernel = _kernel(text, shared, device)
            allow_cluster(kernel, config.cluster)
        self._params = _Params()
        struct.pack_into(
            f"<{layers + 3}i", self._params, 8 * (_POINTERS + 1), rows, layers, *widths
        )
        self._addresses = struct.Struct(f"<{2 + layers}Q")
        self._pointers = struct.Struct(f"<{layers}Q")
        self._stride = struct.Struct("<q")
        self.launch = driver.Launch(
            kernel,
            32 * config.warps,
            config.cluster,
            [self._params],  # type: ignore[list-item]
        )
        self.launch.set_grid(_ceil_div(rows, config.rows) * config.cluster)
        if self.launch.max_clusters() < 1:
            raise _unsupported(f"the device cannot run a cluster of {config.cluster} such blocks")
        self.out_shape = (rows, widths[-1])
        self.saved_shapes = [(rows, n) for n in widths[1:]] if save else []
        self.last_saves_pre = bool(mode in (1, 3))

    def run(
        self,
        x: Tensor,
        weights: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        stream: int,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        params = self._params
        y = x.new_empty(self.out_shape)
        saved = [x.new_empty(shape) for shape in self.saved_shapes[:-1]]
        if self.saved_shapes:
            saved.append(torch.empty_like(y) if self.last_saves_pre else y)
            self._pointers.pack_into(
                params, 8 * (2 + 2 * MAX_LAYERS), *[t.data_ptr() for t in saved]
            )
        self._addresses.pack_into(
            params, 0, x.data_ptr(), y.data_ptr(), *[w.data_ptr() for w in weights]
        )
        self._pointers.pack_into(
            params,
            8 * (2 + MAX_LAYERS),
            *[0 if b is None else b.data_ptr() for b in biases],
        )
        self._stride.pack_into(params, 8 * _POINTERS, x.stride(0))
        self.launch.run(stream)
        return y, tuple(saved)


_lock = threading.Lock()
_cubins: dict[str, bytes] = {}
_kernels: dict[tuple[str, int, int], object] = {}
_plans: dict[tuple[object, ...], _Plan] = {}


def _unsupported(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "mlp (whole_cuda backend)",
        expected="a problem this backend serves",
        received=reason,
        remedy="Choose another backend or leave the choice to dispatch.",
    )


def _kernel(text: str, shared: int, device: int):  # type: ignore[no-untyped-def]
    from fastlinear.ops.common import cuda_driver as driver

    kernel = _kernels.get((text, shared, device))
    if kernel is None:
        cubin = _cubins.get(text)
        if cubin is None:
            cubin = _cubins[text] = driver.compile_cubin(text, _SOURCE.name, ARCH)
        kernel = _kernels[text, shared, device] = driver.Kernel(cubin, _KERNEL, shared, device)
    return kernel


def forward(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activation: str,
    final_activation: str,
    save: bool,
    *,
    config: Config | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h_{i+1} = act_i(h_i W_iᵀ + b_i) for all layers in one kernel, float32 accumulation.

    Args:
        x: (M, n_0) bfloat16, float16 or float32 with contiguous columns; others are copied.
        weights: per layer (n_{i+1}, n_i), x's dtype, contiguous; others are copied.
        biases: per layer (n_{i+1},) or None.
        activation, final_activation: names, for hidden layers and the last.
        save: whether to keep what the backward reads.
        config: how the work is shared out; None picks one.

    Returns:
        y (M, n_L), and per layer (M, n_{i+1}) its pre-activation or output (() unless ``save``).

    Raises:
        UnsupportedError: for sizes, dtypes or devices that ``reason_not`` refuses.
    """
    index = x.device.index
    if index is None or x.dtype not in _DTYPES:
        raise _unsupported(f"x is {x.dtype} on {x.device}")
    if index != torch._C._cuda_getDevice():
        with torch.cuda.device(index):
            return forward(x, weights, biases, activation, final_activation, save, config=config)
    if x.stride(1) != 1:
        x = x.contiguous()
    bits = 0
    shapes = []
    for weight in weights:
        if not weight.is_contiguous():
            weights = tuple([w.contiguous() for w in weights])
            return forward(x, weights, biases, activation, final_activation, save, config=config)
        bits |= weight.data_ptr()
        shapes.append(weight.shape)
    for bias in biases:
        if bias is not None and bias.stride(0) != 1:
            biases = tuple([None if b is None else b.contiguous() for b in biases])
            break
    key = (x.shape, x.dtype, activation, final_activation, save, bits & 15, index, config, *shapes)
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            plan = _new_plan(key, x, weights, activation, final_activation, save, bits, config)
        return plan.run(x, weights, biases, torch._C._cuda_getCurrentRawStream(index))


def _new_plan(
    key: tuple[object, ...],
    x: Tensor,
    weights: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    save: bool,
    bits: int,
    config: Config | None,
) -> _Plan:
    rows, itemsize = x.shape[0], x.dtype.itemsize
    widths = (x.shape[1], *[w.shape[0] for w in weights])
    for k in widths[:-1]:
        bits |= k * itemsize
    vec = min(bits & -bits, 16)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    plan = _plans[key] = _Plan(
        config or config_for(widths, rows, itemsize),
        widths,
        rows,
        x.dtype,
        (activation, final_activation),
        save,
        vec,
        x.device.index,
    )
    return plan
