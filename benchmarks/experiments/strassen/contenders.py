"""The contenders of the experiment: those of ``overhead``, the Strassen chain and its control.

``fastlinear[strassen]`` is the fused Strassen chain. ``strassen_control`` has the same tiling,
passes and batched product, with the 8 classical products. Committed rows have the same names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.contenders import mlp as chains
from benchmarks.experiments.strassen import chain
from benchmarks.experiments.strassen.scheme import error_growth
from benchmarks.harness.case import Case
from benchmarks.harness.peer import Peer, forward_only
from benchmarks.harness.work import Stack, Work
from fastlinear.core.precision import FLOAT_DTYPES, matmul_precision

NAME, CONTROL = "fastlinear[strassen]", "strassen_control"


def peers(case: Case) -> tuple[Peer, ...]:
    """All contenders of a case, able to take part or not."""
    return (
        *chains.peers(case),
        Peer(CONTROL, lambda w: w.unit(_control), _no_control),
        Peer(
            NAME,
            lambda w: w.unit(_ours),
            _no_chain,
            error_growth=lambda w: float(error_growth(_levels(w))),
            saving=lambda w: (8 / 7) ** _levels(w),
        ),
    )


def _ours(stack: Stack) -> Tensor:
    names = stack.activation, stack.activation
    if torch.is_grad_enabled():
        return chain.mlp(stack.x, stack.weights, stack.biases, *names)
    return chain.forward(stack.x, stack.weights, stack.biases, *names, False)[0]


def _control(stack: Stack) -> Tensor:
    names = stack.activation, stack.activation
    return chain.forward_classical(stack.x, stack.weights, stack.biases, *names, False)[0]


def _levels(work: Work) -> int:
    """Levels of the scheme in a case; a chain that is asked for by name applies at least one."""
    case = work.case
    widths = (case.dim("H"),) * (case.dim("L") + 1)
    precision = matmul_precision(FLOAT_DTYPES[case.dtype])
    return max(1, chain.levels_for(case.dim("M"), widths, case.dtype, case.device, precision))


def _no_chain(case: Case) -> str | None:
    return chain.reason_not(chains.problem_of(case))


def _no_control(case: Case) -> str | None:
    return forward_only(case) or _no_chain(case)
