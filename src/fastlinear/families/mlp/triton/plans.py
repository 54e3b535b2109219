"""Prepared launches of the Triton kernels of a chain, for calls of one kind each.

Triton is imported where the first launch is made, so this file may be imported without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fastlinear.activations.reference import activation as activation_of
from fastlinear.activations.reference import math_of
from fastlinear.core.device import device_facts
from fastlinear.core.precision import matmul_precision
from fastlinear.families.mlp.problem import layer_activations
from fastlinear.families.mlp.reference import Biases, Needs, Weights, first_needed
from fastlinear.families.mlp.triton.config import (
    WholeConfig,
    backward_config,
    forward_config,
    grads_config,
    layout,
    parts_of,
)

__all__ = ["BackwardPlan", "ForwardPlan"]

Tensor = torch.Tensor

_MAX_LAYERS = 16  # unrolled into one kernel; longer chains take several
_FAST_FLOAT64 = ((8, 0), (9, 0), (10, 0))  # capabilities with full-rate float64 products


class ForwardPlan:
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
            tiled = layout(part, chosen.chunk, False)
            rest = (
                *(M, x.stride(0) if first == 0 else part[0], row_blocks, programs),
                *tiled,
                (_scheme(x),) * (end - first),
                *(names[0], layers[end - 1], pre[first], pre[end - 1], math_of(x.dtype)),
                *(chosen.chunk, chosen.block_m),
                *(min(chosen.resident, len(tiled[5])), chosen.ahead),
                x.device.type == "cpu",
            )
            launch = _launch("_mlp_fwd_kernel", (programs,), rest, x.device, chosen)
            # An inner boundary's output is what is saved there, or a temporary
            boundary_kept = end - 1 < last and save and not pre[end - 1]
            self._chunks.append((first, end, boundary_kept, launch))

    def run(self, x: Tensor, weights: Weights, biases: Biases) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As ``whole_triton.forward``."""
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


class BackwardPlan:
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
                tiled = layout(part, chosen.chunk, True)
                rest = (
                    *(M, row_blocks, programs, end - first, max(stop - first, 0)),
                    *tiled[1:],
                    (_scheme(x),) * (end - first),
                    *(names[0], layers[end - 1], math_of(x.dtype)),
                    *(chosen.chunk, chosen.block_m),
                    *(min(chosen.resident, len(tiled[5])), chosen.ahead),
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
        """As ``whole_triton.backward``."""
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
            behind = [-size % 64 for size in (n * k, n)]  # every dW and db starts aligned
            self._sizes += [n * k, behind[0], n, behind[1]]
            offsets.append(offsets[-1] + sum(self._sizes[-4:]))
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
            for a, rows in enumerate(parts_of(n, chunk))
            for b, cols in enumerate(parts_of(k, chunk))
        )
        wanted = max(1, chosen.per_unit * _units(x.device) // len(tiles))
        blocks = -(-M // block_m)
        blocks_each = -(-blocks // min(wanted, max(blocks, 1)))
        self._splits = max(1, -(-blocks // max(blocks_each, 1)))
        rest = (
            *(M, x.stride(0), blocks_each * block_m, self._total, len(tiles), tiles, activation),
            *(math_of(x.dtype), _scheme(x), block_m, x.device.type == "cpu"),
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
            (i, pieces[4 * j].view(self._shapes[j]), pieces[4 * j + 2])
            for j, i in enumerate(layers)
        ]


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
    """A prepared launch of the named kernel."""
    from fastlinear.kernels.triton.launch import Launch

    function = kernel_named(kernel)
    return Launch(function, grid, rest, device, warps=config.warps, stages=config.stages)


def kernel_named(name: str) -> Any:
    """The kernel of that name. Triton is imported here, not before."""
    from fastlinear.families.mlp.triton import backward_kernels, kernels

    forward = hasattr(kernels, name)
    return getattr(kernels if forward else backward_kernels, name)


def _units(device: torch.device) -> int:
    """Multiprocessors; the CPU interpreter counts as 3, so that programs walk several blocks."""
    return 3 if device.type == "cpu" else device_facts(device).units


def _capability(device: torch.device) -> tuple[int, int]:
    """Compute capability; the CPU interpreter counts as 9.0."""
    return (9, 0) if device.type == "cpu" else device_facts(device).capability


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
