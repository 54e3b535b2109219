"""What each backend of groups does in a call on a GPU, for its price."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from math import ceil

from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import (
    LIBRARY,
    OURS,
    Launched,
    bytes_us,
    capability,
    flops_per_us,
    hosts,
    of_rows,
    rows_at,
    tiled,
    tiled_us,
    units,
)
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of, host
from fastlinear.families.grouped.problem import NAME, PIECES, STEP, inner_order, padded_size
from fastlinear.families.grouped.ragged.cuda import config as ragged_tiles
from fastlinear.families.grouped.triton import config
from fastlinear.families.grouped.unequal.cuda import config as unequal
from fastlinear.families.linear import gpu_work as linear
from fastlinear.families.linear.cuda import planes
from fastlinear.fastpath.autograd_node import node_work
from fastlinear.kernels.cuda.hopper import BK

_LIBRARY = ("eager", "baddbmm", "loop", "conv")
_TRITON = ("triton", "together")
_ONE_PASS_SHARE, _TILE_US = 0.5, 0.3  # of the rate of products; of a tile, besides
_KNOWN = (
    *_LIBRARY,
    *_TRITON,
    "weight_stationary",
    "packed_groups",
    "wide",
    "padded",
    "planes",
    "cuda",
)


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in a piece or a training step; None of backends that others registered."""
    if p.family == NAME and p.piece == STEP:
        if backend == "pieces":
            return of_pieces(p, node_work(NAME))
        made = tuple(w for piece in PIECES for w in _device(p.with_piece(piece), "eager"))
        return (*hosts(p, backend, made), *made) if backend == "eager" else None
    if backend not in _KNOWN:
        return None
    pieces = PIECES if p.piece == STEP else (p.piece,)
    sliced = p.family == "ragged_linear" and backend == "eager"
    if backend == "padded":
        made = _padded(p)
    elif backend in ("planes", "cuda"):
        own = _planes if backend == "planes" else _cuda
        made = tuple(w for piece in pieces for w in own(p, piece))
    else:
        made = _one_by_one(p) if sliced else _device(p, backend)
    if p.piece == STEP and backend != "eager":
        name = f"{p.family} {backend}"  # lists of groups are walked by Python
        listed = (host(f"{name} group", p.dim("G")),) if backend == "together" else ()
        return (host(name), *listed, *made)
    return (*hosts(p, backend, made), *made)


def _padded(p: Problem) -> tuple[Work, ...]:
    """Copies, and the products of tokens and weights that lie well, Triton's for all that serve."""
    groups, m, k, n = (max(1, p.dim(name)) for name in ("G", "M", "K", "N"))
    order, wide = p.option("order"), padded_size(k)
    lies = {"order": inner_order(order), "x": "dense", "w": "dense"}
    options = tuple((name, lies.get(name, value)) for name, value in p.options)
    dims = tuple((name, wide if name == "K" else size) for name, size in p.dims if name != "L")
    inner = replace(p, options=options, dims=dims)
    forward, turned = p.piece == "forward", order == "channels"
    x = turned or p.option("x") != "dense" or k != wide
    w = p.option("w") != "dense" or k != wide
    dx, outputs = (k != wide or turned) and not forward, 1 if forward and not p.needs_grad else 2
    dw = k != wide and not forward
    numbers = groups * (m * wide * (x + dx) + wide * n * (w + dw) + m * n * outputs * turned)
    kind = f"{NAME} padded {p.piece}"
    sizes = {"numbers": numbers, "k": k}
    copies = Work(f"{kind} copies", bytes_us(p, 2 * numbers), sizes, flags_of(p, "order", "x", "w"))
    return (*_device(inner, "triton"), call(f"{kind} copy", x + w + dx + dw + 2 * turned), copies)


def _planes(p: Problem, piece: str) -> tuple[Work, ...]:
    """All groups' operands split, as those of one layer are, and their products."""
    groups, m, k, n = (max(1, p.dim(name)) for name in ("G", "M", "K", "N"))
    kept = p.needs_grad and p.option("activation") != "none"
    name, own = f"{linear.NAME} planes", f"{p.family} planes {piece}"
    ragged = p.family != NAME
    weight_turned = not ragged and p.option("w") != "dense"
    if ragged:  # groups without rows have weights
        m = ceil(m / min(groups, m))

    def split(rows: int, width: int, turned: bool) -> Work:
        """Of a matrix a group; ``turned``: its planes are by columns."""
        made = planes.up(rows, planes.SEGMENT)
        moved = bytes_us(p, groups * (rows * width + made * planes.pitch(width)))
        kind, sizes = f"{name} split{' by columns' * turned}", {"numbers": groups * made * width}
        return Work(kind, moved, sizes, rows_at(p, width))

    weight = (k, n) if weight_turned else (n, k)  # as its rows lie
    product = partial(linear.product_of_planes, p, groups=groups)
    whole = partial(product, whole=ragged)
    if piece == "forward":
        splits = split(m, k, False), split(*weight, weight_turned)
        products = whole(m, k, n)
        written = bytes_us(p, groups * m * n * kept)
        more = (Work(f"{own} kept", written, {"numbers": groups * m * n}),) if kept else ()
        return call(own, 2 + ragged), *splits, *products, *more
    read = 1 if p.option("activation") == "none" else 2
    made = groups * planes.up(m, planes.SEGMENT) * n
    both = bytes_us(p, read * groups * m * n + 2 * made)
    dpre = Work(
        *(f"{name} split both ways", both, {"numbers": made}),
        (*rows_at(p, n), *flags_of(p, "bias")),
        (p.option("activation"),),
    )
    splits = split(*weight, not weight_turned), split(m, k, True)
    launches = 3 + ragged + (p.option("bias") == "yes")
    return call(own, launches), dpre, *splits, *whole(m, n, k), *product(n, m, k)


def _cuda(p: Problem, piece: str) -> tuple[Work, ...]:
    """The products of ragged groups by CUDA C++ in 16 bits, and Triton's passes beside them."""
    groups, m, k, n = (max(1, p.dim(name)) for name in ("G", "M", "K", "N"))
    served, activation, chip = min(groups, m), p.option("activation"), units()
    name = f"{p.family} cuda"
    column_us = 2 * ragged_tiles.ROWS * BK / flops_per_us(p)

    def product(kind: str, tiled: ragged_tiles.Tiled, wide: int) -> Work:
        weights = groups if kind == "dw" else served  # zeros where a group has no rows
        moved = bytes_us(p, m * (k + n) + weights * k * n)
        us = ((tiled.time * column_us) ** 2 + moved**2) ** 0.5
        sizes = {"m": ceil(m / served), "k": k, "n": n, "mkn": m * k * n, "groups": served}
        return Work(f"{name} {kind}", us, sizes, (f"tile:{tiled.config.bn}", *rows_at(p, wide)))

    def swept(kind: str, times: int) -> tuple[Work, ...]:
        us = bytes_us(p, times * m * n)
        return call(f"{name} {kind}"), Work(f"{name} {kind}", us, {"numbers": m * n, "n": n})

    if piece == "forward":
        kept = p.needs_grad and activation != "none"
        us = bytes_us(p, m * n * (1 + kept))
        how = ("kept",) * kept + flags_of(p, "bias")
        written = Work(f"{name} results", us, {"numbers": m * n}, how, (activation,))
        return (
            call(name, 2),
            product("product", ragged_tiles.rows_tiles(m, groups, n, k, chip), n),
            written,
        )
    more = swept("derivative", 3) if activation != "none" else ()
    if p.option("bias") == "yes":
        more += swept("sums", 1)
    dx = product("dx", ragged_tiles.rows_tiles(m, groups, k, n, chip), k)
    dw = product("dw", ragged_tiles.depth_tiles(m, groups, n, k, chip), k)
    return call(name, 3), *more, dx, dw


def _alone(p: Problem, backend: str) -> bool:
    """Whether each group is a product of its own, one after the other."""
    return backend == "loop" or (p.family != NAME and backend == "eager")


def _one_by_one(p: Problem) -> tuple[Work, ...]:
    """Products of slices of x, whose sizes the host reads: nobody measured the device alone."""
    groups, k, n, m = (max(1, p.dim(name)) for name in ("G", "K", "N", "M"))
    filled = min(groups, m)
    each = _products(p.piece, max(1, m // filled), k, n)
    found = (w for sizes in each for w in tiled("torch", p, *sizes))
    return tuple(replace(w, units=w.units * filled) for w in found)


def _zeros(p: Problem, name: str) -> tuple[Work, ...]:
    """The gradients of weights whose groups have no rows."""
    groups, k, n, m = (max(1, p.dim(name)) for name in ("G", "K", "N", "M"))
    if p.piece == "forward" or groups <= m:
        return ()
    numbers = (groups - m) * k * n
    return (Work(f"{name} zeros", bytes_us(p, numbers), {"numbers": numbers}),)


def _products(piece: str, m: int, k: int, n: int) -> tuple[tuple[int, int, int], ...]:
    """The products of a group: of the forward, and of dx and dW."""
    forward, backward = ((m, k, n),), ((m, n, k), (n, m, k))
    return {"forward": forward, "backward": backward, STEP: forward + backward}[piece]


def _products_us(p: Problem, backend: str, groups: int, m: int) -> tuple[float, tuple[str, ...]]:
    """Microseconds of an ideal device for the products of groups of m rows, and what is known of
    how they are launched."""
    k, n = max(1, p.dim("K")), max(1, p.dim("N"))
    ours, alone = backend not in _LIBRARY, _alone(p, backend)
    size, rate, every = FLOAT_DTYPES[p.dtype].itemsize, flops_per_us(p, ours=ours), units()
    products = _products(p.piece, m, k, n)
    if p.family == NAME and backend == "triton":
        chip = size, every, capability()
        channels = p.option("order") == "channels"
        if p.piece == "forward":
            launched, way = _launched(config.product_config(m, groups, k, n, *chip, channels))
            if way[-1] == "summed":
                return bytes_us(p, groups * m * (k + 1)), way
            us = tiled_us(*products[0], size, rate, OURS, groups, False, every, launched)
            return us, way
        how = config.backward_config(
            m, groups, k, n, *chip, p.option("activation"), channels=channels
        )
        if how is not None:
            return _one_pass_us(p, how, groups, m, rate), ("one pass",)
    if p.family == "unequal_linear" and ours and p.dtype == "float32":
        return _unequal_us(p, products, groups), ()
    tiles, at_once = OURS if ours else LIBRARY, 1 if alone else groups
    us = sum(  # ours split the sums over tokens
        tiled_us(*sizes, size, rate, tiles, at_once, alone or (ours and sizes[1] == m), every)
        for sizes in products
    )
    return us * (groups if alone else 1), ()


def _unequal_us(p: Problem, products: tuple[tuple[int, int, int], ...], groups: int) -> float:
    """Launches that each choose their tiles and parts by this time."""
    modes = {
        "forward": (unequal.FORWARD,),
        "backward": (unequal.GRAD_INPUT, unequal.GRAD_WEIGHT),
        STEP: (unequal.FORWARD, unequal.GRAD_INPUT, unequal.GRAD_WEIGHT),
    }[p.piece]
    us = 0.0
    for mode, (rows, depth, columns) in zip(modes, products, strict=True):
        sizes = ((rows, columns, depth),) * groups
        derived = mode != unequal.FORWARD and p.option("activation") != "none"
        chip = units(), mode, derived
        us += unequal.single_time(unequal.single_choice_of(sizes, *chip), sizes, *chip)
    return us


def _strided(p: Problem) -> tuple[str, ...]:
    """What does not lie densely, with the order of x: it says how far apart numbers lie."""
    return tuple(f"{flag} in {p.option('order')}" for flag in flags_of(p, "x", "w"))


def _launched(c: config.ProductConfig) -> tuple[Launched, tuple[str, ...]]:
    how = "summed" if c.block_n == 1 else "streaming" if c.block_k else "resident"
    way = (f"tile:{c.block_m}x{c.block_n}", how)
    return (c.block_m, c.block_n, 1), way


def _one_pass_us(p: Problem, how: config.BackwardConfig, groups: int, m: int, rate: float) -> float:
    """Programs that walk tiles of tokens, each with dx and its part of dW."""
    k, n = max(1, p.dim("K")), max(1, p.dim("N"))
    walk = config.Walk.quickest(ceil(m / how.block_m), groups, how.programs, how.shared)
    tile = 4 * how.block_m * config.padded(k) * config.padded(n) / (rate * _ONE_PASS_SHARE)
    waves = ceil(walk.programs / how.programs)
    at_once = max(1.0, min(walk.programs, how.programs) / units())
    walked = waves * at_once * walk.each * tile + waves * walk.each * _TILE_US
    moved = bytes_us(p, groups * (2 * m * k + m * n + 2 * k * n))
    return float((walked**2 + moved**2) ** 0.5)


def _device(p: Problem, backend: str) -> tuple[Work, ...]:
    """Its part of the device; groups are taken to have the mean size."""
    groups, k, n, m = (max(1, p.dim(name)) for name in ("G", "K", "N", "M"))
    filled = groups if p.family == NAME else min(groups, m)  # the others have no rows
    each = m if p.family == NAME else max(1, m // filled)
    alone, size = _alone(p, backend), FLOAT_DTYPES[p.dtype].itemsize
    us, way = _products_us(p, backend, filled, each)
    every = filled * each * n
    sizes = {"m": each, "k": k, "n": n, "groups": filled, "mn": every, "mkn": every * k}
    channels = dict(p.options).get("order") == "channels"
    if channels:
        sizes["length"] = p.dim("L")
    options = [name for name in ("order", "x", "w", "rows") if name in dict(p.options)]
    name = f"{p.family} {backend}" + ("" if p.family != NAME else f" {p.piece}")
    if p.family == NAME and backend not in _LIBRARY:
        return (*_ours(p, name, us, way), *_outputs(p, name))
    layouts = (*flags_of(p, *options), *rows_at(p, k), *rows_at(p, n), *way, *_strided(p))
    more = (*flags_of(p, "bias"), *(rows_at(p, p.dim("L")) if channels else ()))
    inner = (k, p.dim("L")) if channels else (k, n)
    rows = of_rows(size, inner, triton=backend in _TRITON)
    ways = (*rows, ("channels", channels), ("m=1", each == 1), ("n=1", n == 1))
    variants = tuple(name for name, holds in ways if holds)
    step = (STEP,) if p.piece == STEP else ()  # of one kernel with the forward
    activation = p.option("activation")
    sweep = Work(
        f"{name} pass",
        bytes_us(p, 2 * every),
        {"numbers": every, "n": n},
        (*layouts, *more),
        (activation, *step),
    )
    return (
        call(name, 1.0, activation, *layouts, *more, *step),
        *((call(f"{name} group", filled),) if alone or backend == "together" else ()),
        Work(f"{name} product", us, sizes, layouts, (*variants, *step)),
        sweep,
        *_copies(p, name),
        *(_zeros(p, name) if p.family == "ragged_linear" else ()),
    )


def _ours(p: Problem, name: str, us: float, way: tuple[str, ...]) -> tuple[Work, ...]:
    """Products of a kernel of ours, and the loads of its tiles: how numbers lie tells in these.

    Args:
        us: of the products.
        way: what is known of the launch: its tile, and how it goes through them.
    """
    groups, m, k, n = (max(1, p.dim(size)) for size in ("G", "M", "K", "N"))
    rows, columns = _tile_of(way)
    tiles = ceil(groups * ceil(m / rows) * ceil(n / columns) / units()) * units()  # whole waves
    order, row = p.option("order"), p.dim("L") if p.option("order") == "channels" else k
    x, w = tiles * min(rows, m) * k, tiles * min(columns, n) * k
    sizes = {"m": m, "k": k, "n": n, "groups": groups, "mn": groups * m * n}
    sizes["mkn"] = groups * m * k * n
    ones = tuple(name for name, size in (("m=1", m), ("n=1", n)) if size == 1)
    wide = n if flags_of(p, "w") else k  # numbers of a weight that lie side by side
    x_sizes, w_sizes = {"numbers": x, "n": n, "k": k}, {"numbers": w, "m": m, "k": k}
    how = way[-1:]
    return (
        Work(f"{name} product", us, sizes, way, ones),
        Work(f"{name} x", bytes_us(p, x), x_sizes, how, _lies(p, f"x in {order}", "x", row, how)),
        Work(f"{name} w", bytes_us(p, w), w_sizes, how, _lies(p, "w", "w", wide, how)),
    )


def _outputs(p: Problem, name: str) -> tuple[Work, ...]:
    groups, m, n = (max(1, p.dim(size)) for size in ("G", "M", "N"))
    order, activation, numbers = p.option("order"), p.option("activation"), groups * m * n
    row = p.dim("L") if order == "channels" else n
    flags = (f"order={order}", *rows_at(p, row), *flags_of(p, "bias"))
    sweep = Work(
        f"{name} pass", bytes_us(p, numbers), {"numbers": numbers, "n": n}, flags, (activation,)
    )
    return call(name, 1.0, activation), sweep


def _tile_of(way: tuple[str, ...]) -> tuple[int, int]:
    """Rows and columns of a launch's tile, or usual ones."""
    tile = next((flag.removeprefix("tile:") for flag in way if flag.startswith("tile:")), "64x64")
    rows, columns = map(int, tile.split("x"))
    return rows, columns


def _lies(p: Problem, what: str, option: str, row: int, how: tuple[str, ...]) -> tuple[str, ...]:
    """How an operand lies, as variants: far apart, and in rows of so many numbers."""
    size = FLOAT_DTYPES[p.dtype].itemsize
    narrow = (name for name, holds in of_rows(size, (row,), triton=True) if holds)
    return tuple(" ".join((*how, what, flag)) for flag in (*flags_of(p, option), *narrow))


def _copies(p: Problem, name: str) -> tuple[Work, ...]:
    """Of operands that PyTorch's products do not take as they lie."""
    if p.family != NAME or (p.option("order") != "channels" and not flags_of(p, "x")):
        return ()
    groups, m, k, n = (max(1, p.dim(size)) for size in ("G", "M", "K", "N"))
    numbers = groups * m * (k + n * (p.option("order") == "channels"))
    sizes = {"numbers": numbers, "n": p.dim("L") if p.option("order") == "channels" else k}
    flags = tuple(f"{flag} in {p.option('order')}" for flag in flags_of(p, "x"))
    return (Work(f"{name} copies", bytes_us(p, 2 * numbers), sizes, flags),)
