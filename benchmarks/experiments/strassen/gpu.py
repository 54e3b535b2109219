"""The fused Strassen chain on a GPU: Triton pointwise kernels around torch's batched products.

Importing this file imports Triton, so it is imported lazily.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks.experiments.strassen.gpu_kernels import (
    _strassen_chain_kernel,
    _strassen_prefix_kernel,
    _strassen_suffix_kernel,
    _strassen_weight_kernel,
)
from benchmarks.experiments.strassen.scheme import Scheme, plane_size
from fastlinear.activations.reference import activation as activation_of
from fastlinear.kernels.triton.launch import Launch

_TILE = {1: 512, 2: 256}  # elements of a program's tile, by levels; 128 threads
_WEIGHT_TILE = (16, 32)
_WARPS = 4
_MAX_LAUNCHES = 4096

_launches: dict[Any, Launch] = {}


def run(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activations: tuple[str, ...],
    save: bool,
    scheme: Scheme,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The chain h ← act(h Wᵀ + b), every product by the scheme; L + 1 pointwise kernels.

    Args:
        x: (M, n_0) of any strides; float32, bfloat16 or float16; M and every width at least 1.
        weights: L tensors (n_{i+1}, n_i) of any strides.
        biases: L tensors (n_{i+1},) or None.
        activations: the activation of each layer.
        save: also return what the backward reads of each layer.
        scheme: which bilinear scheme, how many levels.

    Returns:
        y (M, n_L) contiguous, and () or L tensors (M, n_{i+1}): the pre-activation where the
        activation's derivative reads it, else the output.

    Products accumulate in float32 (cuBLAS); sums of planes are formed in float32 and rounded to
    the dtype of x when stored. Deterministic.
    """
    m, last = x.shape[0], len(weights) - 1
    planes = _prefix(x, scheme)
    saved: list[Tensor] = []
    for i, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
        n = weight.shape[0]
        right = weight_planes(weight, scheme)
        product = _empty((scheme.products, planes.shape[1], right.shape[2]), x)
        torch.bmm(planes, right, out=product)
        if bias is not None and bias.stride(0) != 1:
            bias = bias.contiguous()
        keeps = activation_of(activations[i]).saved
        kept = _empty((m, n), x) if save and (keeps == "pre" or i < last) else None
        how = "no" if kept is None else "pre" if keeps == "pre" else "output"
        if i < last:
            _launch_chain(product, bias, kept, (m, n), activations[i], how, scheme)
            planes = product
        else:
            y = _empty((m, n), x)
            _launch_suffix(product, bias, kept, y, activations[i], how, scheme)
            if save and kept is None:
                kept = y
        if kept is not None:
            saved.append(kept)
    return y.to(x.dtype), tuple(t.to(x.dtype) for t in saved)


@dataclass(frozen=True, slots=True)
class _Tiling:
    """How programs tile a plane: block, whether tiles fit it, and the planes the matrix."""

    rows: int
    cols: int
    block_r: int
    block_c: int
    whole: bool
    even: bool

    @staticmethod
    def of(shape: Sequence[int], scheme: Scheme) -> _Tiling:
        """Tiles of the planes of a matrix (R, C): rows where they are long."""
        R, C = shape
        cols = plane_size(C, scheme.levels, columns=True)
        tile = _TILE[scheme.levels]
        block_c = min(tile, cols & -cols)  # cols is a multiple of 16
        if block_c < 64:
            block_c = min(tile, 1 << (cols - 1).bit_length())
        rows = plane_size(R, scheme.levels, columns=False)
        return _Tiling._fit(R, C, rows, cols, tile // block_c, block_c, scheme)

    @staticmethod
    def of_weight(shape: Sequence[int], scheme: Scheme) -> _Tiling:
        """Tiles of the planes of a weight (N, K), read along K and written along N."""
        N, K = shape
        rows = plane_size(N, scheme.levels, columns=True)
        cols = plane_size(K, scheme.levels, columns=True)
        return _Tiling._fit(N, K, rows, cols, *_WEIGHT_TILE, scheme)

    @staticmethod
    def _fit(
        R: int, C: int, rows: int, cols: int, block_r: int, block_c: int, scheme: Scheme
    ) -> _Tiling:
        whole = rows % block_r == 0 and cols % block_c == 0
        covered = (rows << scheme.levels, cols << scheme.levels)
        return _Tiling(rows, cols, block_r, block_c, whole, whole and covered == (R, C))

    @property
    def programs(self) -> int:
        return -(-self.rows // self.block_r) * -(-self.cols // self.block_c)


def _prefix(x: Tensor, scheme: Scheme) -> Tensor:
    t = _Tiling.of(x.shape, scheme)
    planes = _empty((scheme.products, t.rows, t.cols), x)
    key = ("prefix", x.shape, x.stride(), x.dtype, x.device, x.data_ptr() & 15, scheme)
    launch = _launches.get(key)
    if launch is None:
        launch = _remember(
            key,
            _strassen_prefix_kernel,
            t,
            (*x.shape, *x.stride(), t.rows, t.cols, t.rows * t.cols),
            _scheme_args(scheme, t),
            x.device,
        )
    launch(x, planes)
    return planes


def _launch_chain(
    planes: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    shape: tuple[int, int],
    activation: str,
    how: str,
    scheme: Scheme,
) -> None:
    where = None if bias is None else bias.data_ptr() & 15
    key = ("chain", shape, planes.dtype, planes.device, where, activation, how, scheme)
    launch = _launches.get(key)
    if launch is None:
        t = _Tiling.of(shape, scheme)
        launch = _remember(
            key,
            _strassen_chain_kernel,
            t,
            (*shape, t.rows, t.cols, t.rows * t.cols),
            (activation, _math(planes.dtype), how, *_scheme_args(scheme, t)),
            planes.device,
        )
    launch(planes, bias, kept)


def _launch_suffix(
    planes: Tensor,
    bias: Tensor | None,
    kept: Tensor | None,
    y: Tensor,
    activation: str,
    how: str,
    scheme: Scheme,
) -> None:
    where = None if bias is None else bias.data_ptr() & 15
    key = ("suffix", y.shape, y.dtype, y.device, where, activation, how, scheme)
    launch = _launches.get(key)
    if launch is None:
        t = _Tiling.of(y.shape, scheme)
        launch = _remember(
            key,
            _strassen_suffix_kernel,
            t,
            (*y.shape, t.rows, t.cols, t.rows * t.cols),
            (activation, _math(y.dtype), how, *_scheme_args(scheme, t)),
            y.device,
        )
    launch(planes, bias, kept, y)


def _scheme_args(scheme: Scheme, t: _Tiling) -> tuple[Any, ...]:
    return scheme.name, scheme.levels, t.block_r, t.block_c, t.whole, t.even


def _remember(
    key: Any,
    kernel: Any,
    t: _Tiling,
    numbers: tuple[int, ...],
    choices: tuple[Any, ...],
    device: torch.device,
) -> Launch:
    launch = Launch(kernel, (t.programs,), (*numbers, *choices), device, warps=_WARPS)
    if len(_launches) >= _MAX_LAUNCHES:
        _launches.clear()
    _launches[key] = launch
    return launch


# (id of the base tensor, place, scheme, stream) → (weak reference, planes, hashes). Every stream
# has its own: planes are never refreshed on one while another reads them.
_kept: dict[tuple[Any, ...], tuple[weakref.ref[Tensor], Tensor, Tensor]] = {}


def forget_weights() -> None:
    """Free the operand planes of every weight; the next call makes them again."""
    _kept.clear()


def weight_planes(weight: Tensor, scheme: Scheme) -> Tensor:
    """Operand planes (products, K', N') of a weight (N, K), always those of its values now.

    They are kept while the weight lives. At every call a kernel hashes the whole weight, tile by
    tile, to 64 bits, and rewrites the tiles whose hash differs: any change is seen, however it
    was made. Under CUDA graph capture they are made anew, at each replay, in the graph's memory.
    """
    if weight.is_cuda and torch.cuda.is_current_stream_capturing():
        planes = _new_planes(weight, scheme)
        _refresh(weight, planes, None, scheme)
        return planes
    base = weight._base if weight._base is not None else weight
    stream = torch.cuda.current_stream(weight.device).cuda_stream if weight.is_cuda else 0
    place = (weight.shape, weight.stride(), weight.storage_offset(), weight.dtype, weight.device)
    key = (id(base), *place, scheme, stream)
    held = _kept.get(key)
    if held is None or held[0]() is not base:
        tiles = _Tiling.of_weight(weight.shape, scheme).programs
        prints = torch.zeros(tiles, dtype=torch.int64, device=weight.device)
        reference = weakref.ref(base, lambda _: _kept.pop(key, None))
        held = _kept[key] = (reference, _new_planes(weight, scheme), prints)
    _refresh(weight, held[1], held[2], scheme)
    return held[1]


def _new_planes(weight: Tensor, scheme: Scheme) -> Tensor:
    t = _Tiling.of_weight(weight.shape, scheme)
    return _empty((scheme.products, t.cols, t.rows), weight)


def _refresh(weight: Tensor, planes: Tensor, prints: Tensor | None, scheme: Scheme) -> None:
    place = (weight.shape, weight.stride(), weight.dtype, weight.device, weight.data_ptr() & 15)
    key = ("weight", *place, scheme, prints is None)
    launch = _launches.get(key)
    if launch is None:
        t = _Tiling.of_weight(weight.shape, scheme)
        launch = _remember(
            key,
            _strassen_weight_kernel,
            t,
            (*weight.shape, *weight.stride(), t.rows, t.cols, t.rows * t.cols),
            _scheme_args(scheme, t),
            weight.device,
        )
    launch(weight, planes, prints)


def _math(dtype: torch.dtype) -> str:
    """How activations are evaluated for results of this dtype."""
    return "exact" if dtype is torch.float32 else "fast"


def _empty(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Uninitialised result. The CPU interpreter truncates to bfloat16, so it gets float32."""
    narrow = like.device.type == "cpu" and like.dtype is torch.bfloat16
    dtype = torch.float32 if narrow else like.dtype
    return torch.empty(shape, dtype=dtype, device=like.device)
