"""Backend ``tasks_cuda`` of mlp: the backward of a chain in one launch for Hopper, 16 bits.

Tiles of all products are tasks that wait for what they read. A launch before it sets counters to 0;
weights whose rows do not begin on 16 bytes are copied before, all in one launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.device import device_facts
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.families.mlp.cuda import operands
from fastlinear.families.mlp.cuda.tasks import (
    BEGIN_KERNEL,
    KERNEL,
    MAX_LAYERS,
    Order,
    Step,
    Tiles,
    order,
    source,
    tiles_for,
)
from fastlinear.families.mlp.problem import layer_activations
from fastlinear.families.mlp.reference import Needs, Weights, first_needed, layer_input
from fastlinear.kernels.cuda import compiled
from fastlinear.kernels.cuda.prepared import MAP_BYTES, Block, Plans, Prepared, prepared
from fastlinear.native import cuda_driver as driver

_BEGIN_THREADS = 256
_plans: Plans[_Plan] = Plans()


def backward(
    dy: Tensor,
    x: Tensor,
    weights: Weights,
    saved: tuple[Tensor, ...],
    activation: str,
    final_activation: str,
    needs: Needs,
    *,
    config: Tiles | None = None,
) -> tuple[Tensor | None, tuple[Tensor | None, ...], tuple[Tensor | None, ...]]:
    """Gradients of ``mlp``: (dx, dWs, dbs), each None where ``needs`` does not ask for it.

    Args:
        dy: (M, n_L) bfloat16 or float16, of any strides.
        x: (M, n_0).
        weights: per layer (n_{i+1}, n_i).
        saved: as ``reference.forward`` gives it.
        activation, final_activation: names.
        needs: (x, per layer weight, per layer bias).
        config: tiles; None lets a model choose.

    Accumulates in float32, in a fixed order: results are deterministic.

    Raises:
        UnsupportedError: for more layers than a launch takes.
    """
    need_x, need_ws, need_bs = needs
    rows, layers = x.shape[0], len(weights)
    stop = first_needed(needs)
    dws: list[Tensor | None] = [None] * layers
    dbs: list[Tensor | None] = [None] * layers
    if stop == layers:
        return None, tuple(dws), tuple(dbs)
    if layers - stop > MAX_LAYERS:
        found = f"{layers - stop} layers"
        raise UnsupportedError(_NAME, f"at most {MAX_LAYERS} layers", found, _REMEDY)
    x, dy = operands.rows_of(x), operands.rows_of(dy)
    stored = tuple([t.contiguous() for t in saved[:layers]])  # others are outputs, made on the way
    names = layer_activations(layers, activation, final_activation)
    below = activation_of(activation).saved
    graded = activation_of(names[-1]).saved != "none" or not operands.on_16_bytes(dy)
    g = operands.pitched(dy, dy.shape[1]) if graded else dy
    read = stored[-1] if activation_of(names[-1]).saved != "none" else None
    dx = dy.new_empty(x.shape) if need_x else None
    first = stop + (not need_x)
    aligned = dict(enumerate(operands.all_aligned(weights[first:]), first))
    given: list[Tensor | None] = [dy, read, g if graded else None]
    steps = []
    for i in reversed(range(stop, layers)):
        n, k = weights[i].shape
        out = aside = None
        if i > stop:
            out = operands.pitched(dy, k)
            if need_ws[i] and (below == "pre" or k % 8):  # as dW's product reads it
                aside = operands.pitched(dy, k)
        elif need_x:
            out = dx
        entering = None
        if need_ws[i]:
            came = layer_input(i, x, stored, names) if i == stop else stored[i - 1]
            entering = operands.aligned(came) if aside is None else aside
        dws[i] = dy.new_empty(n, k) if need_ws[i] else None
        dbs[i] = dy.new_empty(n) if need_bs[i] else None
        hidden = i > stop and (below != "none" or aside is not None)
        given += [g, aligned.get(i), g if entering is None else entering, out, aside]
        given += [stored[i - 1] if hidden else None, dws[i], dbs[i]]
        steps.append(Step(n, k, out is not None, k if need_ws[i] else int(need_bs[i])))
        if out is not None:
            g = out
    _launch(given, tuple(steps), (activation, final_activation), rows, config)
    return dx, tuple(dws), tuple(dbs)


_NAME = "mlp (tasks_cuda backend)"
_REMEDY = "Choose another backend or leave the choice to dispatch."


def _launch(
    given: list[Tensor | None],
    steps: tuple[Step, ...],
    names: tuple[str, str],
    rows: int,
    config: Tiles | None,
) -> None:
    """The launches of ``tasks.cu`` on tensors in the order of ``_Plan``."""
    dy = given[0]
    assert dy is not None
    device = dy.device
    graded = given[2] is not None
    tiles = config or tiles_for(rows, steps, graded, device_facts(device).units)
    lies = tuple([None if t is None else t.stride(0) for t in given])
    key = steps, names, rows, dy.dtype, device.index, tiles, lies

    def made() -> _Plan:
        with compiled.current(device.index):
            return _Plan(given, steps, names, rows, tiles)

    plan = _plans.of(key, made)
    found = plan.order
    counters = dy.new_empty(plan.counters, dtype=torch.int32)
    parts = None
    if found.parts_at[-1]:
        parts = dy.new_empty(found.parts_at[-1], dtype=torch.float32)
    plan.begin(counters)
    plan.run(*given, parts, counters)


# g[], w[], h[] | dy, dy_saved, graded | out[], aside[], saved[], dw[], db[] | parts, parts_at[],
# counters | dy_stride | rows, steps, tasks, n[], k[], columns[], pitch[], begin[], slices[],
# slice_rows[], first_sum[], graded_columns
_DY = 3 * MAP_BYTES * MAX_LAYERS
_OUT = _DY + 3 * 8
_PARTS = _OUT + 5 * 8 * MAX_LAYERS
_COUNTERS = _PARTS + 8 + 8 * MAX_LAYERS
_SIZES = _COUNTERS + 16
_TABLES = _SIZES + 12
_BYTES = -(-(_TABLES + 4 * (9 * MAX_LAYERS + 3)) // 64) * 64


class _Plan:
    """Launches of ``tasks.cu``. Tensors: dy, dy_saved, graded, then for each step g, w, h, out,
    aside, saved, dw, db; then parts and counters. None for what there is not."""

    def __init__(
        self,
        given: list[Tensor | None],
        steps: tuple[Step, ...],
        names: tuple[str, str],
        rows: int,
        tiles: Tiles,
    ) -> None:
        dy = given[0]
        assert dy is not None
        device, dtype = dy.device.index, dy.dtype
        text = source(tiles, dtype, *names)
        kernel = compiled.kernel(text, KERNEL, tiles.shared_bytes, device)
        block = Block(_BYTES)
        launch = driver.Launch(kernel, tiles.threads, 1, [block.argument])  # type: ignore[list-item]
        graded = given[2] is not None
        units = device_facts(dy.device).units
        self.order = found = order(rows, steps, graded, tiles, units)
        for i in range(3):
            block.address(_DY + 8 * i, i)
        for s in range(len(steps)):
            first = 3 + 8 * s
            for j in range(3):
                matrix = given[first + j]
                if matrix is not None:
                    of = driver.TensorMap(
                        *(DTYPE_NAMES[dtype], matrix.shape[0], matrix.shape[1], matrix.stride(0)),
                        *(64, 64, matrix.data_ptr(), device),
                    )
                    block.map(MAP_BYTES * (j * MAX_LAYERS + s), of, first + j)
            for j in range(5):
                block.address(_OUT + 8 * (j * MAX_LAYERS + s), first + 3 + j)
        block.address(_PARTS, len(given))
        block.address(_COUNTERS, len(given) + 1)
        block.numbers(_PARTS + 8, f"{len(steps)}q", *found.parts_at[:-1])
        block.numbers(_COUNTERS + 8, "q", dy.stride(0))
        block.numbers(_SIZES, "3i", rows, len(steps), found.tasks)
        self._tables(block, given, steps, found)
        blocks = min(found.tasks, launch.max_clusters())
        launch.set_grid(blocks)
        launch.begin_early()
        self.run = Prepared(launch, device, block.places, block.masks)
        self.counters = 1 + (len(steps) + 1) * -(-rows // tiles.bm) + found.sums
        self.begin = _begin(text, device, self.counters)

    @staticmethod
    def _tables(
        block: Block, given: list[Tensor | None], steps: tuple[Step, ...], found: Order
    ) -> None:
        pitches = [1 if given[2] is None else given[2].stride(0)]
        for s in range(len(steps)):
            out = given[3 + 8 * s + 3]
            pitches.append(1 if out is None else out.stride(0))
        at = _TABLES
        for values, room in (
            ([s.n for s in steps], MAX_LAYERS),
            ([s.k for s in steps], MAX_LAYERS),
            ([s.columns for s in steps], MAX_LAYERS),
            (pitches, MAX_LAYERS + 1),
            (found.begin, 2 * MAX_LAYERS + 1),
            (found.slices, MAX_LAYERS),
            (found.slice_rows, MAX_LAYERS),
            (found.first_sum, MAX_LAYERS),
            ((found.graded_columns,), 1),
        ):
            block.numbers(at, f"{len(values)}i", *values)
            at += 4 * room


def _begin(text: str, device: int, count: int) -> Prepared:
    """The launch that sets counters to 0."""
    block = Block(16)
    block.address(0, 0)
    block.numbers(8, "i", count)
    return prepared(text, BEGIN_KERNEL, block, _BEGIN_THREADS, 1, device)
