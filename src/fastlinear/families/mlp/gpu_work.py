"""What each backend of mlp does in a call on a GPU, for its price."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import (
    EPILOGUE,
    bytes_us,
    capability,
    flops_per_us,
    hosts,
    of_rows,
    on_device,
    rows_at,
    swept,
    units,
)
from fastlinear.dispatch.select import select
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of
from fastlinear.families.linear import gpu_work as linear
from fastlinear.families.linear import problem as linear_act
from fastlinear.families.linear.selection import select_backward
from fastlinear.families.mlp import layerwise
from fastlinear.families.mlp.cuda import choice, rows, tasks
from fastlinear.families.mlp.problem import NAME, STEP, backward_of, keeps_hidden, widths_of
from fastlinear.families.mlp.triton import config as triton
from fastlinear.fastpath.autograd_node import node_work

_BLOCK_SHARE = 0.3  # of a multiprocessor's rate of products
_RESULTS = 4e4  # of a multiprocessor in a microsecond


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None of backends that
    others registered."""
    if p.piece == STEP:
        return _step(p, backend)
    if backend in _WHOLE:
        made = _WHOLE[backend](p)
        return None if made is None else (*hosts(p, backend, made), *made)
    if backend not in ("eager", "layerwise"):
        return None
    made = _layers(p, backend)
    return (*hosts(p, backend, made), *made)


def _few_rows(p: Problem) -> tuple[Work, ...] | None:
    """The launch of ``whole_cuda``, or one for each layer."""
    m, widths, itemsize = p.dim("M"), widths_of(p), FLOAT_DTYPES[p.dtype].itemsize
    aligned = not any(k * itemsize % 16 for k in widths[:-1])
    able = choice.sharings(widths, m, itemsize, aligned)
    if not able:
        return None
    name, (best, *_) = f"{NAME} whole_cuda {p.piece}", able
    us = choice.microseconds(best, widths, m, itemsize)
    sizes = {"m": m, "kn": sum(k * n for k, n in pairwise(widths))}
    flags = (choice.kernel(best), *flags_of(p, "x", "w"))
    launches = len(best) if isinstance(best, tuple) else 1
    return call(name, launches), Work(f"{name} chain", us, sizes, flags, (p.option("activation"),))


def _rows(p: Problem) -> tuple[Work, ...] | None:
    """Launches of ``rows_cuda``: rows through the layers, then all gradients of weights."""
    m, widths, activation = p.dim("M"), widths_of(p), p.option("activation")
    backward = p.piece == "backward"
    steps = widths[::-1] if backward else widths
    keeps_pre = activation_of(activation).saved == "pre"
    staged = keeps_pre and (backward or p.needs_grad)
    config = rows.rows_for(m, steps, backward, staged, units())
    if config is None:
        return None
    name, hidden = f"{NAME} rows_cuda {p.piece}", m * sum(widths[1:-1])
    results, last = config.results_us(m, steps, backward, units())
    rest = config.microseconds(m, steps, backward, units()) - results - last
    kept = hidden * ((2 + keeps_pre) if backward else p.needs_grad)
    sizes = {"m": m, "numbers": kept, "kn": sum(k * n for k, n in pairwise(widths))}
    flags = flags_of(p, "w") + ("in two parts",) * (rows.blocks_of(max(steps[1:])) > rows.CHUNK)
    ending = () if backward else (p.option("final"),)
    made = [
        call(name),
        Work(f"{name} rows", (rest**2 + bytes_us(p, kept) ** 2) ** 0.5, sizes, flags),
        Work(f"{name} results", results, {"numbers": hidden}, (), (activation,)),
        Work(f"{name} results", last, {"numbers": m * steps[-1]}, (), ending),
        _moved(f"{name} read", p, m, steps[0], aligned=_reads_aligned_x(p)),
        _moved(f"{name} written", p, m, steps[-1]),
    ]
    made += _copies(p)
    if p.option("x") == "strided":
        turned = 2 * m * widths[0]
        made.append(Work(f"{name} turned x", bytes_us(p, turned), {"numbers": turned}))
    if backward:
        shares = rows.shares_for(m, tuple((n, k) for k, n in pairwise(widths)), units())
        summed = rows.grads_us(m, shares, units())
        read = bytes_us(p, m * sum(widths) + hidden)
        made += [call(f"{name} grads"), Work(f"{name} grads", (summed**2 + read**2) ** 0.5, sizes)]
    return tuple(w for w in made if w.units)


def _copies(p: Problem) -> list[Work]:
    """What does not begin on 16 bytes, in rows that do: weights, and what layers read for the
    gradients of their weights."""
    widths, m = widths_of(p), p.dim("M")
    copied = sum(k * n for k, n in pairwise(widths) if k % 8)
    made = []
    if copied:
        numbers = {"numbers": copied}
        made += [call(f"{NAME} copy"), Work(f"{NAME} copies", bytes_us(p, 2 * copied), numbers)]
    entering = widths[p.option("x") == "pitched" : -1]
    if p.piece == "backward" and (read := m * sum(n for n in entering if n % 8)):
        made.append(Work(f"{NAME} rows copied", bytes_us(p, 2 * read), {"numbers": read}))
    return made


def _tasks(p: Problem) -> tuple[Work, ...] | None:
    """The launches of ``tasks_cuda``."""
    m, widths, name = p.dim("M"), widths_of(p), f"{NAME} tasks_cuda"
    steps = tuple(tasks.Step(n, k, True, k) for k, n in reversed(list(pairwise(widths))))
    graded = activation_of(p.option("final")).saved != "none" or widths[-1] % 8 != 0
    tiles = tasks.tiles_for(m, steps, graded, units())
    us = tasks.microseconds(m, steps, graded, tiles, units()) - tasks.START_US
    moved = m * (5 * sum(widths) - 3 * widths[0])
    sizes = {"m": m, "numbers": moved, "kn": sum(k * n for k, n in pairwise(widths))}
    flags = (f"tile:{tiles.bm}x{tiles.bn}", *flags_of(p, "w"))
    done = Work(f"{name} tasks", (us**2 + bytes_us(p, moved) ** 2) ** 0.5, sizes, flags)
    return call(name, 2), done, *_copies(p)


def _programs(p: Problem) -> tuple[Work, ...]:
    """Launches of ``whole_triton``: programs that carry a few rows each through all layers; in the
    backward, all gradients of weights besides."""
    m, widths, backward = p.dim("M"), widths_of(p), p.piece == "backward"
    name, dtype = f"{NAME} whole_triton {p.piece}", FLOAT_DTYPES[p.dtype]
    config = (
        triton.backward_config(m, widths, dtype, units())
        if backward
        else triton.forward_config(m, widths, dtype, units(), capability())
    )
    rows = ceil(ceil(m / config.block_m) / units()) * config.block_m  # of a multiprocessor
    rate = flops_per_us(p, ours=True)
    how = (f"rows of {config.block_m}", *flags_of(p, "w"))
    if min(widths) < config.chunk < max(widths):  # weights of mixed parts lie in registers
        how += ("mixed widths",)
    made = [call(name)]
    padded = pairwise(sum(triton.parts_of(n, config.chunk)) for n in widths)
    for layer, (k, n) in zip(layerwise.layers_of(p), padded, strict=True):
        lies = of_rows(dtype.itemsize, (layer.dim("K"),), triton=True)
        flags = (*how, *(flag for flag, holds in lies if holds))
        us, sizes = 2 * rows * k * n / (rate * _BLOCK_SHARE), {"m": m, "k": k, "n": n}
        ending, numbers = (layer.option("activation"),), {"numbers": m * n}
        made += [
            Work(f"{name} layer", 1.0),
            Work(f"{name} product", us, sizes, flags),
            Work(f"{name} results", rows * n / _RESULTS, numbers, (), ending),
        ]
        if backward:
            moved = m * (layer.dim("K") + layer.dim("N"))
            us = ((2 * m * k * n / (rate * units())) ** 2 + bytes_us(p, moved) ** 2) ** 0.5
            made.append(Work(f"{name} grads", us, {"numbers": moved, "kn": k * n}))
    x = () if backward else flags_of(p, "x")
    made.append(_moved(f"{name} ends", p, m, widths[-1]))
    made.append(_moved(f"{name} ends", p, m, widths[0], *x, aligned=_reads_aligned_x(p)))
    if kept := m * sum(widths[1:-1]) * (2 if backward else p.needs_grad):
        lies_at = rows_at(p, widths[1])
        made.append(Work(f"{name} kept", bytes_us(p, kept), {"numbers": kept}, lies_at))
    return tuple(made)


def _moved(name: str, p: Problem, m: int, n: int, *flags: str, aligned: bool = False) -> Work:
    """Rows that a launch reads or writes: where they begin tells the more the more there are."""
    lies_at = () if aligned else rows_at(p, n)
    return Work(name, bytes_us(p, m * n), {"numbers": m * n, "n": n}, flags, lies_at)


def _reads_aligned_x(p: Problem) -> bool:
    """Whether what is read first are rows of x that begin on 16 bytes, whatever is in one."""
    return p.piece == "forward" and p.option("x") == "pitched"


_WHOLE = {
    "rows_cuda": _rows,
    "tasks_cuda": _tasks,
    "whole_cuda": _few_rows,
    "whole_triton": _programs,
}


def _layers(p: Problem, backend: str) -> tuple[Work, ...]:
    found: tuple[Work, ...] = ()
    known: dict[Problem, tuple[Work, ...]] = {}  # of equal layers one is looked at
    for layer in layerwise.layers_of(p):
        if layer not in known:
            known[layer] = _layer(layer, p.piece == "backward", backend)
        found += known[layer]
    if p.piece != "backward" or keeps_hidden(p):
        return found
    for layer in layerwise.layers_of(p)[:-1]:  # what the next one reads
        name, (m, n) = layer.option("activation"), map(layer.dim, "MN")
        if activation_of(name).saved != "pre":
            continue
        if backend == "layerwise" and layerwise.activates_at(name, FLOAT_DTYPES[p.dtype]):
            found += swept(f"{linear.NAME} triton derivative", layer, m, n, name)  # takes as long
        else:
            found += swept(f"{linear.NAME} eager{EPILOGUE}", layer, m, n, name, "kept")
    return found


def _layer(layer: Problem, backward: bool, backend: str) -> tuple[Work, ...]:
    if backend == "eager":
        pieces = linear_act.BACKWARD_PIECES if backward else ("forward",)
        return tuple(w for q in pieces for w in linear.inner(layer.with_piece(q), "eager"))
    if backward:
        chosen = select_backward(layer, ready=False)
    else:
        chosen = (select(layer.with_piece("forward"), ready=False),)
    works = (w for c in chosen for w in linear.work(c.problem, c.backend.name) or ())
    return on_device(works)


def _step(p: Problem, backend: str) -> tuple[Work, ...] | None:
    if backend == "pieces":
        return of_pieces(p, node_work(NAME))
    if backend != "eager":
        return None
    pieces = p.with_piece("forward"), backward_of(p.with_piece("backward"), "eager")
    made = tuple(w for piece in pieces for w in _layers(piece, "eager"))
    return (*hosts(p, "eager", made), *made)
