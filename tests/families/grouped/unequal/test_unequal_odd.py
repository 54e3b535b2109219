"""unequal_linear where tensors or threads do what they rarely do."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.errors import InputError
from tests.families.unserved import unserved


def drawn(grad: bool = True, groups: int = 3) -> tuple[list[Tensor], list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    xs = [torch.randn(4 + g, 8, generator=generator) for g in range(groups)]
    ws = [torch.randn(5, 8, generator=generator).requires_grad_(grad) for _ in range(groups)]
    return xs, ws


def test_results_may_be_changed_in_place() -> None:
    """Each as if it were alone, from the first call on."""
    xs, ws = drawn()
    for _ in range(4):
        first, second, _ = fl.unequal_linear(xs, ws)
        first.add_(1)
        (grad,) = torch.autograd.grad((second * second).sum(), ws[1])
        expected = 2 * (xs[1] @ ws[1].t()).detach().t() @ xs[1]
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-4)


def test_second_derivatives_where_a_group_has_no_gradients() -> None:
    xs, ws = drawn(grad=False)
    ws[1].requires_grad_()
    for _ in range(4):
        y = fl.unequal_linear(xs, ws, activation="silu")[1]
        (once,) = torch.autograd.grad(y.sum(), ws[1], create_graph=True)
        (found,) = torch.autograd.grad(once.square().sum(), ws[1])
        y = torch.nn.functional.silu(xs[1] @ ws[1].t())
        (once,) = torch.autograd.grad(y.sum(), ws[1], create_graph=True)
        (expected,) = torch.autograd.grad(once.square().sum(), ws[1])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(unserved(torch.float32) is not None, reason="PyTorch's own ops, own errors")
def test_other_data_behind_the_forward_is_refused() -> None:
    """``.data`` tells nobody; no kernel may read beyond what is there."""
    for _ in range(4):
        xs, ws = drawn()
        ys = fl.unequal_linear(xs, ws, activation="silu", backend="together")
        xs[0].data = torch.randn(400, 8)
        with pytest.raises(InputError, match="shapes they had in the forward"):
            torch.autograd.grad(ys[0].sum(), ws[0])


def test_tapes_are_forgotten_under_other_threads() -> None:
    """More sets of gradients than are kept, while another thread runs one of them."""
    xs, ws = drawn(groups=8)
    leaves = [*ws, *(x.requires_grad_() for x in xs)]
    done = threading.Event()

    def step(wanted: list[Tensor]) -> None:
        ys = fl.unequal_linear(xs, ws, activation="silu")
        torch.autograd.grad(ys, wanted, [torch.ones_like(y) for y in ys])

    def churn() -> None:
        for bits in itertools.islice(itertools.cycle(range(1, 1 << 12)), 1500):
            step([t for i, t in enumerate(leaves) if bits >> i & 1])
        done.set()

    other = threading.Thread(target=churn)
    other.start()
    while not done.wait(0):
        step(leaves)
    other.join()
