"""Backend ``whole_cuda`` of mlp: every layer in one kernel for Hopper, in CUDA C++.

There are four kernels, each with a host side of the same name. In ``whole.cu``
(``clusters.py``) a cluster of up to 16 blocks carries a few rows of x through all layers;
hidden activations go from block to block through shared memory and never leave the chip. In
``grid.cu`` all multiprocessors share every layer of a chain of equal widths, and hidden
activations pass through the L2 cache. ``stream.cu`` does so while weights stream through shared
memory (16 bits), and ``launches.cu`` has a launch a layer, each begun while the one before still
runs. ``device.cu`` and ``exchange.cu`` are what they are written in.

``choice.py`` predicts which kernel takes the least time, and how it shares the work out. This file
compiles it with NVRTC (once per choice and process) and launches it. Weights are read at every call
from where they lie. Blocks wait for one another only inside a cluster, which the hardware starts as
a whole, or in a cooperative launch: no launch can deadlock.

Accumulation is in float32, in a fixed order: results are deterministic. float32 itself takes plain
multiply-adds, or three tf32 products a step with an error no larger.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.core.errors import UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_hopper
from fastlinear.families.mlp.cuda import choice, clusters, grid, launches
from fastlinear.families.mlp.cuda import rows as many_rows
from fastlinear.families.mlp.cuda import stream as whole_stream
from fastlinear.families.mlp.cuda import tasks as whole_tasks
from fastlinear.families.mlp.cuda.choice import Sharing
from fastlinear.families.mlp.cuda.clusters import MAX_LAYERS, ClustersPlan, save_mode
from fastlinear.families.mlp.cuda.config import Config, Widths
from fastlinear.families.mlp.cuda.grid import Grid, GridPlan
from fastlinear.families.mlp.cuda.launches import Launches, LaunchesPlan
from fastlinear.families.mlp.cuda.stream import Stream, StreamPlan
from fastlinear.families.mlp.problem import widths_of
from fastlinear.fastpath import recorder
from fastlinear.kernels.cuda.hopper import HALF_DTYPES
from fastlinear.kernels.cuda.launch import allow_cluster
from fastlinear.native import cuda_driver as driver

__all__ = [
    "MAX_LAYERS",
    "MAX_ROWS",
    "MAX_UNALIGNED",
    "Config",
    "Grid",
    "Launches",
    "Stream",
    "forward",
    "reason_not",
]

ARCH = "sm_90a"
MAX_ROWS = 1024
"""Beyond, times are not known: more rows are for other backends."""
MAX_UNALIGNED = 1024
"""Of widths. Wider weights that do not start on 16 bytes are copied."""

Plan = ClustersPlan | GridPlan | LaunchesPlan | StreamPlan
_MAX_PLANS = 1024
_DTYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if p.piece != "forward":
        return "computes the forward only"
    if (why := why_no_hopper(p)) is not None:
        return why
    if p.dtype not in _DTYPES.values():
        return f"no kernel for {p.dtype}"
    if p.option("x") == "strided":
        return "needs rows of x that are contiguous"
    if p.option("w") == "mixed":
        return "needs contiguous weights"
    widths, rows = widths_of(p), p.dim("M")
    itemsize = 4 if p.dtype == "float32" else 2
    if min(widths) < 1 or rows < 1:
        return "an empty dimension"
    if len(widths) - 1 > MAX_LAYERS:
        return f"{len(widths) - 1} layers are more than {MAX_LAYERS}"
    if rows > MAX_ROWS:
        return f"{rows} rows are more than {MAX_ROWS}"
    aligned = not any(k * itemsize % 16 for k in widths[:-1])
    if choice.sharings(widths, rows, itemsize, aligned):
        return None
    return f"rows of a width of {max(widths)} need weights whose rows start on 16 bytes"


def reason_not_rows(p: Problem) -> str | None:
    """Why ``rows_cuda`` cannot serve the Problem, or None."""
    if (why := why_no_hopper(p)) is not None:
        return why
    if p.dtype not in HALF_DTYPES.values():
        return f"no kernel for {p.dtype}"
    widths, m, most = widths_of(p), p.dim("M"), many_rows.MAX_WIDTH
    if not 2 <= len(widths) - 1 <= many_rows.MAX_STEPS:
        return f"{len(widths) - 1} layers are not 2 to {many_rows.MAX_STEPS}"
    if min(widths) < 1 or m < 1:
        return "an empty dimension"
    if max(widths) > most:
        return f"a width of {max(widths)} is more than the {most} that stay on the chip"
    return None if m < 1 << 30 else "needs fewer than 2^30 rows"


def reason_not_tasks(p: Problem) -> str | None:
    """Why ``tasks_cuda`` cannot serve the Problem, or None."""
    if (why := why_no_hopper(p)) is not None:
        return why
    if p.dtype not in HALF_DTYPES.values():
        return f"no kernel for {p.dtype}"
    widths, m = widths_of(p), p.dim("M")
    if len(widths) - 1 > whole_tasks.MAX_LAYERS:
        return f"{len(widths) - 1} layers are more than {whole_tasks.MAX_LAYERS}"
    if min(widths) < 1 or m < 1:
        return "an empty dimension"
    return None if max(m, *widths) < 1 << 30 else "sizes must stay below 2^30"


_lock = threading.Lock()
_cubins: dict[str, bytes] = {}
_kernels: dict[tuple[str, int, int], driver.Kernel] = {}
_plans: dict[tuple[object, ...], Plan] = {}


def _unsupported(reason: str) -> UnsupportedError:
    return UnsupportedError(
        "mlp (whole_cuda backend)",
        "a problem this backend serves",
        reason,
        "Choose another backend or leave the choice to dispatch.",
    )


def _kernel(text: str, shared: int, device: int, name: str) -> driver.Kernel:
    kernel = _kernels.get((text, shared, device))
    if kernel is None:
        cubin = _cubins.get(text)
        if cubin is None:
            cubin = _cubins[text] = driver.compile_cubin(text, f"{name}.cu", ARCH)
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
    config: Sharing | Launches | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h_{i+1} = act_i(h_i W_iᵀ + b_i) for all layers, float32 accumulation.

    Args:
        x: (M, n_0) bfloat16, float16 or float32 with contiguous columns; others are copied.
        weights: per layer (n_{i+1}, n_i), x's dtype, contiguous; others are copied.
        biases: per layer (n_{i+1},) or None.
        activation, final_activation: names, for hidden layers and the last.
        save: whether to keep what the backward reads.
        config: how the work is shared out; None picks one. Launches holds for every layer, a tuple
            has one for each.

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
    if bits & 15 and max(*outs, x.size(1)) > MAX_UNALIGNED:
        weights = tuple([w.clone() for w in weights])
        return forward(x, weights, biases, activation, final_activation, save, config=config)
    key = (x.shape, x.dtype, activation, final_activation, save, bits & 15, index, config, *outs)
    with _lock:
        plan = _plans.get(key)
        if plan is None:
            plan = _new_plan(key, x, weights, activation, final_activation, save, bits, config)
        stream, recording = torch._C._cuda_getCurrentRawStream(index), recorder.active()
        if isinstance(plan, LaunchesPlan):
            return plan.run(x, weights, biases, stream, recording)
        if recording is not None:
            return plan.record(recording, x, weights, biases, stream)
        return plan.run(x, addresses, shifts, stream)


def _new_plan(
    key: tuple[object, ...],
    x: Tensor,
    weights: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    save: bool,
    bits: int,
    config: Sharing | Launches | None,
) -> Plan:
    """The plan of calls like this one."""
    widths = (x.shape[1], *[w.shape[0] for w in weights])
    for k in widths[:-1]:
        bits |= k * x.dtype.itemsize
    call = _Call(
        widths, x.shape[0], x.dtype, (activation, final_activation), save, x.device.index, bits
    )
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    able: tuple[Sharing, ...]
    if config is None:
        able = choice.sharings(widths, call.rows, x.dtype.itemsize, call.vec == 16)
    else:
        able = ((config,) * len(weights) if isinstance(config, Launches) else config,)
    for sharing in able:
        plan = _plan(call, sharing)
        if plan is not None:
            _plans[key] = plan
            return plan
    raise _unsupported(
        f"the device cannot run all blocks of {able[0]} at once" if able else "no kernel serves it"
    )


class _Call(NamedTuple):
    """What a plan stands on."""

    widths: Widths
    rows: int
    dtype: torch.dtype
    names: tuple[str, str]  # of the activations of hidden layers and of the last
    save: bool
    device: int
    bits: int  # of all addresses and lengths of rows of weights, in bytes

    @property
    def vec(self) -> int:
        """Bytes at which every row of every weight starts, at most 16."""
        return min(self.bits & -self.bits, 16)

    @property
    def mode(self) -> int:
        """SAVE of ``whole.cu``."""
        return save_mode(*self.names, len(self.widths) - 1) if self.save else 0


def _plan(call: _Call, sharing: Sharing) -> Plan | None:
    """The plan of a call shared out in this way; None where its blocks cannot run at once."""
    widths, rows, dtype = call.widths, call.rows, call.dtype
    if len(widths) - 1 > MAX_LAYERS:
        raise _unsupported(f"{len(widths) - 1} layers are more than {MAX_LAYERS}")
    if not isinstance(sharing, Config) and call.vec != 16:
        raise _unsupported(f"{type(sharing).__name__} needs weights whose rows start on 16 bytes")
    if isinstance(sharing, tuple):
        return _launches_plan(call, sharing)
    plan: GridPlan | StreamPlan
    driver.make_current(call.device)
    if isinstance(sharing, Config):
        return _clusters_plan(call, sharing)
    if isinstance(sharing, Grid):
        _refuse(sharing.invalid(widths, rows, dtype.itemsize))
        text = grid.source(sharing, widths[0], rows, dtype, *call.names, call.mode)
        shared = sharing.shared_bytes(widths[0], rows, dtype.itemsize)
        kernel = _loaded(text, shared, call.device, grid.KERNEL)
        plan = GridPlan(kernel, sharing, widths, rows, dtype, call.mode)
    else:
        _refuse(
            "Stream is for 16-bit dtypes" if dtype.itemsize != 2 else sharing.invalid(widths, rows)
        )
        text = whole_stream.source(sharing, widths, rows, dtype, *call.names, call.mode)
        shared = sharing.shared_bytes(widths, rows)
        kernel = _loaded(text, shared, call.device, whole_stream.KERNEL)
        plan = StreamPlan(kernel, sharing, widths, rows, dtype, call.mode)
    return plan if plan.runs_at_once else None


def _refuse(reason: str | None) -> None:
    if reason is not None:
        raise _unsupported(reason)


def _loaded(text: str, shared: int, device: int, name: str) -> driver.Kernel:
    """The kernel of a source, compiled and loaded, also while a graph is recorded."""
    with driver.loading_allowed():
        return _kernel(text, shared, device, name)


def _clusters_plan(call: _Call, config: Config) -> ClustersPlan | None:
    """The plan of a launch of ``whole.cu``; None where no cluster of so many blocks can run."""
    widths, itemsize = call.widths, call.dtype.itemsize
    _refuse(config.invalid(widths, itemsize))
    if torch.cuda.get_device_capability(call.device) != (9, 0):
        raise _unsupported("the device is not a Hopper GPU")
    if config.direct and call.vec != 16:
        raise _unsupported("weights that do not start on 16 bytes cannot go straight to registers")
    text = clusters.source(config, widths, call.dtype, *call.names, call.mode, call.vec)
    kernel = _loaded(text, config.shared_bytes(widths, itemsize), call.device, clusters.KERNEL)
    with driver.loading_allowed():
        allow_cluster(kernel, config.cluster)
    plan = ClustersPlan(kernel, config, widths, call.rows, call.mode)
    return plan if plan.runs else None


def _launches_plan(call: _Call, configs: tuple[Launches, ...]) -> LaunchesPlan:
    """The plan of one launch a layer."""
    layers = len(call.widths) - 1
    if len(configs) != layers:
        raise _unsupported(f"{len(configs)} configurations for {layers} layers")
    driver.make_current(call.device)
    kernels = []
    for config in configs:
        _refuse(config.invalid(call.rows, call.dtype.itemsize))
        text = launches.source(config, call.rows, call.dtype)
        kernels.append(_loaded(text, config.shared_bytes(call.rows), call.device, launches.KERNEL))
    return LaunchesPlan(kernels, configs, call.widths, call.rows, call.dtype, call.names, call.mode)
