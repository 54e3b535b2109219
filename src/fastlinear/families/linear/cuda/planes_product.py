"""Products of matrices that are split into planes, by ``planes.cu``."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.families.linear.cuda.planes import (
    KERNEL,
    SUMS_KERNEL,
    Config,
    Derivation,
    Raggedness,
    config_for,
    ragged_config,
    slice_tiles,
    source,
    split_late,
)
from fastlinear.families.linear.cuda.planes_split import (
    MADE,
    READ,
    SHARED,
    TENSORS,
    Planes,
    Source,
)
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.hopper import BK
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Plans, Prepared, prepared
from fastlinear.kernels.cuda.ragged import RAGGED_BYTES, Ragged
from fastlinear.native import cuda_driver as driver

_REMEDY = "Leave the configuration to the model."
_MAPS = (8 + 2 * SHARED) * MAP_BYTES
_STRIDES = _MAPS + 14 * 8
_PRODUCT_BYTES = _STRIDES + (6 * READ + 1) * 8 + RAGGED_BYTES + 15 * 4
_SUMS_THREADS = 256

plans: Plans[_ProductPlan] = Plans()
Operand = Planes | Source
Strides = tuple[int, int]
"""Of results: from group to group, and from row to row."""


class _ProductPlan:
    """Launches of ``planes.cu``. Tensors: those of a and of b; bias, y, pre, parts, the groups'
    table."""

    def __init__(
        self, a: Operand, b: Planes, y: Strides, text: str, config: Config, device: int
    ) -> None:
        self._sizes, self._ragged = (*sides(a), sides(b)[0]), raggedness(a, b)
        m, _, n = self._sizes
        groups, self._y = b.source.groups, y
        block = self._block(a, b, config, device)
        kernel = compiled.kernel(text, KERNEL, config.shared_bytes, device)
        launch = driver.Launch(kernel, config.threads, 1, [block.argument])  # type: ignore[list-item]
        ragged, way = self._ragged
        tiles_m = -(-m // 128) * groups
        if ragged is not None and way is Raggedness.ROWS:
            tiles_m = ragged.most_tiles
        tiles = tiles_m * -(-n // config.bn) * config.slices
        launch.set_grid(min(tiles, launch.max_clusters()))
        launch.begin_early()
        self._runs = [Prepared(launch, device, block.places, block.masks)]
        if config.slices > 1:
            block = self._block(a, b, config, device)  # each launch has memory of its own
            blocks = -(-groups * m * n // _SUMS_THREADS)
            self._runs.append(prepared(text, SUMS_KERNEL, block, _SUMS_THREADS, blocks, device))

    def _block(self, a: Operand, b: Planes, config: Config, device: int) -> Block:
        m, k, n = self._sizes
        block = Block(-(-_PRODUCT_BYTES // 64) * 64)
        for i, (operand, box) in enumerate(((a, 128), (b, config.bn))):
            rows = BK if operand.by_columns else box
            first = TENSORS * i

            def described(at: int, number: int, t: Tensor, rows: int = rows) -> None:
                kind, columns = ("float16", 64) if t.itemsize == 2 else ("float32", 32)
                of = driver.TensorMap(
                    *(kind, t.shape[0], t.shape[1], t.stride(0)),
                    *(rows, columns, t.data_ptr(), device),
                )
                block.map(MAP_BYTES * at, of, number)

            for j, (number, t) in enumerate(_multiplied(operand)):
                described(4 * i + j, first + number, t)
            for j, shared in enumerate(_shared(operand)):
                if shared is not None:
                    described(8 + SHARED * i + j, first + MADE + READ + j, shared)
            for j in range(2 + READ):  # scales, small, what is read
                aligned = j == 0 or (config.reads and i == 0)
                block.address(_MAPS + 16 * j + 8 * i, first + 4 + j, 15 if aligned else 1)
            for j, read in enumerate(_source(operand).read):
                if read is None:
                    continue
                apart = read.stride(0) if read.dim() == 3 else 0
                strides = _along(read, operand.by_columns)
                block.numbers(_STRIDES + 16 * (2 * j + i), "2q", *strides)
                block.numbers(_STRIDES + 32 * READ + 8 * (2 * j + i), "q", apart)
        for i in range(4):  # bias, y, pre, parts
            block.address(_MAPS + 80 + 8 * i, 2 * TENSORS + i)
        at = _STRIDES + (6 * READ + 1) * 8
        if (ragged := self._ragged[0]) is not None:
            block.address(at, 2 * TENSORS + 4, 15)
            block.numbers(at + 8, "3i", *ragged.facts)
        tiles_m, tiles_n = -(-m // 128), -(-n // config.bn)
        slices, each = config.slices, slice_tiles(k, config.slices)
        lines = [0 if isinstance(one, Source) else one.scales.shape[1] for one in (a, b)]
        groups, (groups_apart, row) = b.source.groups, self._y
        table = m, n, k, slices, each, tiles_m, tiles_n, *lines, groups, row, *_apart(a), *_apart(b)
        block.numbers(at - 8, "q", groups_apart)
        block.numbers(at + RAGGED_BYTES, "15i", *table)
        return block

    def run(self, *given: Tensor | None) -> None:
        """All launches."""
        for launch in self._runs:
            launch(*given)


def sides(operand: Operand) -> tuple[int, int]:
    """Sizes along M (N) and along K, of a group."""
    rows, columns = _source(operand).sizes
    return (columns, rows) if operand.by_columns else (rows, columns)


def raggedness(a: Operand, b: Planes) -> tuple[Ragged | None, Raggedness]:
    """Groups whose sizes only the device knows, and what these are of in a product."""
    first, second = _source(a).ragged, b.source.ragged
    if first is None:
        return None, Raggedness.NONE
    return first, Raggedness.ROWS if second is None else Raggedness.K


def _source(operand: Operand) -> Source:
    return operand if isinstance(operand, Source) else operand.source


def _apart(operand: Operand) -> tuple[int, int]:
    """Lines and k-tiles from a group to the next one."""
    rows = _source(operand).rows_apart
    return (0, rows // BK) if operand.by_columns else (rows, 0)


def _multiplied(operand: Operand) -> list[tuple[int, Tensor]]:
    """What TMA reads of an operand, and which of its tensors these are."""
    if isinstance(operand, Planes):
        return list(enumerate(operand.made[:4]))
    return [(MADE + i, t) for i, t in enumerate(operand.read) if t is not None]


def _shared(operand: Operand) -> tuple[Tensor | None, ...]:
    return operand.shared if isinstance(operand, Planes) else ()


def _tensors(operand: Operand) -> tuple[Tensor | None, ...]:
    if isinstance(operand, Planes):
        return operand.tensors
    return *(None,) * MADE, *operand.read, *(None,) * SHARED


def can_be_read(source: Source) -> bool:
    """Whether ``product`` can split it itself: it is no derivation and of no groups, and its rows
    begin on 16 bytes, do not overlap and lie side by side."""
    t = source.numbers
    if t.dim() == 3:
        return False
    across, along = t.stride()
    apart = across % 4 == 0 and across >= t.shape[1]
    plain = source.derivation is Derivation.NONE
    return plain and along == 1 and apart and t.data_ptr() % 16 == 0


def is_read(source: Source, n: int) -> bool:
    """Whether a call's first operand, by rows, is left to ``product`` to split; ``n``: columns of
    the product."""
    m, k = source.numbers.shape
    return can_be_read(source) and split_late(m, n, k, _units(source.numbers.device.index))


def _along(t: Tensor, by_columns: bool) -> tuple[int, int]:
    """Strides along M (N) and along K."""
    rows, columns = t.stride()[-2:]
    return (columns, rows) if by_columns else (rows, columns)


def _facts(operand: Operand) -> tuple[object, ...]:
    source = _source(operand)
    read = [None if t is None else (t.shape, t.stride()) for t in source.read]
    shares = any(t is not None for t in _shared(operand))
    ragged = source.ragged and source.ragged.facts
    return (*read, operand.by_columns, source.derivation, shares, ragged)


@cache
def _units(device: int) -> int:
    return device_facts(torch.device("cuda", device)).units


def empty(like: Tensor, shape: tuple[int, ...], save_pre: bool) -> tuple[Tensor, Tensor | None]:
    """Memory for a product, and beside it for what comes before its activation."""
    return like.new_empty(shape), like.new_empty(shape) if save_pre else None


def _rows_lie(t: Tensor) -> bool:
    """Whether they lie where ``product`` writes them."""
    return t.is_contiguous() if t.dim() == 2 else t.stride(-1) == 1 or t.shape[-1] == 1


def product(
    a: Operand,
    b: Planes,
    bias: Tensor | None = None,
    activation: str = "none",
    save_pre: bool = False,
    *,
    into: tuple[Tensor, Tensor | None] | None = None,
    added: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor | None]:
    """(act(A Bᵀ + bias), A Bᵀ + bias or None), both (M, N), or of groups (groups, M, N).

    Args:
        a: of A (M, K), or by columns of (K, M); or A itself, to be split here, see
            ``can_be_read``.
        b: of B (N, K), or by columns of (K, N).
        bias: (N,) or (groups, N) float32, or None.
        activation: its name.
        save_pre: whether to return the second.
        into: memory for both, of their shape and alike, dense but for groups, of which rows are.
        added: whether A Bᵀ is added to what ``into`` holds; without bias and activation.
        config: how the product is shared out; None lets a model choose.

    Raises:
        UnsupportedError: for a configuration that cannot serve.
    """
    (m, k), (n, depth) = sides(a), sides(b)
    assert k == depth, "both are of one K"
    assert not isinstance(a, Source) or (can_be_read(a) and not a.by_columns and a.sums is None)
    first, second = _source(a), b.source
    device = b.high.device.index
    reads = isinstance(a, Source)
    groups = second.groups if second.of_groups else 0
    assert first.of_groups == second.of_groups, "both are of groups"
    assert first.groups == second.groups, "both are of as many groups"
    assert not groups or not (reads or added), "groups are split, and nothing is added"
    ragged, way = raggedness(a, b)
    if config is None and ragged is not None:
        config = ragged_config(m, n, k, _units(device), groups, way)
    elif config is None:
        config = config_for(m, n, k, _units(device), reads, groups or 1)
    assert config.reads == reads, "the configuration is for other operands"
    if (why := config.invalid(k)) is not None:
        raise UnsupportedError("linear_act (planes backend)", "a configuration", why, _REMEDY)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    rows_ragged = way is Raggedness.ROWS
    assert config.slices == 1 or not rows_ragged, "ragged rows are not in slices"
    shape = (groups, m, n) if groups and not rows_ragged else (m, n)
    y, pre = into or empty(first.numbers, shape, save_pre)
    assert all(t is None or (t.shape == shape and _rows_lie(t)) for t in (y, pre))
    assert pre is None or pre.stride() == y.stride()
    parts = y.new_empty(groups or 1, config.slices, m, n) if config.slices > 1 else None
    derived = {one.activation for one in (first, second) if one.derivation is not Derivation.NONE}
    if derived:  # of one activation, and the product of none
        (activation,) = derived
    how = bias is None, activation, save_pre, added, config
    of_y = (y.stride(0), y.stride(1)) if len(shape) == 3 else (0, n)
    key = (_facts(a), _facts(b), of_y, *how, device)

    def plan() -> _ProductPlan:
        text = source(
            *(config, activation),
            has_bias=bias is not None,
            save_pre=save_pre,
            added=added,
            grouped=groups > 0,
            ragged=way,
            turned=(a.by_columns, b.by_columns),
            derivations=(first.derivation, second.derivation),
        )
        with compiled.current(device):
            return _ProductPlan(a, b, of_y, text, config, device)

    table = None if ragged is None else ragged.table
    plans.of(key, plan).run(*_tensors(a), *b.tensors, bias, y, pre, parts, table)
    return y, pre
