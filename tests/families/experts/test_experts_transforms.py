"""experts under torch.func, forward mode, checkpoints, and gradients of gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import fastlinear as fl
from fastlinear.families.experts.op import _call
from fastlinear.op import library
from fastlinear.op.spec import leaves
from tests.families.experts.expert_calls import OPTIONS, drawn

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


def test_a_backward_of_another_way_finds_what_its_forward_kept() -> None:
    """A registered forward by PyTorch's own ops, and a backward by ours."""
    given = [t.float().requires_grad_() for t in (X, WEIGHT, *REST)]
    x, weight, gate_up, down, *biases = given
    call = _call(x, CALL.index, weight, gate_up, down, *biases, **{**OPTIONS, "backend": "cpp"})
    op = partial(library.call, "experts", *leaves(call), *call[3:8], True, "cpp")
    expected = torch.autograd.grad(op()[0], given, CALL.dy.float())
    with torch.autograd.forward_ad.dual_level():
        y = op()[0]
    for a, b in zip(torch.autograd.grad(y, given, CALL.dy.float()), expected, strict=True):
        torch.testing.assert_close(a, b)


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
