"""Backend ``cuda`` of ragged_linear: bfloat16 and float16 on Hopper, by ``product.cu``.

A launch finds where groups lie, one more multiplies all groups. A backward multiplies twice. What
lies behind an activation, and the gradient of the bias, are Triton's passes, where there are any.
"""

from __future__ import annotations

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import why_no_gpu, why_no_hopper
from fastlinear.families.grouped.problem import STEP
from fastlinear.families.grouped.ragged.cuda.product import depth_product, rows_product
from fastlinear.families.grouped.ragged.layout import with_rows
from fastlinear.kernels.cuda.hopper import HALF_DTYPES
from fastlinear.kernels.cuda.ragged import Ragged, ragged

_MOST = 1 << 30  # of each size: coordinates of tiles are 32-bit
_MOST_GROUPS = 65535  # that db's launch serves


def reason_not(p: Problem) -> str | None:
    """Why this backend cannot serve a Problem, or None."""
    if (why := why_no_hopper(p)) is not None:
        return why
    if p.dtype not in HALF_DTYPES.values():
        return "for bfloat16 and float16 only"
    return _why_not_sizes(p) or (why_no_gpu(p, "triton") if p.piece == STEP else None)


def _why_not_sizes(p: Problem) -> str | None:
    m, k, n, groups = map(p.dim, "MKNG")
    if min(m, k, n, groups) < 1:
        return "an empty dimension"
    if max(m, k, n) >= _MOST:
        return "sizes must stay below 2^30"
    if k % 8 or n % 8:
        return f"K and N must be multiples of 8, not {k} and {n}"
    return f"serves at most {_MOST_GROUPS} groups" if groups > _MOST_GROUPS else None


def _groups(sizes: Tensor, x: Tensor, ordered: bool = False) -> Ragged:
    return ragged(sizes.contiguous(), x.shape[0], ordered)


def forward(
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    bias: Tensor | None,
    activation: str,
    save_pre: bool,
) -> tuple[Tensor, Tensor | None, None]:
    """(y, pre if asked, None), (T, N) each: x (T, K), weight (G, N, K), sizes (G,), bias (G, N)."""
    return *rows_product(x, weight, _groups(sizes, x), bias, activation, save_pre), None


def backward(
    dy: Tensor,
    saved: Tensor | None,
    x: Tensor,
    weight: Tensor,
    sizes: Tensor,
    activation: str,
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dx (T, K), dW (G, N, K), db (G, N)), each None where not needed; dy (T, N)."""
    for_dx, for_dw, for_db = needs
    dx = dw = db = None
    dpre = dy.resolve_neg() if saved is None else before_activation(dy, saved, activation)
    if for_db:
        db = bias_gradient(dpre, x, sizes)
    if for_dx or for_dw:
        groups = _groups(sizes, x, for_dw)
        if for_dx:
            dx = rows_product(dpre, weight.transpose(1, 2), groups)[0]
        if for_dw:
            dw = depth_product(dpre, x, groups)
    return dx, dw, db


def before_activation(dy: Tensor, saved: Tensor, activation: str) -> Tensor:
    """dy act'(saved) (T, N), in a pass of its own."""
    from fastlinear.families.linear.triton import backend as elementwise

    return elementwise.grad_pre(dy.resolve_neg(), saved, activation, False)[0]


def bias_gradient(dpre: Tensor, x: Tensor, sizes: Tensor) -> Tensor:
    """The groups' sums of dpre (T, N): db (G, N)."""
    from fastlinear.families.grouped.ragged.triton import backend as triton

    given = with_rows(dpre), None, with_rows(x), sizes.contiguous(), "none"
    db = triton.grad_weight(*given, need_weight=False, need_bias=True)[1]
    assert db is not None
    return db
