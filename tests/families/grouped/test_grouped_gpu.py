"""On a GPU: one kernel whatever the layout, CUDA graphs, autocast, and many repetitions."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from benchmarks.harness.kernels import kernels_of
from fastlinear.core.compare import judge
from fastlinear.families.grouped import reference

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

SHAPES = {
    "... (g k)": (64, 2000),
    "... g k": (4, 16, 20, 100),
    "g ... k": (20, 64, 100),
    "b (g k) ...": (4, 2000, 48),
    "b g k ...": (4, 20, 100, 48),
}


def drawn(layout: str, dtype: torch.dtype, grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    x = torch.randn(SHAPES[layout], device="cuda").to(dtype)
    weight = (torch.randn(20, 100, 100, device="cuda") / 10).to(dtype)
    bias = torch.randn(20, 100, device="cuda").to(dtype)
    for t in (x, weight, bias):
        t.requires_grad_(grad)
    return x, weight, bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", SHAPES)
def test_a_forward_is_one_kernel(layout: str, dtype: torch.dtype) -> None:
    given = drawn(layout, dtype)

    def run() -> Tensor:
        return fl.grouped_linear(*given, activation="gelu", layout=layout, backend="triton")

    with torch.no_grad():
        names = kernels_of(run, torch.device("cuda"))
    assert len(names) == 1, names
    assert "_kernel" in names[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("layout", SHAPES)
def test_gradients(layout: str, dtype: torch.dtype) -> None:
    for activation in ("none", "silu"):
        given = drawn(layout, dtype, True)
        exact = [t.detach().double().requires_grad_() for t in given]
        y = fl.grouped_linear(*given, activation=activation, layout=layout, backend="triton")
        dy = torch.randn_like(y)
        theirs = reference.grouped_linear(*given, activation, layout)
        oracle = reference.grouped_linear(*exact, activation, layout)
        found = (y, *torch.autograd.grad(y, given, dy))
        of_torch = (theirs, *torch.autograd.grad(theirs, given, dy))
        of_oracle = (oracle, *torch.autograd.grad(oracle, exact, dy.double()))
        for name, a, t, o in zip(("y", "dx", "dW", "db"), found, of_torch, of_oracle, strict=True):
            verdict = judge(name, a, t, o)
            assert verdict.passed, f"{activation} {verdict}"


def test_cuda_graph_of_a_training_step() -> None:
    x, weight, bias = drawn("... (g k)", torch.bfloat16, True)

    def step() -> tuple[Tensor, ...]:
        y = fl.grouped_linear(x, weight, bias, activation="relu", backend="triton")
        # a result that keeps its graph would tie the leaves to this stream
        return (y.detach(), *torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y)))

    expected = step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = step()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, e) for a, e in zip(recorded, expected, strict=True))


def test_many_runs_are_the_same_bit_for_bit() -> None:
    given = drawn("... (g k)", torch.bfloat16, True)
    dy = torch.randn(64, 2000, device="cuda", dtype=torch.bfloat16)

    def step() -> tuple[Tensor, ...]:
        y = fl.grouped_linear(*given, activation="tanh", backend="triton")
        return (y, *torch.autograd.grad(y, given, dy))

    first = step()
    for _ in range(500):
        again = step()
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))


def test_chosen_by_default_and_under_autocast() -> None:
    x, weight, bias = drawn("... (g k)", torch.float32)
    told = fl.explain(x, weight, bias, needs_grad=False)
    assert told.choices[0].backend.name == "triton"
    with torch.autocast("cuda", torch.bfloat16):
        y = fl.grouped_linear(x, weight, bias, activation="relu")
    expected = reference.grouped_linear(x, weight, bias, "relu", "... (g k)")
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y.float(), expected, rtol=2e-2, atol=5e-2)
