"""Backend ``whole`` of mlp in Triton: a chain of narrow Linears in one kernel, sm_80 and later.

Forward: one launch, hidden activations in registers. Backward: one launch for dy → dpre_i → dx, one
for every dW_i and db_i over slices of the rows, one that sums the slices in a fixed order. Weights
are read from where they lie at every call, so a changed weight is seen.

Triton is imported on first use, so this file may be imported for ``reason_not`` alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from fastlinear.core.device import device_facts
from fastlinear.core.precision import matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.mlp.problem import layer_activations, widths_of
from fastlinear.ops.mlp.reference import Biases, Needs, Weights, first_needed

__all__ = ["MAX_WIDTH", "WholeConfig", "backward", "forward", "reason_not"]

Tensor = torch.Tensor

MAX_WIDTH = 128
_MAX_LAYERS = 16  # unrolled into one kernel; longer chains take several
_MAX_PLANS = 1024
_MIN_BLOCK = 16
_MAX_WIDE_FLOAT32_ROWS = 4096  # measured on an H200: ahead at 64 rows, behind at 65536
_FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))  # capabilities with full-rate float64 products
_RESIDENT_TILES = 5  # of 128 by 128 16-bit numbers, in a Hopper multiprocessor

_plans: dict[Any, Any] = {}


@dataclass(frozen=True)
class WholeConfig:
    """How one chain kernel is launched.

    Attributes:
        block_m: rows a program takes at a time, a power of two of at least 16.
        warps, stages: warps of a program, depth of the load pipeline.
        resident: how many of the weights' tiles are loaded once and kept on the chip.
        ahead: tiles between the load of a weight's tile and its use.
        per_unit: programs on each multiprocessor; 0 gives every row block a program of its own.
        chunk: largest part in which a width is held, a power of two of at least 16.
    """

    block_m: int
    warps: int
    stages: int = 1
    resident: int = 0
    ahead: int = 1
    per_unit: int = 0
    chunk: int = 128


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve the Problem, or None."""
    if p.device != "cuda":
        return "its kernels run on CUDA devices only"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if not _has_triton():
        return "the package triton is not installed"
    if p.dtype == "float64":
        return "no kernel for float64"
    if torch.cuda.get_device_capability() < (8, 0):
        return "needs compute capability 8.0 or later"
    widths = widths_of(p)
    if max(widths) > MAX_WIDTH:
        return f"a width of {max(widths)} is more than the {MAX_WIDTH} one kernel holds"
    if min(widths) < 1:
        return "a width of 0"
    if p.dim("M") >= 2**30:
        return "needs fewer than 2^30 rows"
    exact = p.dtype == "float32" and p.precision == "highest"
    if exact and max(widths) > 64 and p.dim("M") > _MAX_WIDE_FLOAT32_ROWS:
        return "float32 layers of more than 64 features are slower than PyTorch's at so many rows"
    return None


def forward(
    x: Tensor,
    weights: Weights,
    biases: Biases,
    activation: str,
    final_activation: str,
    save: bool,
    *,
    config: WholeConfig | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """h_{i+1} = act_i(h_i W_iᵀ + b_i) for all layers in one kernel, float32 accumulation.

    Args:
        x: (M, n_0) of any strides; float32, bfloat16 or float16.
        weights: per layer (n_{i+1}, n_i), x's dtype; best contiguous, others are copied.
        biases: per layer (n_{i+1},) or None.
        activation, final_activation: names, for hidden layers and the last.
        save: whether to keep what ``backward`` reads.
        config: launch configuration; None picks one.

    Returns:
        y (M, n_L), and per layer (M, n_{i+1}) its pre-activation or output (() unless ``save``).
    """
    x, weights = _rows(x), _contiguous(weights)
    for b in biases:
        if b is not None and not b.is_contiguous():
            biases = tuple([None if t is None else t.contiguous() for t in biases])
            break
    key = (
        *(x.shape, x.stride(0), x.dtype, x.device, activation, final_activation, save, config),
        *(matmul_precision(x.dtype), tuple([w.shape for w in weights])),
        _alignment((x, *weights, *biases)),
    )
    plan = _plans.get(key)
    if plan is None:
        names = (activation, final_activation)
        plan = _remember(key, _Forward(x, weights, biases, names, save, config))
    result: tuple[Tensor, tuple[Tensor, ...]] = plan.run(x, weights, biases)
    return result


def backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    needs: Needs,
    *,
    config: WholeConfig | None = None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Gradients of ``forward``: (dx, dWs, dbs), each None where ``needs`` does not ask for it.

    Args:
        dy: (M, n_L) of any strides.
        x, weights: as given to ``forward``.
        saved: as ``forward`` gave it.
        activation, final_activation: names.
        needs: (x, per layer weight, per layer bias).
        config: launch configuration of the data chain; None picks one.

    Accumulates in float32; dWs and dbs are sums over slices of the rows in a fixed order, so
    results are deterministic. Gradients of one call are views of one buffer.
    """
    x, weights = _rows(x), _contiguous(weights)
    dy, saved = dy.contiguous(), _contiguous(saved)
    key = (
        *(x.shape, x.stride(0), x.dtype, x.device, activation, final_activation, needs, config),
        *(matmul_precision(x.dtype), tuple([w.shape for w in weights])),
        _alignment((x, dy, *weights, *saved)),
    )
    plan = _plans.get(key)
    if plan is None:
        names = (activation, final_activation)
        plan = _remember(key, _Backward(x, weights, names, needs, config))
    result: tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]
    result = plan.run(dy, x, weights, saved)
    return result


class _Forward:
    """Launches of the forward for calls of one kind: one for every _MAX_LAYERS layers."""

    def __init__(
        self,
        x: Tensor,
        weights: Weights,
        biases: Biases,
        names: tuple[str, str],
        save: bool,
        config: WholeConfig | None,
    ) -> None:
        self._widths = widths = (x.shape[1], *(w.shape[0] for w in weights))
        layers = layer_activations(len(weights), *names)
        pre = [save and activation_of(name).saved == "pre" for name in layers]
        last = len(weights) - 1
        # Layers whose saved tensor is not y, and of those the ones at the end of a launch
        self._kept = [i for i in range(len(weights)) if pre[i] or (save and i < last)]
        self._save = save
        self._chunks: list[tuple[int, int, bool, Any]] = []
        M = x.shape[0]
        for first, end in _chunks(len(weights)):
            part = widths[first : end + 1]
            chosen = config or forward_config(
                M, part, x.dtype, _units(x.device), _capability(x.device)
            )
            row_blocks, programs = _grid(M, chosen, x.device)
            layout = _layout(part, chosen.chunk, False)
            rest = (
                *(M, x.stride(0) if first == 0 else part[0], row_blocks, programs),
                *layout,
                (_scheme(x),) * (end - first),
                *(names[0], layers[end - 1], pre[first], pre[end - 1], _math(x.dtype)),
                *(chosen.chunk, chosen.block_m),
                *(min(chosen.resident, len(layout[5])), chosen.ahead),
                x.device.type == "cpu",
            )
            launch = _launch("_mlp_fwd_kernel", (programs,), rest, x.device, chosen)
            # An inner boundary's output is what is saved there, or a temporary
            boundary_kept = end - 1 < last and save and not pre[end - 1]
            self._chunks.append((first, end, boundary_kept, launch))

    def run(self, x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, tuple[Tensor, ...]]:
        M, widths, total = x.shape[0], self._widths, len(weights)
        y = _empty((M, widths[-1]), x)
        kept: list[Tensor | None] = [None] * total
        if self._kept:
            for i, t in zip(self._kept, _stack(self._kept, M, widths, x), strict=True):
                kept[i] = t
        if M:
            h = x
            for first, end, boundary_kept, launch in self._chunks:
                stored = kept[first:end]
                if end == total:
                    out = y
                elif boundary_kept:
                    boundary = stored[-1]
                    assert boundary is not None
                    out, stored[-1] = boundary, None
                else:
                    out = _empty((M, widths[end]), x)
                launch(h, weights[first:end], biases[first:end], out, tuple(stored))
                h = out
        y = _rounded(y, x)
        if not self._save:
            return y, ()
        return y, tuple([y if t is None else _rounded(t, x) for t in kept])


class _Backward:
    """Launches of the backward for calls of one kind."""

    def __init__(
        self,
        x: Tensor,
        weights: Weights,
        names: tuple[str, str],
        needs: Needs,
        config: WholeConfig | None,
    ) -> None:
        self._widths = widths = (x.shape[1], *(w.shape[0] for w in weights))
        self._needs = needs
        total, M = len(weights), x.shape[0]
        layers = layer_activations(total, *names)
        stop = first_needed(needs)
        need_x, need_ws, need_bs = needs
        wanted = [i for i in range(total) if need_ws[i] or need_bs[i]]
        self._read = [name != "none" for name in layers]
        # Per launch: layers, the layers whose dpre is stored, whether dx is wanted, the launch
        self._chunks: list[tuple[int, int, list[int], bool, Any]] = []
        self._dpres: list[int] = []
        for first, end in reversed(_chunks(total)):
            if end <= stop:
                continue
            stored = [
                i for i in wanted if first <= i < end and (i < end - 1 or layers[i] != "none")
            ]
            self._dpres += stored
            wants_dx = first > stop or (first == 0 and need_x)
            launch = None
            if stored or wants_dx:
                part = widths[first : end + 1]
                chosen = config or backward_config(M, part, x.dtype, _units(x.device))
                row_blocks, programs = _grid(M, chosen, x.device)
                layout = _layout(part, chosen.chunk, True)
                rest = (
                    *(M, row_blocks, programs, end - first, max(stop - first, 0)),
                    *layout[1:],
                    (_scheme(x),) * (end - first),
                    *(names[0], layers[end - 1], _math(x.dtype)),
                    *(chosen.chunk, chosen.block_m),
                    *(min(chosen.resident, len(layout[5])), chosen.ahead),
                    x.device.type == "cpu",
                )
                launch = _launch("_mlp_bwd_dx_kernel", (programs,), rest, x.device, chosen)
            self._chunks.append((first, end, stored, wants_dx, launch))
        self._sums = [
            _WeightGrads(x, widths, names[0], wanted[k : k + _MAX_LAYERS])
            for k in range(0, len(wanted), _MAX_LAYERS)
        ]

    def run(
        self, dy: Tensor, x: Tensor, weights: Weights, saved: tuple[Tensor, ...]
    ) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
        M, widths, total = x.shape[0], self._widths, len(weights)
        need_x, need_ws, need_bs = self._needs
        read = [t if r else None for t, r in zip(saved, self._read, strict=True)]
        dpres: list[Tensor | None] = [None] * total
        if self._dpres:
            for i, t in zip(self._dpres, _stack(self._dpres, M, widths, x), strict=True):
                dpres[i] = t
        g: Tensor = dy
        dx = None
        for first, end, stored, wants_dx, launch in self._chunks:
            if end - 1 not in stored:  # without an activation: the gradient as it comes
                dpres[end - 1] = g
            if launch is None:
                continue
            dx = _empty((M, widths[first]), x) if wants_dx else None
            if M:
                targets = tuple([dpres[i] if i in stored else None for i in range(first, end)])
                launch(g, weights[first:end], tuple(read[first:end]), targets, dx)
            if dx is not None:
                g = dx
        dws: list[Tensor | None] = [None] * total
        dbs: list[Tensor | None] = [None] * total
        for sums in self._sums:
            for i, dw, db in sums.run(x, saved, dpres):
                dws[i] = _rounded(dw, x) if need_ws[i] else None
                dbs[i] = _rounded(db, x) if need_bs[i] else None
        if not need_x:
            return None, tuple(dws), tuple(dbs)
        assert dx is not None
        return _rounded(dx, x), tuple(dws), tuple(dbs)


class _WeightGrads:
    """Launches of every dW_i = dpre_iᵀ h_i and db_i of some layers: a product, then a sum."""

    def __init__(
        self, x: Tensor, widths: tuple[int, ...], activation: str, layers: list[int]
    ) -> None:
        self._layers = layers
        self._shapes = [(widths[i + 1], widths[i]) for i in layers]
        self._sizes: list[int] = []
        offsets = [0]
        for n, k in self._shapes:
            used = n * k + n
            padding = -used % 64  # every dW starts aligned
            self._sizes += [n * k, n, padding]
            offsets.append(offsets[-1] + used + padding)
        self._total = offsets[-1]
        M = x.shape[0]
        chosen = grads_config(x.dtype)
        block_m, chunk = chosen.block_m, chosen.chunk
        recomputed = activation_of(activation).saved == "pre"
        tiles = tuple(
            (
                j,
                offsets[j],
                n,
                k,
                a * chunk,
                b * chunk,
                rows,
                cols,
                int(i == 0),
                int(i and recomputed),
            )
            for j, (i, (n, k)) in enumerate(zip(layers, self._shapes, strict=True))
            for a, rows in enumerate(_parts(n, chunk))
            for b, cols in enumerate(_parts(k, chunk))
        )
        wanted = max(1, chosen.per_unit * _units(x.device) // len(tiles))
        blocks = -(-M // block_m)
        blocks_each = -(-blocks // min(wanted, max(blocks, 1)))
        self._splits = max(1, -(-blocks // max(blocks_each, 1)))
        rest = (
            *(M, x.stride(0), blocks_each * block_m, self._total, len(tiles), tiles, activation),
            *(_math(x.dtype), _scheme(x), block_m, x.device.type == "cpu"),
        )
        grid: tuple[int, ...] = (len(tiles), self._splits)
        self._product = _launch("_mlp_bwd_dw_kernel", grid, rest, x.device, chosen)
        if self._splits > 1:
            summed = (self._total, self._splits, 128, 16)
            grid = (-(-self._total // 128),)
            self._sum = _launch("_mlp_sum_parts_kernel", grid, summed, x.device, WholeConfig(16, 4))

    def run(
        self, x: Tensor, saved: tuple[Tensor, ...], dpres: list[Tensor | None]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """(layer, dW, db) of each layer."""
        layers = self._layers
        flat = _empty((self._total,), x)
        inputs = tuple([saved[i - 1] if i else x for i in layers])
        targets = tuple([dpres[i] for i in layers])
        if x.shape[0] == 0:
            flat.zero_()
        elif self._splits == 1:
            self._product(targets, inputs, flat)
        else:
            parts = torch.empty((self._splits, self._total), dtype=torch.float32, device=x.device)
            self._product(targets, inputs, parts)
            self._sum(parts, flat)
        pieces = flat.split_with_sizes(self._sizes)
        return [
            (i, pieces[3 * j].view(self._shapes[j]), pieces[3 * j + 1])
            for j, i in enumerate(layers)
        ]


def forward_config(
    M: int, widths: tuple[int, ...], dtype: torch.dtype, units: int, capability: tuple[int, int]
) -> WholeConfig:
    """The configuration of the forward of M rows through layers of these widths."""
    wide = max(widths) > 64
    if dtype.itemsize == 4:
        block_m = _block_rows(M, units, 32)
        few = block_m == _MIN_BLOCK
        return WholeConfig(block_m, 8 if wide or few else 4, ahead=int(few), chunk=64)
    block_m = _block_rows(M, units, 128)
    if block_m < 64:
        return WholeConfig(block_m, 8 if wide else 4, ahead=1 if wide else 2)
    if not wide:
        return WholeConfig(block_m, 4, ahead=0)
    if block_m == 128 and capability[0] == 9:
        # One program fills a multiprocessor's registers; its shared memory holds weights
        return WholeConfig(block_m, 8, 1, _RESIDENT_TILES, 0, 1)
    return WholeConfig(block_m, block_m // 16, ahead=0, chunk=64)


def backward_config(M: int, widths: tuple[int, ...], dtype: torch.dtype, units: int) -> WholeConfig:
    """The configuration of the backward's data chain."""
    wide = max(widths) > 64
    if dtype.itemsize == 4:
        return WholeConfig(_block_rows(M, units, 32), 8 if wide else 4, ahead=0, chunk=64)
    block_m = _block_rows(M, units, 64)
    return WholeConfig(block_m, 4, ahead=1, chunk=64)


def grads_config(dtype: torch.dtype) -> WholeConfig:
    """The configuration of the weight gradients' product."""
    if dtype.itemsize == 4:
        return WholeConfig(32, 4, 3, per_unit=2, chunk=64)
    return WholeConfig(64, 4, 3, per_unit=2)


def _block_rows(M: int, units: int, largest: int) -> int:
    """Rows of a program: few where that puts more multiprocessors to work."""
    block = _MIN_BLOCK
    while block < largest and 2 * block * units < M:
        block *= 2
    return block


def _parts(width: int, chunk: int) -> tuple[int, ...]:
    """Sizes of the parts that hold a width: ``chunk``, and a power of two for the rest."""
    whole, rest = divmod(width, chunk)
    padded = (max(_MIN_BLOCK, 1 << (rest - 1).bit_length()),) if rest else ()
    return (chunk,) * whole + padded


def _layout(widths: tuple[int, ...], chunk: int, backward: bool) -> tuple[Any, ...]:
    """(LAYERS, WIDTHS, BLOCKS, PARTS, MAX_PARTS, TILES, STARTS) of a chain kernel."""
    blocks = tuple(_parts(n, chunk) for n in widths)
    parts = tuple(map(len, blocks))
    layers = len(widths) - 1
    tiles: list[tuple[int, int, int]] = []
    starts = [0] * layers
    for i in reversed(range(layers)) if backward else range(layers):
        starts[i] = len(tiles)
        inner = [(i, n, k) for n in range(parts[i + 1]) for k in range(parts[i])]
        tiles += sorted(inner, key=lambda t: t[:0:-1]) if backward else inner
    return layers, widths, blocks, parts, max(parts), tuple(tiles), (*starts, len(tiles))


def _scheme(x: Tensor) -> int:
    """Scheme of float32 products; 16-bit ones ignore it.

    1, TF32, where the user allows it. Otherwise 2, float64 on the matrix unit, where that has the
    rate of plain float32 arithmetic, else 0, that arithmetic. Three TF32 products would not do for
    a chain: the unit truncates as it accumulates, so the layers' errors add up (8 layers of 64
    features on an H200: 1.0e-6, torch's 1.8e-7).
    """
    precision = matmul_precision(x.dtype)
    if precision == "n/a":
        return 0
    if precision != "highest":
        return 1
    return 2 if _capability(x.device) in _FAST_FLOAT64 else 0


def _chunks(layers: int) -> list[tuple[int, int]]:
    """Ranges of layers, one a launch, of nearly equal lengths."""
    count = -(-layers // _MAX_LAYERS)
    ends = [layers * (c + 1) // count for c in range(count)]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _grid(M: int, config: WholeConfig, device: torch.device) -> tuple[int, int]:
    """Row blocks, and programs that share them."""
    row_blocks = -(-M // config.block_m)
    if config.per_unit == 0:
        return row_blocks, row_blocks
    return row_blocks, min(row_blocks, config.per_unit * _units(device))


def _launch(
    kernel: str,
    grid: tuple[int, ...],
    rest: tuple[Any, ...],
    device: torch.device,
    config: WholeConfig,
) -> Any:
    """A prepared launch of the named kernel. Triton is imported here, not before."""
    from fastlinear.ops.common.triton_launch import Launch
    from fastlinear.ops.mlp import whole_triton_kernels

    function = getattr(whole_triton_kernels, kernel)
    return Launch(function, grid, rest, device, warps=config.warps, stages=config.stages)


def _units(device: torch.device) -> int:
    """Multiprocessors; the CPU interpreter counts as 3, so that programs walk several blocks."""
    return 3 if device.type == "cpu" else device_facts(device).units


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; the CPU interpreter counts as 9.0."""
    return (9, 0) if device.type == "cpu" else device_facts(device).capability


def _math(dtype: torch.dtype) -> str:
    """How activations are evaluated for results of this dtype."""
    return "exact" if dtype is torch.float32 else "fast"


def _remember(key: Any, plan: Any) -> Any:
    if len(_plans) >= _MAX_PLANS:
        _plans.clear()
    _plans[key] = plan
    return plan


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(1) == 1 else x.contiguous()


def _contiguous(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    for t in tensors:
        if not t.is_contiguous():
            return tuple([t.contiguous() for t in tensors])
    return tensors


def _alignment(tensors: tuple[Tensor | None, ...]) -> Any:
    """Which tensors are None and how those that are not lie against 16 bytes."""
    bits = 0
    missing = False
    for t in tensors:
        if t is None:
            missing = True
        else:
            bits |= t.data_ptr()
    if bits & 15 == 0 and not missing:
        return 0
    return tuple([None if t is None else t.data_ptr() & 15 for t in tensors])


def _stack(
    layers: Sequence[int], M: int, widths: tuple[int, ...], like: Tensor
) -> Sequence[Tensor]:
    """(M, n_{i+1}) for each of the layers; slices of one buffer where the widths are equal."""
    sizes = [widths[i + 1] for i in layers]
    if len(set(sizes)) == 1:
        return _empty((len(sizes), M, sizes[0]), like).unbind(0)
    return [_empty((M, n), like) for n in sizes]


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised result. The CPU interpreter truncates to bfloat16, so it gets float32."""
    narrow = like.device.type == "cpu" and like.dtype is torch.bfloat16
    dtype = torch.float32 if narrow else like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device)


def _rounded(t: Tensor, like: Tensor) -> Tensor:
    """The result in the dtype of ``like`` (a no-op on a GPU)."""
    return t if t.dtype is like.dtype else t.to(like.dtype)
