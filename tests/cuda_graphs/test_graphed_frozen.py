"""After calls that were alike the plan is found without a key, until anything differs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.cuda_graphs.graphed import Graphed, graphed
from tests.cuda_graphs.cases import mlp

Call = Callable[[nn.Module, Tensor], Tensor]


def taken(g: Graphed) -> bool:
    """Whether the next call like the last finds its plan so."""
    return g._graphs._frozen._plan is not None


@contextmanager
def settings(deterministic: bool, precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.use_deterministic_algorithms(deterministic)
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision(before)


def deterministic(m: nn.Module, x: Tensor) -> Tensor:
    with settings(True, "highest"), torch.no_grad():
        return m(x)


def precise(m: nn.Module, x: Tensor) -> Tensor:
    with settings(False, "high"), torch.no_grad():
        return m(x)


def autocast(m: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(x.device.type, dtype=torch.bfloat16), torch.no_grad():
        return m(x)


def without_grad(m: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return m(x)


def inferred(m: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return m(x) + 0


CHANGES: dict[str, Call] = {
    "rows": lambda m, x: m(x[:2]),
    "strides": lambda m, x: m(x.t().contiguous().t()),
    "requires_grad": lambda m, x: m(x.clone().requires_grad_()),
    "grad mode": without_grad,
    "inference mode": inferred,
    "autocast": autocast,
    "deterministic": deterministic,
    "precision": precise,
    "keyword": lambda m, x: m(input=x),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("grad", [False, True])
def test_another_kind_of_call_is_told_apart(device: str, change: str, grad: bool) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(4, 4, device=device)
    recorded = 0
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            for _ in range(3):
                assert_close(g(x), model(x))
            assert taken(g)
            recorded = recorded or g.counts.recorded
            ours, theirs = CHANGES[change](g, x), CHANGES[change](model, x)  # type: ignore[arg-type]
        assert ours.requires_grad == theirs.requires_grad
        assert_close(ours, theirs)
        del ours, theirs
    alike = not grad and change in ("grad mode", "inference mode")
    assert g.counts.recorded == recorded + (not alike)
    with torch.set_grad_enabled(grad):
        assert_close(g(x), model(x))


def test_another_number_of_arguments_is_told_apart(device: str) -> None:
    def f(x: Tensor, y: Tensor | None = None) -> Tensor:
        return x * 2 if y is None else x + y

    g = graphed(f)
    x = torch.randn(4, device=device)
    for _ in range(3):
        assert_close(g(x), x * 2)
    assert_close(g(x, x + 1), 2 * x + 1)
    assert_close(g(x), x * 2)


@torch.no_grad()
def test_parameters_are_still_looked_at(device: str) -> None:
    layer = nn.Linear(4, 4, device=device)
    g = graphed(layer)
    x = torch.randn(4, 4, device=device)

    def same_memory() -> None:
        layer.weight.data = layer.weight.data.t()

    def moved() -> None:
        layer.weight.data = torch.randn(4, 4, device=device)

    def replaced() -> None:
        layer.bias = nn.Parameter(torch.randn(4, device=device))

    def without_bias() -> None:
        layer.bias = None  # type: ignore[assignment]

    for change in (same_memory, moved, replaced, without_bias):
        for _ in range(3):
            assert_close(g(x), layer(x))
        assert taken(g)
        change()
        assert_close(g(x), layer(x))


@torch.no_grad()
def test_a_freed_graph_is_not_taken_again(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(4, 4, device=device)
    for _ in range(3):
        g(x)
    assert taken(g)
    g.clear()
    assert not taken(g)
    assert_close(g(x), model(x))
    assert g.counts.recorded == 2
