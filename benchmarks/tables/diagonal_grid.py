"""The calls of diagonal_linear that a shipped table is made of, most important first."""

from __future__ import annotations

from itertools import product

from fastlinear.core.problem import Problem
from fastlinear.dispatch.steps import tuning_order
from fastlinear.families.diagonal.problem import problem

_DTYPES = ("bfloat16", "float32")
_TOKENS = (64, 4096, 1, 32768, 1024, 16)
_WIDTHS = (1024, 128, 8192, 512, 4096, 16)


def diagonal_problems(device: str = "cuda") -> list[Problem]:
    """Inference, then every piece of a training step, on a GPU outside a CUDA graph and inside.

    Other activations and layers without a bias are looked up under these.
    """
    found: list[Problem] = []
    for grad in (False, True):
        for m, k, dtype in product(_TOKENS, _WIDTHS, _DTYPES):
            call = problem("forward", m, k, dtype=dtype, device=device, needs_grad=grad)
            pieces = tuning_order(call)
            found += pieces
            found += [p for p in (q.other_regime() for q in pieces) if p is not None]
    return found
