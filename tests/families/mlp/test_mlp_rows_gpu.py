"""Backend ``rows_cuda`` on a Hopper GPU, through the public function, against float64."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cuda import rows, rows_backend
from fastlinear.families.mlp.cuda.rows import Rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
]
BF16, FP16 = torch.bfloat16, torch.float16


class Chain:
    """Tensors of a chain; a float64 copy and PyTorch's own results beside them."""

    def __init__(self, m: int, widths: tuple[int, ...], dtype: torch.dtype, apart: int = 0) -> None:
        draw = torch.Generator("cuda").manual_seed(m)

        def values(*shape: int, scale: float = 1.0) -> Tensor:
            return (torch.randn(shape, generator=draw, device="cuda") * scale).to(dtype)

        self.x = values(m, widths[0] + apart)[:, : widths[0]]
        self.weights = [values(n, k, scale=(2 / k) ** 0.5) for k, n in pairwise(widths)]
        self.biases = [None if i == 1 else values(n) for i, n in enumerate(widths[1:])]
        self.dy = values(m, widths[-1])

    def results(self, run: Any, dtype: torch.dtype | None = None) -> list[Tensor]:
        """y and all gradients."""
        lists = [self.x], self.weights, self.biases
        own = [
            [None if t is None else t.detach().to(dtype or t.dtype).requires_grad_() for t in ts]
            for ts in lists
        ]
        (x,), weights, biases = own
        y = run(x, weights, biases)
        given = [t for ts in own for t in ts if t is not None]
        return [y, *torch.autograd.grad(y, given, self.dy.to(y.dtype))]

    def check(self, names: tuple[str, str], run: Any) -> None:
        def eager(x: Tensor, weights: Any, biases: Any) -> Tensor:
            return reference.mlp(x, weights, biases, *names)

        found = self.results(run), self.results(eager), self.results(eager, torch.float64)
        for i, (ours, theirs, oracle) in enumerate(zip(*found, strict=True)):
            verdict = judge(f"result {i}", ours, theirs, oracle)
            assert verdict.passed, str(verdict)


def forced(names: tuple[str, str]) -> Any:
    return lambda x, w, b: fl.mlp(
        x, w, b, activation=names[0], final_activation=names[1], backend="rows_cuda"
    )


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize("m", [1, 63, 64, 257, 4096, 70001])
@pytest.mark.parametrize(
    "widths",
    [
        (63, 256, 256, 256, 4),
        (415, 512, 512, 256, 1),
        (32, 64, 64, 16),
        (3, 128, 100, 1),
        (8, 8, 8),
    ],
    ids=str,
)
def test_every_number_of_a_chain(widths: tuple[int, ...], m: int, dtype: torch.dtype) -> None:
    # Of a row alone, one unit whose sign rounding turns would be a large part of the gradients
    names = "relu" if m > 1000 else "silu", "none"
    Chain(m, widths, dtype).check(names, forced(names))


@pytest.mark.parametrize("name", NAMES)
def test_every_activation(name: str) -> None:
    Chain(1000, (40, 72, 33, 24), BF16, apart=3).check((name, name), forced((name, name)))


@pytest.mark.parametrize("consumers", [1, 2, 3, 4])
@pytest.mark.parametrize("stages", [2, 5])
def test_every_configuration(consumers: int, stages: int) -> None:
    widths, names = (100, 64, 128, 72, 9), ("gelu", "none")
    if consumers == 4:
        widths = (100, 64, 60, 64, 9)
    config = Rows(consumers, stages)
    if (reason := config.invalid(widths, False, True)) is not None:
        pytest.skip(reason)
    chain = Chain(5000, widths, BF16)
    given = chain.x, tuple(chain.weights), tuple(chain.biases)
    wanted = True, (True,) * 4, tuple(b is not None for b in chain.biases)
    y, saved = rows_backend.forward(*given, *names, True)
    grads = rows_backend.backward(chain.dy, *given[:2], saved, *names, wanted)
    for _ in range(3):
        again, kept = rows_backend.forward(*given, *names, True, config=config)
        assert torch.equal(again, y)
        assert all(map(torch.equal, kept, saved))
        found = rows_backend.backward(chain.dy, *given[:2], saved, *names, wanted, config=config)
        assert found[0] is not None
        assert grads[0] is not None
        assert torch.equal(found[0], grads[0])
        for ours, theirs in zip([*found[1], *found[2]], [*grads[1], *grads[2]], strict=True):
            assert (ours is None) == (theirs is None)
            assert ours is None or theirs is None or torch.equal(ours, theirs)


def test_a_graph_and_a_thousand_launches_give_the_same_bits() -> None:
    chain = Chain(3000, (63, 256, 256, 4), BF16)
    run = forced(("relu", "none"))
    first = chain.results(run)
    for _ in range(1000):
        y = run(chain.x, chain.weights, chain.biases)
    assert torch.equal(y, first[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = chain.results(run)
    graph.replay()
    assert all(map(torch.equal, recorded, first))


def test_what_was_kept_may_begin_anywhere() -> None:
    chain, names = Chain(200, (40, 64, 32, 8), BF16), ("relu", "relu")
    given = chain.x, tuple(chain.weights)
    wanted = True, (True,) * 3, tuple(b is not None for b in chain.biases)
    _, saved = rows_backend.forward(*given, tuple(chain.biases), *names, True)
    moved = [t.new_empty(t.numel() + 1)[1:].view_as(t).copy_(t) for t in saved]
    first = rows_backend.backward(chain.dy, *given, saved, *names, wanted)
    again = rows_backend.backward(chain.dy, *given, tuple(moved), *names, wanted)
    assert first[0] is not None
    assert again[0] is not None
    assert torch.equal(first[0], again[0])
    for ours, theirs in zip([*first[1], *first[2]], [*again[1], *again[2]], strict=True):
        assert (ours is None) == (theirs is None)
        assert ours is None or theirs is None or torch.equal(ours, theirs)


def test_rows_are_sliced_where_there_are_many() -> None:
    shares = rows.shares_for(1 << 16, ((256, 256),) * 4, 132)
    assert min(one.slices for one in shares) > 1
