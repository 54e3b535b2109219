"""Launches that begin beside the kernel before them read nothing too early and overwrite nothing.

Kernels of PyTorch's and ours stand behind each other, on the same memory, in a stream and in a CUDA
graph; where one did not wait, results would be those of the step before.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.fastpath import autograd_node, lookup

pytestmark = pytest.mark.gpu
SIZES = ((1, 16), (64, 1024), (4096, 512), (32768, 160))


@pytest.fixture(autouse=True, scope="module")
def ready() -> None:
    """The compiled fast path and its nodes, which launch early."""
    lookup.wait(120)
    autograd_node.wait(180)


def exact(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return x * w + b


def forwards(run: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Each call reads what the one before it, or an op of PyTorch's, has just written."""
    found = []
    for i in range(6):
        x = run(x, w, b)
        if i % 2:
            x = x.neg().sub_(1.0)
            w = w + 0.25
        found.append(x)
    return found


def steps(run: Callable[..., Tensor], x: Tensor, w: Tensor, b: Tensor) -> list[Tensor]:
    """Gradients of one call are the next one's tensors."""
    found: list[Tensor] = []
    for _ in range(3):
        leaves = [t.detach().requires_grad_() for t in (x, w, b)]
        y = run(*leaves)
        dx, dw, db = torch.autograd.grad(y, leaves, y.detach())
        x, w, b = dx / 2, w + dw / dw.abs().max(), b + db / db.abs().max()
        found += [y.detach(), dx, dw, db]
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chain", [forwards, steps])
def test_in_a_stream(chain: Callable[..., list[Tensor]], size: tuple[int, int]) -> None:
    given = torch.randn(size, device="cuda"), torch.randn(size[1], device="cuda")
    b = torch.randn(size[1], device="cuda")
    expected = chain(exact, *given, b)
    for _ in range(20):
        found = chain(fl.diagonal_linear, *given, b)
        for f, e in zip(found, expected, strict=True):
            torch.testing.assert_close(f, e, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("chain", [forwards, steps])
def test_in_a_graph(chain: Callable[..., list[Tensor]], size: tuple[int, int]) -> None:
    x, w = torch.randn(size, device="cuda"), torch.randn(size[1], device="cuda")
    b = torch.randn(size[1], device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            chain(fl.diagonal_linear, x, w, b)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(fl.diagonal_linear, x, w, b)
    for _ in range(20):
        for t in (x, w, b):
            t.copy_(torch.randn_like(t))
        for f in found:
            f.fill_(float("nan"))
        graph.replay()
        for f, e in zip(found, chain(exact, x, w, b), strict=True):
            torch.testing.assert_close(f, e, rtol=1e-3, atol=1e-3)
