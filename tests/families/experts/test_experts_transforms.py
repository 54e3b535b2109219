"""experts under torch.func, forward mode, checkpoints, and gradients of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastlinear as fl
from tests.families.experts.expert_calls import drawn

CALL = drawn(7, 2, 3, 8, 4, dtype=torch.float64)
X, WEIGHT, *REST = (t for t in CALL.tensors if t is not None)


def run(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return fl.experts(x, CALL.index, weight, *rest)


def test_derivatives_of_both_orders() -> None:
    given = [t.clone().requires_grad_() for t in (X, WEIGHT, *REST)]
    assert torch.autograd.gradcheck(run, given)
    assert torch.autograd.gradgradcheck(run, given)


def test_transforms() -> None:
    x = X.clone().requires_grad_()
    (expected,) = torch.autograd.grad(run(x, WEIGHT, *REST).square().sum(), x)
    found = torch.func.grad(lambda x: run(x, WEIGHT, *REST).square().sum())(X)
    torch.testing.assert_close(found, expected)
    y, tangent = torch.func.jvp(lambda w: run(X, w, *REST), (WEIGHT,), (WEIGHT,))
    torch.testing.assert_close(tangent, y)  # linear in the routing weights
    both = torch.func.vmap(lambda w: run(X, w, *REST))(torch.stack([WEIGHT, 2 * WEIGHT]))
    torch.testing.assert_close(both, torch.stack([y, 2 * y]))


def test_checkpoints_run_it_again() -> None:
    """Also once calls of the kind are recorded."""
    given = [t.float().requires_grad_() for t in (X, WEIGHT, *REST)]
    dy = CALL.dy.float()
    expected = torch.autograd.grad(run(*given), given, dy)
    for _ in range(4):
        y = checkpoint(run, *given, use_reentrant=False)
        for a, b in zip(torch.autograd.grad(y, given, dy), expected, strict=True):
            torch.testing.assert_close(a, b)


def test_flop_counters_see_products() -> None:
    x = X.float().requires_grad_()
    with FlopCounterMode(display=False) as counted:
        run(x, WEIGHT.float(), *(t.float() for t in REST)).sum().backward()
    slots = int(((CALL.index >= 0) & (CALL.index < 3)).sum())
    forward = 2 * slots * (8 * 8 + 4 * 8)
    assert counted.get_total_flops() == 2 * forward
