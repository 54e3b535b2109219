"""Backend ``whole_cuda`` of mlp: every layer in one kernel for Hopper, in CUDA C++.

There are three kernels. In ``whole.cu`` a cluster of up to 16 blocks carries a few rows of x
through all layers; hidden activations go from block to block through shared memory and never leave
the chip. Wide chains of equal widths take ``whole_grid.cu`` (host side: ``whole_grid.py``): there
all multiprocessors share every layer and hidden activations pass through the L2 cache. Chains whose
weights are too many for that take ``whole_launches.cu`` (``whole_launches.py``): a launch a layer,
each begun while the one before still runs. ``whole_device.cu`` is what all are written in. This
file chooses how the work is shared out, compiles it with NVRTC (once per choice and process) and
launches it. Weights are read at every call from where they lie. Blocks wait for one another only
inside a cluster, which the hardware starts as a whole, or in a cooperative launch: no launch can
deadlock.

Accumulation is in float32, in a fixed order: results are deterministic. float32 itself takes plain
multiply-adds, or three tf32 products a step with an error no larger.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.ops.common import cuda_driver as driver
from fastlinear.ops.common.activations import NAMES
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.common.cuda_launch import allow_cluster
from fastlinear.ops.mlp import reference
from fastlinear.ops.mlp.problem import widths_of
from fastlinear.ops.mlp.whole_cuda_config import (
    Config,
    Widths,
    config_for,
    grid_for,
    input_units,
    launches_for,
)
from fastlinear.ops.mlp.whole_grid import KERNEL as GRID_KERNEL
from fastlinear.ops.mlp.whole_grid import Grid, GridPlan
from fastlinear.ops.mlp.whole_grid import source as grid_source
from fastlinear.ops.mlp.whole_launches import KERNEL as LAUNCHES_KERNEL
from fastlinear.ops.mlp.whole_launches import Launches, LaunchesPlan
from fastlinear.ops.mlp.whole_launches import source as launches_source

__all__ = [
    "MAX_LAYERS",
    "MAX_ROWS",
    "MAX_ROWS_WIDE",
    "MAX_WIDTH",
    "Config",
    "Grid",
    "Launches",
    "config_for",
    "forward",
    "grid_for",
    "launches_for",
    "reason_not",
]

ARCH = "sm_90a"
MAX_WIDTH = 1024
"""Of chains that neither `grid_for` nor `launches_for` shares out."""
MAX_LAYERS = 32
MAX_ROWS = 1024
MAX_ROWS_WIDE = 128
"""Of widths above 512. Beyond, every block of rows reading all weights again costs too much."""

Sharing = Config | Grid | Launches
_SOURCES = [Path(__file__).with_name(name) for name in ("whole_device.cu", "whole.cu")]
_KERNEL = "whole_mlp"
_MAX_PLANS = 1024
_DTYPES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_DTYPE_NAMES = ("bfloat16", "float16", "float32")


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
    widths, rows = widths_of(p), p.dim("M")
    itemsize = 4 if p.dtype == "float32" else 2
    if len(widths) - 1 <= MAX_LAYERS and launches_for(widths, rows, itemsize):
        return None
    if max(widths) > MAX_WIDTH and grid_for(widths, rows, itemsize):
        return None
    return _size_reason(widths, rows)


def _size_reason(widths: Widths, rows: int) -> str | None:
    if min(widths) < 1 or rows < 1:
        return "an empty dimension"
    if len(widths) - 1 > MAX_LAYERS:
        return f"{len(widths) - 1} layers are more than {MAX_LAYERS}"
    if max(widths) > MAX_WIDTH:
        return f"a width of {max(widths)} is more than {MAX_WIDTH}"
    most = MAX_ROWS if max(widths) <= 512 else MAX_ROWS_WIDE
    if rows > most:
        return f"{rows} rows are more than {most} at widths up to {max(widths)}"
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
    return "".join(f"#define {k} {v}\n" for k, v in macros.items()) + "".join(
        file.read_text() for file in _SOURCES
    )


def save_mode(activation: str, final_activation: str, layers: int) -> int:
    """SAVE of ``whole.cu``: which of pre-activation and output each layer keeps."""
    hidden_pre = layers > 1 and activation_of(activation).saved == "pre"
    final_pre = activation_of(final_activation).saved == "pre"
    if hidden_pre:
        return 1 if final_pre else 4
    return 3 if final_pre else 2


# x, y, weight[], bias[], saved[] | x_stride | rows, layers, width[], padding
_POINTERS = 2 + 3 * MAX_LAYERS
_PARAM_BYTES = (8 * (_POINTERS + 1) + 4 * (2 + MAX_LAYERS + 1) + 7) // 8 * 8
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
        reason = _size_reason(widths, rows) or config.invalid(widths, dtype.itemsize)
        if reason is None and torch.cuda.get_device_capability(device) != (9, 0):
            reason = "the device is not a Hopper GPU"
        if reason is None and config.direct and vec != 16:
            reason = "weights that do not start on 16 bytes cannot go straight to registers"
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
        self.launch.set_grid(-(-rows // config.rows) * config.cluster)
        if self.launch.max_clusters() < 1:
            raise _unsupported(f"the device cannot run a cluster of {config.cluster} such blocks")
        self.out_shape = (rows, widths[-1])
        self.saved_shapes = [(rows, n) for n in widths[1:]] if save else []
        self.last_saves_pre = bool(mode in (1, 3))

    def run(
        self,
        x: Tensor,
        weights: Sequence[int],
        biases: Sequence[int],
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
        self._addresses.pack_into(params, 0, x.data_ptr(), y.data_ptr(), *weights)
        self._pointers.pack_into(params, 8 * (2 + MAX_LAYERS), *biases)
        self._stride.pack_into(params, 8 * _POINTERS, x.stride(0))
        self.launch.run(stream)
        return y, tuple(saved)


_lock = threading.Lock()
_cubins: dict[str, bytes] = {}
_kernels: dict[tuple[str, int, int], driver.Kernel] = {}
_plans: dict[tuple[object, ...], _Plan | GridPlan | LaunchesPlan] = {}
_roomless: set[tuple[object, ...]] = set()
"""Calls too wide for ``whole.cu`` on a device without room for ``whole_grid.cu``."""


def _unsupported(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "mlp (whole_cuda backend)",
        expected="a problem this backend serves",
        received=reason,
        remedy="Choose another backend or leave the choice to dispatch.",
    )


def _kernel(text: str, shared: int, device: int, name: str = _KERNEL) -> driver.Kernel:
    kernel = _kernels.get((text, shared, device))
    if kernel is None:
        cubin = _cubins.get(text)
        if cubin is None:
            cubin = _cubins[text] = driver.compile_cubin(text, _SOURCES[-1].name, ARCH)
        kernel = _kernels[text, shared, device] = driver.Kernel(cubin, name, shared, device)
    return kernel


def forward(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activation: str,
    final_activation: str,
    save: bool,
    *,
    config: Sharing | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h_{i+1} = act_i(h_i W_iᵀ + b_i) for all layers, float32 accumulation.

    Args:
        x: (M, n_0) bfloat16, float16 or float32 with contiguous columns; others are copied.
        weights: per layer (n_{i+1}, n_i), x's dtype, contiguous; others are copied.
        biases: per layer (n_{i+1},) or None.
        activation, final_activation: names, for hidden layers and the last.
        save: whether to keep what the backward reads.
        config: how the work is shared out; None picks one. Launches holds for every layer. A chain
            too wide for one cluster, on a device that cannot run all blocks of a Grid at once, then
            goes through PyTorch's ops.

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
    addresses = []
    for weight in weights:
        if not weight.is_contiguous():
            weights = tuple([w.contiguous() for w in weights])
            return forward(x, weights, biases, activation, final_activation, save, config=config)
        address = weight.data_ptr()
        bits |= address
        addresses.append(address)
    shifts = []
    for bias in biases:
        if bias is not None and not bias.is_contiguous():
            biases = tuple([None if b is None else b.contiguous() for b in biases])
            return forward(x, weights, biases, activation, final_activation, save, config=config)
        shifts.append(0 if bias is None else bias.data_ptr())
    outs = [weight.size(0) for weight in weights]
    if bits & 15 and max(*outs, x.size(1)) > MAX_WIDTH:
        weights = tuple([w.clone() for w in weights])
        return forward(x, weights, biases, activation, final_activation, save, config=config)
    key = (x.shape, x.dtype, activation, final_activation, save, bits & 15, index, config, *outs)
    with _lock:
        plan = _plans.get(key)
        if plan is None and key not in _roomless:
            plan = _new_plan(key, x, weights, activation, final_activation, save, bits, config)
        if plan is not None:
            return plan.run(x, addresses, shifts, torch._C._cuda_getCurrentRawStream(index))
    return reference.forward(x, weights, biases, activation, final_activation, save)


def _new_plan(
    key: tuple[object, ...],
    x: Tensor,
    weights: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    save: bool,
    bits: int,
    config: Sharing | None,
) -> _Plan | GridPlan | LaunchesPlan | None:
    rows, itemsize = x.shape[0], x.dtype.itemsize
    widths = (x.shape[1], *[w.shape[0] for w in weights])
    for k in widths[:-1]:
        bits |= k * itemsize
    vec = min(bits & -bits, 16)
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    names, device = (activation, final_activation), x.device.index
    plan: _Plan | GridPlan | LaunchesPlan | None = None
    if isinstance(config, Launches):
        launches: tuple[Launches, ...] | None = (config,) * len(weights)
    else:
        launches = launches_for(widths, rows, itemsize) if config is None and vec == 16 else None
    if launches is not None:
        if vec != 16:
            raise _unsupported("Launches need weights whose rows start on 16 bytes")
        _plans[key] = plan = _launches_plan(launches, widths, rows, x.dtype, names, save, device)
        return plan
    grid = config if isinstance(config, Grid) else None
    if config is None and vec == 16:
        grid = grid_for(widths, rows, itemsize)
    if isinstance(config, Grid) and vec != 16:
        raise _unsupported("a Grid needs weights whose rows start on 16 bytes")
    if grid is not None:
        plan = _grid_plan(grid, widths, rows, x.dtype, names, save, device)
        if plan is None and config is not None:
            raise _unsupported(f"the device cannot run all blocks of {grid} at once")
    if plan is None and grid is not None and max(widths) > MAX_WIDTH:
        _roomless.add(key)
        return None
    if plan is None:
        reason = _size_reason(widths, rows)
        if reason is not None:
            raise _unsupported(reason)
        sharing = config if isinstance(config, Config) else None
        sharing = sharing or config_for(widths, rows, itemsize, vec == 16)
        plan = _Plan(sharing, widths, rows, x.dtype, names, save, vec, device)
    _plans[key] = plan
    return plan


def _grid_plan(
    grid: Grid,
    widths: Widths,
    rows: int,
    dtype: torch.dtype,
    names: tuple[str, str],
    save: bool,
    device: int,
) -> GridPlan | None:
    """The plan of a launch over all multiprocessors, or None where there is no room for it."""
    reason = grid.invalid(widths, rows, dtype.itemsize)
    if reason is not None:
        raise _unsupported(reason)
    mode = save_mode(*names, len(widths) - 1) if save else 0
    text = grid_source(grid, widths[0], rows, dtype, *names, mode)
    driver.make_current(device)
    with driver.loading_allowed():
        shared = grid.shared_bytes(widths[0], rows, dtype.itemsize)
        kernel = _kernel(text, shared, device, GRID_KERNEL)
    plan = GridPlan(kernel, grid, widths, rows, dtype, mode)
    return plan if plan.runs_at_once else None


def _launches_plan(
    configs: tuple[Launches, ...],
    widths: Widths,
    rows: int,
    dtype: torch.dtype,
    names: tuple[str, str],
    save: bool,
    device: int,
) -> LaunchesPlan:
    """The plan of one launch a layer."""
    if len(widths) - 1 > MAX_LAYERS:
        raise _unsupported(f"{len(widths) - 1} layers are more than {MAX_LAYERS}")
    for config in configs:
        reason = config.invalid(rows, dtype.itemsize)
        if reason is not None:
            raise _unsupported(reason)
    mode = save_mode(*names, len(widths) - 1) if save else 0
    driver.make_current(device)
    with driver.loading_allowed():
        kernels = [
            _kernel(launches_source(c, rows, dtype), c.shared_bytes(rows), device, LAUNCHES_KERNEL)
            for c in configs
        ]
    return LaunchesPlan(kernels, configs, widths, rows, dtype, names, mode)
