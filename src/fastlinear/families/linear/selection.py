"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice, select
from fastlinear.families.linear import padded_problem
from fastlinear.families.linear import problem as posed
from fastlinear.families.linear.cuda import planes
from fastlinear.families.linear.triton.config import whole_backward_may_pay


def choices_of(p: Problem, backend: str | None = None) -> tuple[Choice, ...]:
    """The selection for the forward and, where it needs gradients, for each piece of the backward.

    A training call without a forced backend asks first whether the whole step is fastest by
    PyTorch's own autograd; then all its pieces are. That choice comes last in the result, unless
    all is PyTorch's own anyhow.
    """
    if not p.needs_grad:
        return (select(p, backend),)
    if backend is not None:
        return (select(p, backend), *select_backward(p))
    pieces = select_pieces(p)
    step = select(p.with_piece(posed.STEP))
    if step.backend.name == "pieces":
        return (*pieces, step)
    if all(c.backend.name == "eager" for c in pieces):
        return pieces
    reason = f"PyTorch's own autograd was chosen for the whole step ({step.reason})"
    problems = (p.with_piece(piece) for piece in posed.PIECES)
    own = (replace(select(q, "eager"), source=step.source, reason=reason) for q in problems)
    return (*own, step)


def select_pieces(p: Problem) -> tuple[Choice, ...]:
    """The selection for each piece of a training call, the step as a whole left aside."""
    return (select(p.with_piece("forward")), *select_backward(p))


def select_backward(p: Problem, *, ready: bool = True) -> tuple[Choice, ...]:
    """The same for the backward alone; ``ready`` as for ``select``.

    It is one choice where one backend computes all of it fastest; its pieces are PyTorch's own
    where PyTorch's sequence of them is. What was measured of the pieces comes before a prediction.
    """
    whole = select(p.with_piece(posed.WHOLE_BACKWARD), ready=ready)
    one = whole.backend.name not in ("pieces", "eager")
    if one and whole.source == "tuned":
        return (whole,)
    chosen = tuple(select(p.with_piece(piece), ready=ready) for piece in posed.BACKWARD_PIECES)
    if one and any(c.source != "tuned" for c in chosen):
        return (whole,)
    if one or whole.backend.name == "pieces" or whole.source == "predicted":
        return chosen  # pieces of PyTorch's own are among what is predicted of each
    reason = f"PyTorch's own ops were chosen for the whole backward ({whole.reason})"
    own = (replace(select(c.problem, "eager"), source=whole.source, reason=reason) for c in chosen)
    return tuple(own)


def tuning_order(p: Problem) -> tuple[Problem, ...]:
    """All Problems that decide about a forward Problem, in the order in which to tune them."""
    if not p.needs_grad:
        return (p,)
    whole = (posed.WHOLE_BACKWARD,) if whole_is_measured(p) else ()
    plain = p.option("activation") == "none" and p.option("bias") == "no"
    pieces = [q for q in posed.PIECES if not (plain and q == "grad_pre")]  # dpre is dy itself
    return tuple(p.with_piece(piece) for piece in (*pieces, *whole, posed.STEP))


def whole_is_measured(p: Problem) -> bool:
    """Whether tuning looks at the whole backward as one choice: on a GPU, of small or odd layers
    and where planes serve."""
    if p.device != "cuda":
        return False
    m, k, n = (p.dim(name) for name in ("M", "K", "N"))
    small_or_odd = whole_backward_may_pay(m, k, n) or padded_problem.reason_not(p) is None
    return small_or_odd or planes.reason_not(p) is None


def problem_of(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str,
    needs_grad: bool,
    captured: bool = False,
) -> Problem:
    """The forward Problem of a call; ``captured``: recorded into a CUDA graph."""
    n, k = weight.shape
    m = x.shape[:-1].numel()
    return posed.problem(
        "forward",
        m,
        k,
        n,
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        bias=bias is not None,
        needs_grad=needs_grad,
        x_layout=_x_layout(x, m, k),
        w_layout=_w_layout(weight),
        precision=matmul_precision(x.dtype),
        captured=captured,
    )


def _x_layout(x: Tensor, m: int, k: int) -> str:
    """How x's (M, K) view lies in memory, in the words of ``problem``."""
    return posed.x_layout_of(x.detach().reshape(m, k) if x.numel() else x.new_empty(m, k))


def _w_layout(weight: Tensor) -> str:
    if weight.is_contiguous():
        return "nk"
    return "kn" if weight.t().is_contiguous() else "strided"
