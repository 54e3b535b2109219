"""What each backend of gated_mlp does in a call on a CPU, for its price."""

from __future__ import annotations

from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import of_pieces
from fastlinear.dispatch.work import Work, flags_of, host, passed, product
from fastlinear.families.gated.problem import NAME, PIECES, STEP, has_down
from fastlinear.fastpath.autograd_node import node_work

_PRODUCTS = {
    "eager": "torch",
    "cpp": "torch",
    "onednn": "onednn",
    "gemm_cpp": "gemm_cpp",
    "half_cpp": "half_cpp",
}


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in the forward, the backward or a training step; None where
    nobody tells it."""
    if backend not in (*_PRODUCTS, "pieces"):
        return None
    if p.piece != STEP:
        return (host(f"{NAME} {backend} {p.piece}"), *inner(p, backend))
    if backend != "eager":
        return of_pieces(p, node_work(NAME))
    both = (w for piece in PIECES for w in inner(p.with_piece(piece), "eager"))
    name = f"{NAME} autograd"
    more = passed(name, p.dim("M"), p.dim("H"), p.option("activation"))
    return (host(name), *more, *both)


def inner(p: Problem, backend: str) -> tuple[Work, ...]:
    """The same without the call."""
    m, k, h = (max(1, p.dim(name)) for name in ("M", "K", "H"))
    n = p.dim("N") if has_down(p) else 0
    library, dtype = _PRODUCTS[backend], p.dtype
    x = "t" if p.option("x") == "strided" else "n"
    dense = p.option("w") == "dense"
    w, back = ("t", "n") if dense else ("n", "t")
    stacked = p.option("order") != "apart"
    rows, times = (2 * h, 1) if stacked else (h, 2)
    activation, flags = p.option("activation"), flags_of(p, "bias", "order")
    first = times * product(library, m, k, rows, dtype, x + w)
    if p.piece == "forward":
        kept = ("kept",) if p.needs_grad and p.option("recompute") == "no" else ()
        apart = p.option("order") == "interleaved" or (stacked and not dense)
        if backend == "onednn" and apart and not p.needs_grad:  # rows of each half lie apart
            first += passed("onednn halves", 2 * h, k, "none", f"w:{w}")
        gate = passed(f"{backend} gate", m, h, activation, *flags, *kept)
        return (*first, *gate, *(product(library, m, h, n, dtype, "n" + w) if n else ()))
    found = [*(first if p.option("recompute") == "yes" else ())]
    if n:
        found += product(library, m, n, h, dtype, "n" + back)
        found += product(library, n, m, h, dtype, "tn")
    found += passed(f"{backend} gate derivative", m, h, activation, *flags)
    found += times * product(library, rows, m, k, dtype, "t" + ("n" if x == "n" else "t"))
    found += times * product(library, m, rows, k, dtype, "n" + back)
    if p.option("bias") == "yes" and n:
        found += passed("torch derivative", m, n, "none", "bias")
    return tuple(found)
