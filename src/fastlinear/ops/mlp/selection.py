"""From a call's tensors to its Problem, and from there to the backend of each piece."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from fastlinear.core.precision import DTYPE_NAMES, matmul_precision
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import Choice, select
from fastlinear.ops.linear_act.backends import x_layout_of
from fastlinear.ops.mlp import backends


def choices(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    backend: str | None,
    fast: bool,
    needs_grad: bool,
) -> tuple[Choice, ...]:
    """The selection for the forward and, with ``needs_grad``, for the backward.

    A forced backend holds for the backward as well where it has one that can serve.
    """
    p = problem_of(x, weights, biases, activation, final_activation, fast, needs_grad)
    # Facts of a device are read from the current one.
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        forward = select(p, backend)
        if not needs_grad:
            return (forward,)
        return forward, backward_choice(p.with_piece("backward"), backend)


def backward_choice(p: Problem, backend: str | None = None) -> Choice:
    """The backend of a backward Problem; ``backend`` where it can serve."""
    candidates = family(p.family).candidates("backward")
    able = [b.name for b in candidates if b.name == backend and b.reason_not(p) is None]
    return select(p, able[0] if able else None)


def problem_of(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    activation: str,
    final_activation: str,
    fast: bool,
    needs_grad: bool,
) -> Problem:
    """The forward Problem of a call; the arguments are valid."""
    m, k = x.shape[:-1].numel(), x.shape[-1]
    rows = x.detach().reshape(m, k) if x.numel() else x.new_empty(m, k)
    given = sum(b is not None for b in biases)
    return backends.problem(
        "forward",
        m,
        (k, *(w.shape[0] for w in weights)),
        dtype=DTYPE_NAMES[x.dtype],
        device=x.device.type,
        activation=activation,
        final_activation=final_activation,
        bias="no" if given == 0 else "yes" if given == len(biases) else "some",
        needs_grad=needs_grad,
        x_layout=x_layout_of(rows),
        w_layout="nk" if all(w.is_contiguous() for w in weights) else "mixed",
        fast=fast,
        precision=matmul_precision(x.dtype),
    )
