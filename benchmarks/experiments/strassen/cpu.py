"""The fused Strassen chain on a CPU: torch's passes over row chunks around oneDNN's products.

The operand planes of a weight are made at every call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.experiments.strassen.scheme import FORMULAS, Scheme, Terms, plane_size
from fastlinear.activations.reference import activation as activation_of

_CHUNK = 1 << 18  # elements of a block that a pass holds at a time: few calls, cached blocks


def run(
    x: Tensor,
    weights: tuple[Tensor, ...],
    biases: tuple[Tensor | None, ...],
    activations: tuple[str, ...],
    save: bool,
    scheme: Scheme,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The chain h ← act(h Wᵀ + b), every product by the scheme.

    x (M, n_0), weights (n_{i+1}, n_i), biases (n_{i+1},) or None, float32, bfloat16 or float16, M
    and widths at least 1 → y (M, n_L) and, if asked, what the backward reads of each layer. Sums
    of blocks are formed in float32 and rounded to the dtype of x when stored.
    """
    m, last = x.shape[0], len(weights) - 1
    rows = plane_size(m, scheme.levels, columns=False)
    planes = _prefix_of(x, rows, plane_size(x.shape[1], scheme.levels, columns=True), scheme)
    saved: list[Tensor] = []
    for i, (weight, bias, name) in enumerate(zip(weights, biases, activations, strict=True)):
        n = weight.shape[0]
        products = _products(planes, weight_planes(weight.detach(), scheme))
        keeps_pre = activation_of(name).saved == "pre"
        pre = x.new_empty(m, n) if save and keeps_pre else None
        y = x.new_empty(m, n) if i == last or (save and not keeps_pre) else None
        if i < last:
            planes = x.new_empty(scheme.products, rows, products[0].shape[1])
        _pass(products, bias, name, (m, n), pre, y, planes if i < last else None, scheme)
        if save:
            kept = pre if keeps_pre else y
            assert kept is not None
            saved.append(kept)
    assert y is not None
    return y, tuple(saved)


def _pass(
    products: Sequence[Tensor],
    bias: Tensor | None,
    activation: str,
    shape: tuple[int, int],
    pre: Tensor | None,
    y: Tensor | None,
    planes: Tensor | None,
    scheme: Scheme,
) -> None:
    """Suffix, bias and activation of one layer into pre, y and the next layer's operand planes."""
    rows, cols = products[0].shape
    parts = 1 << scheme.levels
    act = activation_of(activation).value
    shifts = None if bias is None else _padded(bias.float(), parts * cols).view(parts, cols)
    step = max(1, _CHUNK // cols)
    for top in range(0, rows, step):
        end = min(top + step, rows)
        blocks = _suffix([p[top:end].float() for p in products], scheme)
        for b, (i, j) in enumerate(_places(scheme.levels)):
            block = blocks[b] if shifts is None else blocks[b].add_(shifts[j])
            _put(pre, block, i * rows + top, j * cols)
            block = act(block)
            _put(y, block, i * rows + top, j * cols)
            # what padded rows and columns hold would only cancel up to rounding
            block[max(0, shape[0] - i * rows - top) :] = 0
            block[:, max(0, shape[1] - j * cols) :] = 0
            blocks[b] = block
        if planes is not None:
            blocks = [b.to(planes.dtype).float() for b in blocks]
            _prefix(blocks, [p[top:end] for p in planes], scheme, FORMULAS[scheme.name].left)


def _prefix_of(x: Tensor, rows: int, cols: int, scheme: Scheme) -> Tensor:
    """Operand planes (products, rows, cols) of a left matrix."""
    planes = x.new_empty(scheme.products, rows, cols)
    step = max(1, _CHUNK // cols)
    for top in range(0, rows, step):
        end = min(top + step, rows)
        blocks = [
            _get(x, i * rows + top, end - top, j * cols, cols) for i, j in _places(scheme.levels)
        ]
        _prefix(blocks, [p[top:end] for p in planes], scheme, FORMULAS[scheme.name].left)
    return planes


def _prefix(
    blocks: Sequence[Tensor],
    out: Sequence[Tensor],
    scheme: Scheme,
    formulas: tuple[Terms, ...],
) -> None:
    """Operands of all products from 4 or 16 blocks (groups of 4), into ``out``."""
    if len(blocks) == 4:
        for terms, target in zip(formulas, out, strict=True):
            if len(terms) == 2 and target.dtype is torch.float32:
                (a, _), (b, sign) = terms
                torch.add(blocks[a], blocks[b], alpha=sign, out=target)
            else:
                target.copy_(_sum(blocks, terms))
        return
    size = len(formulas)
    for p, terms in enumerate(formulas):
        inner = [_sum(blocks[j::4], terms) for j in range(4)]
        _prefix(inner, out[p * size : (p + 1) * size], scheme, formulas)


def _suffix(products: list[Tensor], scheme: Scheme) -> list[Tensor]:
    """4 or 16 blocks (groups of 4) from all products; new tensors."""
    formulas = FORMULAS[scheme.name]
    size = len(formulas.left)
    if len(products) == size:
        return [_sum(products, terms) for terms in formulas.out]
    groups = [_suffix(products[p * size : (p + 1) * size], scheme) for p in range(size)]
    return [_sum([g[j] for g in groups], terms) for terms in formulas.out for j in range(4)]


def _sum(tensors: Sequence[Tensor], terms: Terms) -> Tensor:
    """The signed sum; a term alone (always positive) is the tensor itself."""
    (first, _), *rest = terms
    total = tensors[first]
    for position, (which, sign) in enumerate(rest):
        if position == 0:
            total = torch.add(total, tensors[which], alpha=sign)
        else:
            total.add_(tensors[which], alpha=sign)
    return total


def _places(levels: int) -> list[tuple[int, int]]:
    """(row, column) of each block in the order of ``_prefix``: groups of 4, 11, 12, 21, 22."""
    four = [(0, 0), (0, 1), (1, 0), (1, 1)]
    if levels == 1:
        return four
    return [(2 * i + row, 2 * j + col) for i, j in four for row, col in four]


def _get(matrix: Tensor, top: int, rows: int, left: int, cols: int) -> Tensor:
    """A block in float32, zero where it lies outside the matrix."""
    block = matrix[top : top + rows, left : left + cols].float()
    if block.shape == (rows, cols):
        return block
    return F.pad(block, (0, cols - block.shape[1], 0, rows - block.shape[0]))


def _put(matrix: Tensor | None, block: Tensor, top: int, left: int) -> None:
    """Write what lies inside the matrix, if there is one."""
    if matrix is not None:
        inside = matrix[top : top + block.shape[0], left : left + block.shape[1]]
        inside.copy_(block[: inside.shape[0], : inside.shape[1]])


def _padded(vector: Tensor, size: int) -> Tensor:
    return F.pad(vector, (0, size - vector.shape[0]))


def _products(planes: Tensor, operands: Tensor) -> list[Tensor]:
    """planes (P, M', K') times operands (P, N', K') transposed: P products (M', N')."""
    if _onednn_serves(planes.dtype):
        linear: Any = torch.ops.mkldnn._linear_pointwise
        pairs = zip(planes, operands, strict=True)
        return [linear(plane, operand, None, "none", [], "") for plane, operand in pairs]
    return list(torch.bmm(planes, operands.transpose(1, 2)))


def _onednn_serves(dtype: torch.dtype) -> bool:
    """Whether oneDNN, on most processors the faster of torch's two libraries, has this product."""
    mkldnn: Any = torch.ops.mkldnn
    if not torch.backends.mkldnn.is_available() or not hasattr(mkldnn, "_linear_pointwise"):
        return False
    if dtype is torch.bfloat16:
        return bool(mkldnn._is_mkldnn_bf16_supported())
    if dtype is torch.float16:
        return bool(mkldnn._is_mkldnn_fp16_supported())
    return True


def weight_planes(weight: Tensor, scheme: Scheme) -> Tensor:
    """Operand planes (products, N', K') of a weight (N, K)."""
    n, k = weight.shape
    rows = plane_size(n, scheme.levels, columns=True)
    cols = plane_size(k, scheme.levels, columns=True)
    planes = weight.new_empty(scheme.products, rows, cols)
    blocks = [_get(weight, i * rows, rows, j * cols, cols) for i, j in _places(scheme.levels)]
    _prefix(blocks, list(planes), scheme, FORMULAS[scheme.name].right)
    return planes
