"""Backend ``planes`` of linear_act: float32 by three products of float16 on Hopper.

One launch splits both operands into two planes of float16 each, another multiplies. A sum over K
that several blocks share is added up by a third.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear.cuda.planes import (
    BIAS_KERNEL,
    KERNEL,
    SPLIT_KERNEL,
    SPLIT_THREADS,
    SUMS_KERNEL,
    THREADS,
    Config,
    config_for,
    pitch,
    slice_tiles,
    source,
    split_source,
)
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import BK
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Plans, Prepared
from fastlinear.native import cuda_driver as driver

_REMEDY = "Leave the configuration to the model."
_SIDE_BYTES = 7 * 8
_MATRIX_BYTES = 3 * 8 + 2 * _SIDE_BYTES + 2 * 8 + 6 * 4
_MOST_MATRICES = 3
_SPLIT_BYTES = _MOST_MATRICES * _MATRIX_BYTES + 8
_MAPS = 8 * MAP_BYTES
_PRODUCT_BYTES = _MAPS + 11 * 8 + 6 * 8 + 9 * 4
_SUMS_THREADS, _BIAS_COLUMNS = 256, 32
_AT_ONCE = 1 << 27  # numbers of a first operand; larger ones are split in parts
_LINES = 128  # of a part a multiple


class Planes(NamedTuple):
    """A matrix (rows, columns) of float32 as matrices of float16, one way.

    Attributes:
        high, low: of numbers that are not small beside others of their segment.
        small_high, small_low: of those that are; not written where there are none.
        scales: (segments of 64 along K, rows or columns and more); -1 where there are no planes.
        small: (segments, lines / 64), whether there are small numbers.
        numbers: the matrix, or dy of the gradient that it is.
        saved: what the activation of that saved; None of a matrix.
        by_columns: whether K is the dimension of rows.
        activation: of the gradient.
    """

    high: Tensor
    low: Tensor
    small_high: Tensor
    small_low: Tensor
    scales: Tensor
    small: Tensor
    numbers: Tensor
    saved: Tensor | None
    by_columns: bool
    activation: str = "none"

    @property
    def made(self) -> tuple[Tensor, ...]:
        """What is split into."""
        planes = self.high, self.low, self.small_high, self.small_low
        return *planes, self.scales, self.small

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """All of it."""
        return *self.made, self.numbers, self.saved


_TENSORS, _OF_SIDE = 8, 6  # of Planes; of these, made


class Source(NamedTuple):
    """What is to be split.

    Attributes:
        numbers: (rows, columns) of float32.
        by_rows, by_columns: which ways; by columns a scale belongs to 64 numbers of a column.
        saved: of a gradient dy act'(saved), with dy the numbers; (rows, columns).
        activation: its activation.
        summed: whether its sums over rows are wanted.
    """

    numbers: Tensor
    by_rows: bool = False
    by_columns: bool = False
    saved: Tensor | None = None
    activation: str = "none"
    summed: bool = False

    def part(self, of: tuple[slice, slice]) -> Source:
        """Some of its rows and columns."""
        saved = None if self.saved is None else self.saved[of]
        return self._replace(numbers=self.numbers[of], saved=saved)


_split_plans: Plans[_SplitPlan] = Plans()
_product_plans: Plans[_ProductPlan] = Plans()


def _side_by_side(source: Source) -> tuple[Source, bool]:
    """A matrix whose rows are side by side in memory: itself, turned, or a copy; whether turned."""
    t = source.numbers
    if source.saved is None and not source.summed and t.stride(0) == 1 < t.stride(1) and len(t) > 1:
        return Source(t.t(), source.by_columns, source.by_rows), True
    saved = source.saved
    dense = source._replace(numbers=_dense(t), saved=None if saved is None else _dense(saved))
    return dense, False


def _dense(t: Tensor) -> Tensor:
    return t if t.stride(1) == 1 or t.shape[1] == 1 else t.contiguous()


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def split(
    sources: Sequence[Source], bias: Tensor | None = None
) -> tuple[list[Planes], Tensor | None]:
    """Planes of up to three matrices in one launch, by rows before by columns; a bias' gradient.

    Args:
        sources: what to split; turned where columns are side by side in memory. The first one may
            be a gradient.
        bias: memory for its sums.
    """
    found = [_side_by_side(source) for source in sources]
    laid = [one for one, _ in found]
    first = laid[0]
    made: list[Planes] = []
    given: list[Tensor | None] = []
    for one, turned in found:
        ways = (False,) * one.by_rows + (True,) * one.by_columns
        sides = [_side(one, by_columns) for by_columns in ways]
        made += reversed(sides) if turned else sides
        padding = (None,) * _OF_SIDE
        by_rows = sides[0].made if one.by_rows else padding
        by_columns = sides[-1].made if one.by_columns else padding
        given += [one.numbers, one.saved, *by_rows, *by_columns]
    sums = None
    if first.summed:
        rows, columns = first.numbers.shape
        sums = first.numbers.new_empty(_up(rows, BK) // BK, columns)
        bias = first.numbers.new_empty(columns) if bias is None else bias
    device = first.numbers.device.index

    def plan() -> _SplitPlan:
        with compiled.current(device):
            return _SplitPlan(laid, device)

    _split_plans.of((device, *map(_facts, laid)), plan).run(*given, sums, bias)
    return made, bias


def _facts(source: Source) -> tuple[object, ...]:
    numbers, *ways, saved, activation, summed = source
    kept = None if saved is None else (saved.stride(0), saved.data_ptr() % 16)
    lie = numbers.shape, numbers.stride(0), numbers.data_ptr() % 16
    return (*lie, *ways, kept, activation, summed)


def _side(source: Source, by_columns: bool) -> Planes:
    t = source.numbers
    rows, columns = t.shape
    planes = t.new_empty(4, rows, pitch(columns), dtype=torch.float16)[:, :, :columns]
    k, lines = (rows, columns) if by_columns else (columns, rows)
    segments, blocks = _up(k, BK) // BK, _up(lines, BK) // BK
    scales = t.new_empty(segments, blocks * BK)
    small = t.new_empty(segments, blocks, dtype=torch.int32)
    high, low, small_high, small_low = planes
    of = (t, source.saved, by_columns, source.activation)
    return Planes(high, low, small_high, small_low, scales, small, *of)


class _SplitPlan:
    """Launches of ``planes_split.cu``. Tensors: of each matrix numbers, saved and what is made by
    rows and by columns; sums, the bias' gradient."""

    def __init__(self, sources: Sequence[Source], device: int) -> None:
        text = split_source(sources[0].activation)
        block, first = Block(_SPLIT_BYTES), 0
        each, last = 2 + 2 * _OF_SIDE, len(sources) * (2 + 2 * _OF_SIDE)
        for i, one in enumerate(sources):
            t, saved = one.numbers, one.saved
            rows, columns = t.shape
            wide = all(
                u is None or (u.data_ptr() % 16 == 0 and (u.stride(0) % 4 == 0 or rows == 1))
                for u in (t, saved)
            )
            across = _up(columns, BK) // BK
            at, tensor = _MATRIX_BYTES * i, each * i
            for j in range(2):
                block.address(at + 8 * j, tensor + j, 15)
            if one.summed:
                block.address(at + 16, last)
            for way, (wanted, lines) in enumerate(((one.by_rows, rows), (one.by_columns, columns))):
                side, of_side = at + 24 + _SIDE_BYTES * way, tensor + 2 + _OF_SIDE * way
                for j in range(_OF_SIDE if wanted else 0):
                    block.address(side + 8 * j, of_side + j, 15)
                block.numbers(side + 8 * _OF_SIDE, "q", _up(lines, BK))
            strides = t.stride(0), 0 if saved is None else saved.stride(0)
            table = rows, columns, pitch(columns), int(wide), first, across
            block.numbers(at + 24 + 2 * _SIDE_BYTES, "2q6i", *strides, *table)
            first += _up(rows, BK) // BK * across
        block.numbers(_MOST_MATRICES * _MATRIX_BYTES, "i", len(sources))
        self._runs = [_prepared(text, SPLIT_KERNEL, block, SPLIT_THREADS, first, device)]
        if sources[0].summed:
            rows, columns = sources[0].numbers.shape
            block = Block(24)
            block.address(0, last)
            block.address(8, last + 1)
            block.numbers(16, "2i", _up(rows, BK) // BK, columns)
            blocks = -(-columns // _BIAS_COLUMNS)
            self._runs.append(_prepared(text, BIAS_KERNEL, block, SPLIT_THREADS, blocks, device))

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)


def _prepared(
    text: str, name: str, block: Block, threads: int, blocks: int, device: int
) -> Prepared:
    launch = driver.Launch(compiled.kernel(text, name, 0, device), threads, 1, [block.argument])  # type: ignore[list-item]
    launch.set_grid(blocks)
    launch.begin_early()
    return Prepared(launch, device, block.places, block.masks)


class _ProductPlan:
    """Launches of ``planes.cu``. Tensors: those of a and of b; bias, y, pre, parts."""

    def __init__(
        self,
        a: Planes,
        b: Planes,
        biased: bool,
        activation: str,
        save_pre: bool,
        config: Config,
        device: int,
    ) -> None:
        self._sizes = *_sides(a), _sides(b)[0]
        m, _, n = self._sizes
        derived = a.saved is not None
        if derived:
            activation = a.activation
        ways = a.by_columns, b.by_columns
        text = source(config, activation, biased, save_pre, *ways, derived)
        block = self._block(a, b, config, device)
        kernel = compiled.kernel(text, KERNEL, config.shared_bytes, device)
        launch = driver.Launch(kernel, THREADS, config.cluster, [block.argument])  # type: ignore[list-item]
        tiles = -(-m // (128 * config.cluster)) * -(-n // config.bn)
        blocks = min(tiles * config.slices, launch.max_clusters())
        launch.set_grid(blocks * config.cluster)
        launch.begin_early()
        self._runs = [Prepared(launch, device, block.places, block.masks)]
        if config.slices > 1:
            block = self._block(a, b, config, device)  # each launch has memory of its own
            blocks = -(-m * n // _SUMS_THREADS)
            self._runs.append(_prepared(text, SUMS_KERNEL, block, _SUMS_THREADS, blocks, device))

    def _block(self, a: Planes, b: Planes, config: Config, device: int) -> Block:
        m, k, n = self._sizes
        block = Block(-(-_PRODUCT_BYTES // 64) * 64)
        for i, (planes, box) in enumerate(((a, 128), (b, config.bn))):
            rows = BK if planes.by_columns else box
            first = _TENSORS * i
            for j, plane in enumerate(planes[:4]):
                parts = config.cluster if i else 1
                of = driver.TensorMap(
                    *("float16", plane.shape[0], plane.shape[1], plane.stride(0)),
                    *(rows // parts, 64, plane.data_ptr(), device),
                )
                block.map(MAP_BYTES * (4 * i + j), of, first + j)
            for j in range(3):  # scales, small, numbers
                block.address(_MAPS + 16 * j + 8 * i, first + 4 + j, 15 if j == 0 else 1)
            block.numbers(_MAPS + 88 + 16 * i, "2q", *_along(planes.numbers, planes.by_columns))
        if a.saved is not None:
            block.address(_MAPS + 48, 7)
            block.numbers(_MAPS + 120, "2q", *_along(a.saved, a.by_columns))
        for i in range(4):  # bias, y, pre, parts
            block.address(_MAPS + 56 + 8 * i, 2 * _TENSORS + i)
        tiles_m, tiles_n = -(-m // (128 * config.cluster)), -(-n // config.bn)
        slices, each = config.slices, slice_tiles(k, config.slices)
        lines = [planes.scales.shape[1] for planes in (a, b)]
        block.numbers(_MAPS + 136, "9i", m, n, k, slices, each, tiles_m, tiles_n, *lines)
        return block

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)


def _sides(planes: Planes) -> tuple[int, int]:
    """Sizes along M (N) and along K."""
    rows, columns = planes.numbers.shape
    return (columns, rows) if planes.by_columns else (rows, columns)


def _along(t: Tensor, by_columns: bool) -> tuple[int, int]:
    """Strides along M (N) and along K."""
    rows, columns = t.stride()
    return (columns, rows) if by_columns else (rows, columns)


@cache
def _units(device: int) -> int:
    return device_facts(torch.device("cuda", device)).units


def product(
    a: Planes,
    b: Planes,
    bias: Tensor | None = None,
    activation: str = "none",
    save_pre: bool = False,
    *,
    into: tuple[Tensor, Tensor | None] | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(act(A Bᵀ + bias), A Bᵀ + bias or None), both (M, N).

    Args:
        a: of A (M, K), or by columns of (K, M).
        b: of B (N, K), or by columns of (K, N).
        bias: (N,) float32, or None.
        activation: its name.
        save_pre: whether to return the second.
        into: memory for both, dense.
        config: how the product is shared out; None lets a model choose.

    Raises:
        UnsupportedError: for a configuration that cannot serve.
    """
    (m, k), (n, depth) = _sides(a), _sides(b)
    assert k == depth, "both are of one K"
    device = a.high.device.index
    config = config or config_for(m, n, k, _units(device))
    if (why := config.invalid(k)) is not None:
        raise UnsupportedError("linear_act (planes backend)", "a configuration", why, _REMEDY)
    if bias is not None and bias.stride(0) != 1:
        bias = bias.contiguous()
    y, pre = into or _empty(a.numbers, m, n, save_pre)
    parts = a.numbers.new_empty(config.slices, m, n) if config.slices > 1 else None
    facts = [(p.numbers.shape, p.numbers.stride(), p.by_columns) for p in (a, b)]
    saved = None if a.saved is None else (a.saved.stride(), a.activation)
    key = (*facts, saved, bias is None, activation, save_pre, config, device)

    def plan() -> _ProductPlan:
        with compiled.current(device):
            return _ProductPlan(a, b, bias is not None, activation, save_pre, config, device)

    _product_plans.of(key, plan).run(*a.tensors, *b.tensors, bias, y, pre, parts)
    return y, pre


def _empty(like: Tensor, m: int, n: int, save_pre: bool) -> tuple[Tensor, Tensor | None]:
    return like.new_empty(m, n), like.new_empty(m, n) if save_pre else None


def _parts(lines: int, numbers: int) -> list[slice]:
    """Lines whose planes are made one after the other."""
    each = max(1, _AT_ONCE * lines // (numbers * _LINES)) * _LINES if numbers > _AT_ONCE else lines
    return [slice(i, min(i + each, lines)) for i in range(0, lines, each)]


_ALL = slice(None)


def _of_rows(
    a: Source, b: Source, bias: Tensor | None = None, activation: str = "none", save: bool = False
) -> tuple[Tensor, Tensor | None]:
    """``product`` of A by rows, in parts where it is large."""
    parts = _parts(len(a.numbers), a.numbers.numel())
    if len(parts) == 1:
        (first, second), _ = split((a, b))
        return product(first, second, bias, activation, save)
    (second,), _ = split((b,))
    y, pre = _empty(a.numbers, len(a.numbers), _sides(second)[0], save)
    for rows in parts:
        (first,), _ = split((a.part((rows, _ALL)),))
        into = y[rows], None if pre is None else pre[rows]
        product(first, second, bias, activation, save, into=into)
    return y, pre


def _of_columns(a: Source, b: Source) -> tuple[Tensor | None, Tensor | None]:
    """``product`` of A by columns, in parts where it is large, and its sums over rows."""
    columns = a.numbers.shape[1]
    parts = _parts(columns, a.numbers.numel())
    others = (b,) if a.by_columns else ()
    if len(parts) == 1:
        made, sums = split((a, *others))
        return product(made[0], made[1])[0] if made else None, sums
    sums = a.numbers.new_empty(columns) if a.summed else None
    dw = a.numbers.new_empty(columns, b.numbers.shape[1]) if others else None
    seconds = split(others)[0] if others else []
    for part in parts:
        firsts, _ = split((a.part((_ALL, part)),), None if sums is None else sums[part])
        for first, second in zip(firsts, seconds, strict=True):
            product(first, second, into=(dw[part], None))  # type: ignore[index]
    return dw, sums


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str, save_pre: bool
) -> tuple[Tensor, Tensor | None]:
    """y = act(x weightᵀ + bias), and the pre-activation if asked.

    Args:
        x: (M, K) float32, M > 0.
        weight: (N, K).
        bias: (N,) or None.
        activation: a public activation name.
        save_pre: also return x weightᵀ + bias.
    """
    save = save_pre and activation != "none"
    given = Source(x, by_rows=True), Source(weight, by_rows=True)
    y, pre = _of_rows(*given, bias, activation, save)
    return y, y if save_pre and activation == "none" else pre


def grad_input(dpre: Tensor, weight: Tensor) -> Tensor:
    """dx (M, K) = dpre (M, N) weight (N, K)."""
    return _of_rows(Source(dpre, by_rows=True), Source(weight, by_columns=True))[0]


def grad_weight(dpre: Tensor, x: Tensor) -> Tensor:
    """dW (N, K) = dpreᵀ (N, M) x (M, K)."""
    dw, _ = _of_columns(Source(dpre, by_columns=True), Source(x, by_columns=True))
    assert dw is not None
    return dw


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx (M, K), dW (N, K), db (N,)), each None where not wanted; dpre is never written.

    Args:
        dy: (M, N) float32, M > 0.
        saved: (M, N), what the activation saved; None for ``"none"``.
        x: (M, K); may be None where dW is not wanted.
        weight: (N, K); may be None where dx is not wanted.
        activation: a public activation name.
        needs: which of the three are wanted.
    """
    for_dx, for_dw, for_db = needs
    if activation == "none":
        saved = None
    gradient = Source(dy, saved=saved, activation="none" if saved is None else activation)
    by_rows = gradient._replace(by_rows=True), Source(weight, by_columns=True)
    by_columns = gradient._replace(by_columns=for_dw, summed=for_db), Source(x, by_columns=True)
    if not for_dx or dy.numel() > _AT_ONCE:
        dx = _of_rows(*by_rows)[0] if for_dx else None
        return dx, *(_of_columns(*by_columns) if for_dw or for_db else (None, None))
    if not for_dw:
        (first, second), db = split((by_rows[0]._replace(summed=for_db), by_rows[1]))
        return product(first, second)[0], None, db
    both = by_columns[0]._replace(by_rows=True)
    (rows, columns, w, turned), db = split((both, by_rows[1], by_columns[1]))
    return product(rows, w)[0], product(columns, turned)[0], db
