"""What each backend of gated_mlp does in a call on a GPU, for its price."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from fastlinear.core.problem import Problem
from fastlinear.dispatch.roofline import (
    OURS,
    Launched,
    bytes_us,
    capability,
    fused,
    hosts,
    on_device,
    swept,
    tiled,
    units,
)
from fastlinear.dispatch.select import select
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, call, flags_of
from fastlinear.families.gated.cuda import planes
from fastlinear.families.gated.cuda.config import config_for
from fastlinear.families.gated.problem import NAME, STEP, has_down
from fastlinear.families.gated.triton.config import product_config
from fastlinear.families.linear import gpu_work as linear
from fastlinear.families.linear.problem import problem as linear_act
from fastlinear.fastpath.autograd_node import node_work

_FUSED = ("triton", "cuda")
_PLANES = f"{linear.NAME} planes"
_KNOWN = ("eager", "elementwise", *_FUSED, "planes", "pieces")


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None of backends that
    others registered."""
    if backend not in _KNOWN:
        return None
    if p.piece == STEP:
        if backend == "pieces":
            return of_pieces(p, node_work(NAME))
        forward, backward = p.with_piece("forward"), p.with_piece("backward")
        more = swept(f"{NAME} eager gate", p, p.dim("M"), p.dim("H"), p.option("activation"))
        made = (*_forward(forward, "eager"), *more, *_backward(backward, "eager"))
    elif backend == "planes":
        made = _planes_forward(p) if p.piece == "forward" else _planes_backward(p)
    elif p.piece == "forward":
        made = _forward(p, backend)
    else:
        made = _backward(p, backend)
    return (*hosts(p, backend, made), *made)


def _forward(p: Problem, backend: str) -> tuple[Work, ...]:
    m, k, h, n = _sizes(p)
    x, w, _ = _layouts(p)
    activation = p.option("activation")
    kept = ("kept",) if p.needs_grad and p.option("recompute") == "no" else ()
    if backend in _FUSED:
        first = f"{NAME} {backend} first"
        flags = (*flags_of(p, "bias"), *(f"{order} {w}" for order in flags_of(p, "order")))
        copied = backend == "cuda" and x == "t"  # TMA reads rows
        found = linear.copies(p, linear.COPY, m * k, turned=True) if copied else ()
        layout = ("n" if copied else x) + w
        found += _product(first, p, m, k, 2 * h, layout, *flags, launched=_launched(p, backend))
        found += (fused(f"{NAME} {backend} gate", p, m, h, activation, *kept),)
        if n and backend == "cuda":
            return found + _product(f"{NAME} cuda", p, m, h, n, "n" + w)
        return found + (_layer(p, backend, "forward", m, h, n) if n else ())
    gate = f"{NAME} {backend} gate"
    flags = (*flags_of(p, "bias", "order"), *kept)
    found = _first(p, backend)
    found += swept(gate, p, m, h, activation, *flags, times=3, folded=_folded(p, backend))
    return found + (_layer(p, backend, "forward", m, h, n) if n else ())


def _backward(p: Problem, backend: str) -> tuple[Work, ...]:
    m, k, h, n = _sizes(p)
    _, w, _ = _layouts(p)
    activation = p.option("activation")
    found = _first(p, backend) if p.option("recompute") == "yes" else ()
    if n and backend in _FUSED:
        back, launched = "n" + ("n" if w == "t" else "t"), _launched(p, backend)
        found += _product(f"{NAME} {backend} back", p, m, n, h, back, launched=launched)
        found += (fused(f"{NAME} {backend} derivative", p, m, h, activation, times=5),)
    else:
        found += _layer(p, backend, "grad_input", m, h, n) if n else ()
        by = "elementwise" if backend in _FUSED else backend
        flags = flags_of(p, "bias", "order")
        name, folded = f"{NAME} {by} derivative", _folded(p, by)
        found += swept(name, p, m, h, activation, *flags, times=6, folded=folded)
    found += _layer(p, backend, "grad_weight", m, h, n) if n else ()
    rows, times = _stacked(p, h)
    dw = _layer(p, backend, "grad_weight", m, k, rows, x=p.option("x") == "strided")
    found += times * (dw + _layer(p, backend, "grad_input", m, k, rows))
    if p.option("bias") == "yes" and n:
        found += swept("linear_act eager derivative", p, m, n, "none", "bias")
    return found


def _folded(p: Problem, backend: str) -> bool:
    """Whether odd rows are read together: halves in turns, or in two tensors."""
    return backend == "elementwise" and p.option("order") in ("apart", "interleaved")


def _layer(
    p: Problem, backend: str, piece: str, m: int, k: int, n: int, *, x: bool = False
) -> tuple[Work, ...]:
    """A product without a gate: of ours what linear_act takes for it.

    Args:
        x: whether the layer's x lies along its columns.
    """
    weight = "nk" if p.option("w") == "dense" else "kn"
    q = linear_act(
        *(piece, m, k, n),
        dtype=p.dtype,
        device=p.device,
        bias=piece == "forward" and p.option("bias") == "yes" and backend != "eager",
        needs_grad=piece != "forward",
        x_layout="strided" if x else "rows",
        w_layout="nk" if piece == "grad_weight" else weight,
        precision=p.precision,
        captured=p.captured,
    )
    own = None if backend == "eager" else linear.work(q, select(q, ready=False).backend.name)
    return linear.inner(q, "eager") if own is None else on_device(own)  # or others' own backend


def _planes_parts(p: Problem) -> Iterator[tuple[int, tuple[str, ...]]]:
    """How many rows are worked on at once, and flags of what later ones are added to."""
    m, *wide = _sizes(p)
    for i, rows in enumerate(planes.row_parts(m, *wide)):
        yield rows.stop - rows.start, ("added",) if i else ()


def _planes_pre_activations(p: Problem, m: int) -> tuple[Work, ...]:
    """Of m rows, but for the split of the weights."""
    _, k, h, _ = _sizes(p)
    x, _, _ = _layouts(p)
    rows, times = _stacked(p, h)
    products = times * linear.product_of_planes(p, m, k, rows)
    return call(_PLANES, 1 + times), _split_x(p, m, k, x == "t"), *products


def _split_firsts(p: Problem) -> tuple[Work, ...]:
    _, k, h, _ = _sizes(p)
    _, w, _ = _layouts(p)
    rows, times = _stacked(p, h)
    return times * (linear.split(p, rows, k, w == "n", k),)


def _split_x(p: Problem, lines: int, depth: int, turned: bool) -> Work:
    return linear.split(p, lines, depth, turned, 1 if p.option("x") == "strided" else p.dim("K"))


def _planes_forward(p: Problem) -> tuple[Work, ...]:
    """Both operands of each product split, weights once, and h where it is derived."""
    _, _, h, n = _sizes(p)
    _, w, _ = _layouts(p)
    found = *_split_firsts(p), linear.split(p, n, h, w == "n", h)
    for m, _ in _planes_parts(p):
        derived = Work(
            *(f"{_PLANES} split", bytes_us(p, 3 * m * h), {"numbers": m * h}, ("derived",)),
            variants=(p.option("activation"),),
        )
        found += _planes_pre_activations(p, m)
        found += call(_PLANES, 2), derived, *linear.product_of_planes(p, m, h, n)
    return found


def _planes_backward(p: Problem) -> tuple[Work, ...]:
    """What is derived is read once and split in five ways; x in one, dy in two, weights once for
    all rows."""
    _, k, h, n = _sizes(p)
    x, w, _ = _layouts(p)
    again = p.option("recompute") == "yes"
    sums = 3 if p.option("bias") == "yes" else 0
    weights = 2 * (linear.split(p, k, h, w == "t", k),)
    found = linear.split(p, h, n, w == "t", h), *weights, *(_split_firsts(p) if again else ())
    product = partial(linear.product_of_planes, p)
    for m, added in _planes_parts(p):
        dy = Work(f"{_PLANES} split both ways", bytes_us(p, 3 * m * n), {"numbers": m * n})
        derived = Work(
            *(f"{_PLANES} split both ways", bytes_us(p, 8 * m * h), {"numbers": 2 * m * h}),
            ("derived",),
            variants=(p.option("activation"),),
        )
        found += _planes_pre_activations(p, m) if again else ()
        x_turned = _split_x(p, k, m, x == "n")  # along its columns
        found += call(_PLANES, 8 + sums), dy, x_turned, derived
        found += *product(m, n, h), *product(n, m, h, *added), *2 * product(h, m, k, *added)
        found += *product(m, h, k), *product(m, h, k, "added")
    return found


def _first(p: Problem, backend: str) -> tuple[Work, ...]:
    m, k, h, _ = _sizes(p)
    rows, times = _stacked(p, h)
    return times * _layer(p, backend, "forward", m, k, rows, x=p.option("x") == "strided")


def _launched(p: Problem, backend: str) -> Launched:
    """The tile of the product that a fused kernel has: in the forward, of gate and up together."""
    m, _, h, _ = _sizes(p)
    if backend == "cuda":
        tile = config_for(p.piece, m, h)
        return tile.bm, tile.bn, 1
    c = product_config(p.piece, m, h, units(), capability())
    return c.block_m, c.block_n * (2 if p.piece == "forward" else 1), 1


def _product(
    kind: str,
    p: Problem,
    m: int,
    k: int,
    n: int,
    layout: str,
    *flags: str,
    launched: Launched | None = None,
) -> tuple[Work, ...]:
    triton = " triton " in kind
    return tiled(kind, p, m, k, n, layout, *flags, tiles=OURS, triton=triton, launched=launched)


def _stacked(p: Problem, h: int) -> tuple[int, int]:
    """(features of a product with gate and up, how many such products)."""
    return (2 * h, 1) if p.option("order") != "apart" else (h, 2)


def _sizes(p: Problem) -> tuple[int, int, int, int]:
    m, k, h = (max(1, p.dim(name)) for name in ("M", "K", "H"))
    return m, k, h, p.dim("N") if has_down(p) else 0


def _layouts(p: Problem) -> tuple[str, str, str]:
    """How x lies, and a weight in the forward and turned."""
    x = "t" if p.option("x") == "strided" else "n"
    return (x, "t", "n") if p.option("w") == "dense" else (x, "n", "t")
