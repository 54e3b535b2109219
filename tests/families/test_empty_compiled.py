"""Empty tensors in compiled training: the registered ops of every family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl

Call = Callable[..., Any]


def _routes(x: Tensor) -> tuple[Tensor, Tensor]:
    tokens = x.shape[:-1].numel()
    return torch.zeros(tokens, 2, dtype=torch.int64), torch.ones(tokens, 2)


# name → (the call of x and its weights, shapes of the weights for K features)
CALLS: dict[str, tuple[Call, Callable[[int], list[tuple[int, ...]]]]] = {
    "linear_act": (
        lambda x, w, b: fl.linear_act(x, w, b, activation="gelu"),
        lambda k: [(3, k), (3,)],
    ),
    "mlp": (lambda x, v, w, b: fl.mlp(x, [v, w], [b, None]), lambda k: [(4, k), (3, 4), (4,)]),
    "gated_mlp": (fl.gated_mlp, lambda k: [(4, k), (4, k), (3, 4)]),
    "diagonal_linear": (
        lambda x, w, b: fl.diagonal_linear(x, w, b, activation="gelu"),
        lambda k: [(k,), (k,)],
    ),
    "grouped_linear": (fl.grouped_linear, lambda k: [(2, 3, k // 2)]),
    "experts": (
        lambda x, w, d: fl.experts(x.flatten(0, -2), *_routes(x), w, d),
        lambda k: [(2, 6, k), (2, k, 3)],
    ),
    "ragged_linear": (
        lambda x, w: fl.ragged_linear(x.flatten(0, -2), w, torch.zeros(2, dtype=torch.int64)),
        lambda k: [(2, 3, k)],
    ),
}


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 4), (2, 0, 4)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_of_empty_tensors(name: str, shape: tuple[int, ...]) -> None:
    torch.compiler.reset()
    call, shapes = CALLS[name]
    run = torch.compile(call, backend="aot_eager", fullgraph=True)
    given: list[Tensor] = [torch.randn(s, requires_grad=True) for s in (shape, *shapes(shape[-1]))]
    for _ in range(2):
        found, expected = (torch.autograd.grad(f(*given).sum(), given) for f in (run, call))
        for a, e in zip(found, expected, strict=True):
            assert torch.equal(a, e)
