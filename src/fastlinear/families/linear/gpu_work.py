"""What each backend of linear_act does in a call on a GPU, for its price."""

from __future__ import annotations

from dataclasses import replace

import torch

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import (
    EPILOGUE,
    FEW_ROWS,
    LARGE,
    LIBRARY,
    OURS,
    Tiles,
    bytes_us,
    capability,
    dense_rows,
    hosts,
    on_device,
    rows_at,
    swept,
    tiled,
    units,
)
from fastlinear.dispatch.select import select
from fastlinear.dispatch.work import Work, call
from fastlinear.families.linear import padded_problem
from fastlinear.families.linear.cuda import columns, few_rows_config, planes
from fastlinear.families.linear.problem import (
    BACKWARD_PIECES,
    NAME,
    PIECES,
    STEP,
    WHOLE_BACKWARD,
    problem,
)
from fastlinear.families.linear.triton import (
    backward_config,
    config,
    planes_config,
    product_config,
    single_config,
)
from fastlinear.fastpath.autograd_node import node_work
from fastlinear.kernels.row_tiles import summed_tiles

_TILES: dict[str, Tiles] = {
    "eager": LIBRARY,
    "cublaslt": LIBRARY,
    "triton": OURS,
    "padded": OURS,
    "cuda": LARGE,
    "few_rows": FEW_ROWS,
}


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in a piece, a whole backward or a training step; None of backends that
    others registered."""
    if backend not in (*_TILES, "pieces", "planes", "triton_planes"):
        return None
    if p.piece == STEP:
        if backend == "pieces":
            return (node_work(NAME), *_chosen(p, ("forward", WHOLE_BACKWARD)))
        made = tuple(w for piece in PIECES for w in inner(p.with_piece(piece), "eager"))
    elif p.piece != WHOLE_BACKWARD:
        made = inner(p, backend)
    elif backend == "pieces":
        return _chosen(p, BACKWARD_PIECES)
    elif backend == "triton":
        made = _in_one_launch(p)
    elif backend == "planes":
        made = _planes_backward(p)
    else:
        made = tuple(w for piece in BACKWARD_PIECES for w in _part(p, piece, backend))
    return (*hosts(p, backend, made), *made)


def _chosen(p: Problem, pieces: tuple[str, ...]) -> tuple[Work, ...]:
    found: tuple[Work, ...] = ()
    for piece in pieces:
        q = p.with_piece(piece)
        found += work(q, select(q, ready=False).backend.name) or ()
    return found


def _part(p: Problem, piece: str, backend: str) -> tuple[Work, ...]:
    """A part of a whole backward."""
    if backend != "padded" or piece == "grad_pre":
        return inner(p.with_piece(piece), backend)
    plain = p.option("activation") == "none" and p.option("bias") == "no"
    return inner(p.with_piece(piece), backend, derived=piece == "grad_weight" or not plain)


def _in_one_launch(p: Problem) -> tuple[Work, ...]:
    m, k, n = _sizes(p)
    name = f"{NAME} triton {p.piece}"
    given = m, k, n, _dtype(p), p.option("activation"), (k % 16 == 0, n % 16 == 0)
    how = backward_config.config_for(*given)
    us = backward_config.microseconds(how, *given, units())
    sizes = {"m": m, "k": k, "n": n, "mkn": m * k * n}
    product = Work(f"{name} product", us - backward_config.start_us(how, given[3]), sizes)
    return call(name), product


def inner(p: Problem, backend: str, *, derived: bool = False) -> tuple[Work, ...]:
    """A backend's work on the device in one piece.

    Args:
        derived: whether dpre is at hand as ``padded`` wants it.
    """
    m, k, n = _sizes(p)
    x, w = _layouts(p)
    activation = p.option("activation")
    bias = ("bias",) if p.option("bias") == "yes" else ()
    plain = activation == "none" and not bias
    if p.piece == "grad_pre":
        return () if plain else _derivative(p, backend, m, n, activation, *bias)
    sizes, layout = {
        "forward": ((m, k, n), x + w),
        "grad_input": ((m, n, k), "n" + ("n" if w == "t" else "t")),
        "grad_weight": ((n, m, k), "t" + ("n" if x == "n" else "t")),
    }[p.piece]
    kind = "torch" if backend == "eager" else f"{NAME} {backend} {p.piece}"
    if backend == "padded" and not padded_problem.writes_odd_rows(p, capability()):
        return (*_aligned_layer(p), *_copies(kind, p, derived))
    if backend == "few_rows":
        found = _few_rows(kind, p, *sizes)
    elif backend == "triton":
        found = _triton(kind, p, sizes, layout)
    elif backend == "planes":
        found = _planes(p, *sizes, layout)
    elif backend == "triton_planes":
        found = _triton_planes(kind, p, *sizes, layout)
    else:
        found = tiled(
            kind, p, *sizes, layout, tiles=_TILES[backend], rows=_rows(p, backend, sizes, layout)
        )
    if backend == "padded":
        found += _copies(kind, p, derived)
    if p.piece != "forward" or plain:
        return found
    kept = ("kept",) if p.needs_grad and activation != "none" else ()
    return (*found, *swept(f"{NAME} {backend}{EPILOGUE}", p, m, n, activation, *bias, *kept))


def _derivative(
    p: Problem, backend: str, m: int, n: int, activation: str, *bias: str
) -> tuple[Work, ...]:
    """dpre and its column sums; ``padded`` writes them to rows of another length."""
    name, folded = f"{NAME} {backend} derivative", backend == "triton"
    made = swept(name, p, m, n, activation, *bias, folded=folded)
    if backend == "eager" or not bias or (folded and _sums_columns(p, m, n)):
        return made
    size = _dtype(p).itemsize
    done = summed_tiles(m, n, size, folded, units())[2]
    return made if done else (*made, call(f"{name} sum"))


def _sums_columns(p: Problem, m: int, n: int) -> bool:
    """Whether db is one launch of ``cuda.columns``."""
    served = columns.serves_size(m, n, _dtype(p), capability())
    return served and p.option("activation") == "none"


def _aligned_layer(p: Problem) -> tuple[Work, ...]:
    """What is chosen for the piece of copies that are aligned."""
    m, k, n = _sizes(p)
    forward = p.piece == "forward"
    q = problem(
        *(p.piece, m, padded_problem.padded_size(k), padded_problem.padded_size(n)),
        dtype=p.dtype,
        device=p.device,
        activation=p.option("activation") if forward else "none",
        bias=p.option("bias") == "yes" or not forward,
        needs_grad=p.needs_grad,
        w_layout="kn" if p.option("w") == "kn" and p.piece != "grad_weight" else "nk",
        precision=p.precision,
        captured=p.captured,
    )
    known = work(q, select(q, ready=False).backend.name)
    return inner(q, "eager") if known is None else on_device(known)  # or others' own backend


def _copies(kind: str, p: Problem, derived: bool) -> tuple[Work, ...]:
    """What ``padded`` copies before its product, and what it cuts off after."""
    odd_rows = padded_problem.writes_odd_rows(p, capability())
    numbers = [n for n in padded_problem.copied(p, odd_rows, derived) if n]
    if not numbers:
        return ()
    turned = p.piece != "grad_input" and p.option("x") == "strided"
    return copies(p, kind, sum(numbers), len(numbers), turned)


def copies(
    p: Problem, kind: str, numbers: int, launches: int = 1, turned: bool = False
) -> tuple[Work, ...]:
    """Launches that copy so many numbers in all; ``turned``: what lies along columns."""
    flags = ("turned",) * turned
    copied = Work(f"{kind} copies", bytes_us(p, 2 * numbers), {"numbers": numbers}, flags)
    return call(f"{kind} copy", launches), copied


COPY = f"{NAME} padded forward"
"""The kind of copies before a forward's product."""


def _few_rows(kind: str, p: Problem, m: int, k: int, n: int) -> tuple[Work, ...]:
    dtype = _dtype(p)
    config = few_rows_config.config_for(m, k, n, dtype)
    sizes = {"m": m, "k": k, "n": n, "mkn": m * k * n}
    us = few_rows_config.microseconds(config, m, k, n, dtype)
    return call(kind), Work(f"{kind} product", us - few_rows_config.start_us(dtype), sizes)


def _planes(p: Problem, m: int, k: int, n: int, layout: str) -> tuple[Work, ...]:
    """Both operands split into planes, by rows of memory or by columns, and their product; or the
    second one alone."""
    first, second = {
        "forward": ("x", "w"),
        "grad_input": ("dpre", "w"),
        "grad_weight": ("dpre", "x"),
    }[p.piece]
    turned = layout[0] == "t"  # rows of memory lie across K
    aligned = not turned and _row(p, first) % 4 == 0
    reads = aligned and planes.split_late(m, n, k, units())
    splits = [] if reads else [split(p, m, k, turned, _row(p, first))]
    splits.append(split(p, n, k, layout[1] == "n", _row(p, second)))
    return call(f"{NAME} planes", 2), *splits, *product_of_planes(p, m, k, n, reads=reads)


def _triton_planes(kind: str, p: Problem, m: int, k: int, n: int, layout: str) -> tuple[Work, ...]:
    """Scales and planes of both operands, and their product."""
    slices = planes_config.slices_of(m, k, n, units())
    launched = planes_config.ROWS, planes_config.COLS, slices
    name = f"{NAME} triton_planes split"
    ways = layout[0] == "t", layout[1] == "n"
    splits = tuple(
        Work(name, bytes_us(p, 3 * lines * k), {"numbers": lines * k}, ("turned",) * turned)
        for lines, turned in zip((m, n), ways, strict=True)
    )
    product = tiled(kind, p, m, k, n, tiles=OURS, launched=launched)
    return call(name, 4), *splits, *product, *_sum(kind, slices)


def _planes_backward(p: Problem) -> tuple[Work, ...]:
    """A gradient derived and split both ways, x and the weight split, and both products."""
    m, k, n = _sizes(p)
    x, w = _layouts(p)
    activation = p.option("activation")
    read = 1 if activation == "none" else 2
    times = 2 if m * n > planes.AT_ONCE else 1  # by rows, then by columns
    dpre = Work(
        f"{NAME} planes split both ways",
        bytes_us(p, read * times * m * n + 2 * m * planes.pitch(n)),
        {"numbers": m * n},
        (*rows_at(p, n), *(("bias",) if p.option("bias") == "yes" else ())),
        (activation,),
    )
    others = split(p, k, n, w == "t", _row(p, "w")), split(p, k, m, x == "n", _row(p, "x"))
    dx, dw = product_of_planes(p, m, n, k), product_of_planes(p, n, m, k)
    return call(f"{NAME} planes", 3 + (p.option("bias") == "yes")), dpre, *others, *dx, *dw


def split(p: Problem, lines: int, k: int, turned: bool, row: int) -> Work:
    """An operand's numbers are read once, two planes written; rows of these begin at multiples of
    8.

    Args:
        turned: whether its rows in memory lie across K.
        row: numbers between these.
    """
    rows, wide = (k, lines) if turned else (lines, k)
    kind = f"{NAME} planes split{' by columns' * turned}"
    us = bytes_us(p, lines * k + rows * planes.pitch(wide))
    return Work(kind, us, {"numbers": lines * k}, rows_at(p, row))


def product_of_planes(
    p: Problem,
    m: int,
    k: int,
    n: int,
    *flags: str,
    reads: bool = False,
    groups: int = 1,
    whole: bool = False,
) -> tuple[Work, ...]:
    """The product (m, n) over k of operands that are split, or of which the first is read.
    ``whole``: K is not in slices."""
    config = planes.config_for(m, n, k, units(), reads, groups, whole)
    us = config.microseconds(m, n, k, units(), groups) - planes.START_US
    sizes = {"m": m, "k": k, "n": n, "mkn": groups * m * k * n}
    how = f"tile:{config.bn}", *("reads",) * reads, *flags
    product = Work(f"{NAME} planes product", us, sizes, how)
    if config.slices == 1:
        return (product,)
    sliced = replace(product, flags=(*product.flags, "sliced"))
    return call(f"{NAME} planes"), sliced


def _row(p: Problem, operand: str) -> int:
    """Numbers between the rows of an operand in memory."""
    m, k, n = _sizes(p)
    if operand == "x":
        return {"rows": k, "rows_odd": 2 * k + 1, "strided": m}[p.option("x")]
    return n if operand == "dpre" or p.option("w") == "kn" else k


def _rows(
    p: Problem, backend: str, sizes: tuple[int, int, int], layout: str
) -> tuple[int, int, int]:
    """Numbers from row to row of a piece's operands and its result; those of x may be any."""
    a, b, c = dense_rows(*sizes, layout)
    if p.option("x") != "rows_odd" or backend == "padded":  # which copies them
        return a, b, c
    x = _row(p, "x")
    return x if p.piece == "forward" else a, x if p.piece == "grad_weight" else b, c


def _triton(kind: str, p: Problem, sizes: tuple[int, int, int], layout: str) -> tuple[Work, ...]:
    """Triton's product, by the model that chooses its tile in 16 bits."""
    rows, depth, columns = sizes
    dtype, chip = _dtype(p), capability()
    few = config.few_rows_config_for(rows, depth, columns, dtype)
    if p.piece == "forward" and layout[1] == "t" and few is not None:
        return tiled(f"{kind} few rows", p, *sizes, layout, tiles=FEW_ROWS, triton=True)
    inner = _rows(p, "triton", sizes, layout)
    aligned = all(row * dtype.itemsize % 16 == 0 for row in inner)
    if dtype.itemsize == 4:
        c = single_config.config_for(rows, depth, columns, chip, aligned, layout == "nt")
        launched = c.block_r, c.block_c, c.splits
        plain = config.dot_precision(depth, rows, columns) == "ieee"
        made = tiled(
            *(kind, p, *sizes, layout), tiles=OURS, launched=launched, plain=plain, rows=inner
        )
        return (*made, *_sum(kind, c.splits))
    wide = aligned or inner[0] % 16 == 0, aligned or inner[1] % 16 == 0
    c = product_config.config_for(*sizes, dtype, chip, aligned, wide)
    us = product_config.microseconds(c, *sizes, wide, units())
    told = {"m": rows, "k": depth, "n": columns, "mkn": rows * depth * columns}
    ways = (layout,) if layout != "nt" else ()
    odd = tuple(f"{a}:odd" for a, at_once in zip("ab", wide, strict=True) if not at_once)
    product = Work(f"{kind} product", us - product_config.START_US, told, odd, ways)
    return call(kind), product, *_sum(kind, c.splits)


def _sum(kind: str, splits: int) -> tuple[Work, ...]:
    """The launch that adds up what was multiplied in parts of the depth."""
    return (call(f"{kind} sum"),) if splits > 1 else ()


def _dtype(p: Problem) -> torch.dtype:
    return FLOAT_DTYPES[p.dtype]


def _sizes(p: Problem) -> tuple[int, int, int]:
    return max(1, p.dim("M")), max(1, p.dim("K")), max(1, p.dim("N"))


def _layouts(p: Problem) -> tuple[str, str]:
    x = "t" if p.option("x") == "strided" else "n"
    return x, "t" if p.option("w") == "nk" else "n"
