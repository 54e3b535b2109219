"""What each backend of linear_act does in a call on a CPU, for its price."""

from __future__ import annotations

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import select
from fastlinear.dispatch.work import Work, host, passed, product
from fastlinear.families.linear.problem import BACKWARD_PIECES, NAME, PIECES, STEP, WHOLE_BACKWARD
from fastlinear.fastpath.autograd_node import node_work

_PRODUCTS = {
    "eager": "torch",
    "cpp": "torch",
    "onednn": "onednn",
    "gemm_cpp": "gemm_cpp",
    "half_cpp": "half_cpp",
}
_PASSES = {**_PRODUCTS, "cpp": "cpp", "gemm_cpp": "cpp"}


def work(p: Problem, backend: str) -> tuple[Work, ...] | None:
    """A backend's work in a piece, a whole backward or a training step; None of backends
    that others registered."""
    if backend not in (*_PRODUCTS, "pieces"):
        return None
    if p.piece not in (STEP, WHOLE_BACKWARD):
        return (host(f"{NAME} {backend} {p.piece}"), *inner(p, backend))
    if p.piece == STEP and backend == "eager":
        each = (w for piece in PIECES for w in inner(p.with_piece(piece), "eager"))
        return (host(f"{NAME} autograd"), *each)
    found = [node_work(NAME)] if p.piece == STEP else []
    for piece in PIECES if p.piece == STEP else BACKWARD_PIECES:
        q = p.with_piece(piece)
        name = "eager" if backend == "eager" else select(q, ready=False).backend.name
        found += family(NAME).work_of(q, name) or ()
    return tuple(found)


def activated(p: Problem) -> tuple[Work, ...]:
    """PyTorch's pass over a layer's pre-activation, which is kept."""
    name = f"{_PASSES['eager']} epilogue"
    return passed(name, p.dim("M"), p.dim("N"), p.option("activation"), "kept")


def inner(p: Problem, backend: str) -> tuple[Work, ...]:
    """A backend's work in a piece without the call."""
    m, k, n = (max(1, p.dim(name)) for name in ("M", "K", "N"))
    x = "t" if p.option("x") == "strided" else "n"
    w = "t" if p.option("w") == "nk" else "n"
    library, activation, dtype = _PRODUCTS[backend], p.option("activation"), p.dtype
    passes = library if dtype == "bfloat16" else _PASSES[backend]
    bias = ("bias",) if p.option("bias") == "yes" else ()
    plain = activation == "none" and not bias
    if p.piece == "forward":
        made = product(library, m, k, n, dtype, x + w)
        if plain:
            return made
        kept = ("kept",) if p.needs_grad and activation != "none" else ()
        return (*made, *passed(f"{passes} epilogue", m, n, activation, *bias, *kept))
    if p.piece == "grad_pre":
        name = f"{_PASSES[backend]} derivative"
        return () if plain else passed(name, m, n, activation, *bias)
    if p.piece == "grad_input":
        return product(library, m, n, k, dtype, "n" + ("n" if w == "t" else "t"))
    return product(library, n, m, k, dtype, "t" + ("n" if x == "n" else "t"))
