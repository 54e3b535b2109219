"""Results may be changed in place outside, as those of PyTorch's own layers may: by a ReLU that
works in place, a residual added with ``+=``. At the first call of a kind too, which runs in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import FastlinearError
from fastlinear.dispatch.backend import family
from fastlinear.families.grouped.layout import LAYOUTS
from fastlinear.fastpath import autograd_node, lookup

G, K, N = 3, 5, 4
GROUPED: dict[str, Callable[[int], Any]] = {
    "... (g k)": lambda m: ((m, G * K), (2, m, G * K), (m, 2, 2, G * K)),
    "... g k": lambda m: ((m, G, K), (2, m, G, K)),
    "g ... k": lambda m: ((G, m, K), (G, 2, m, K)),
    "b (g k) ...": lambda m: ((m, G * K), (2, G * K, m), (m, G * K, 2, 2)),
    "b g k ...": lambda m: ((m, G, K), (2, G, K, m)),
    "... k": lambda m: ((m, K), (2, m, K)),
}
ROWS: dict[str, Callable[[int], Any]] = {"ragged_linear": lambda m: ((m, K),)}
Call = Callable[[Tensor, str, str | None], Tensor]


def rows(m: int) -> Any:
    """Shapes of inputs of K features."""
    return (m, K), (2, m, K), (m, 2, 2, K)


def weights(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


def of_family(name: str) -> tuple[Call, list[Tensor], Callable[[int], Any]]:
    """(the call on an input, its parameters, shapes of inputs for so many rows)."""
    w = weights(*SHAPES[name if name in SHAPES else "grouped_linear"])

    def call(x: Tensor, activation: str, backend: str | None) -> Tensor:
        named: Any = {"activation": activation, "backend": backend}
        if name == "linear_act":
            return fl.linear_act(x, *w, **named)
        if name == "diagonal_linear":
            return fl.diagonal_linear(x, w[0], w[1], residual=x.detach(), **named)
        if name == "mlp":
            return fl.mlp(x, w[:2], w[2:], "gelu", final_activation=activation, backend=backend)
        if name == "gated_mlp":
            return fl.gated_mlp(x, *w, backend=backend)
        if name == "gated_linear":
            return fl.gated_linear(x, *w, backend=backend)
        if name == "ragged_linear":
            return fl.ragged_linear(x, w[0], torch.tensor([1, len(x) - 1]), w[1], **named)
        if name.startswith("unequal_linear"):
            return fl.unequal_linear([x, x], w[:2], w[2:], **named)[int(name[-1])]
        return fl.grouped_linear(x, w[0], w[1], layout=name, **named)

    return call, w, GROUPED.get(name) or ROWS.get(name, rows)


SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "grouped_linear": ((G, N, K), (G, N)),
    "linear_act": ((N, K), (N,)),
    "diagonal_linear": ((K,), (K,)),
    "mlp": ((6, K), (N, 6), (6,), (N,)),
    "gated_mlp": ((6, K), (6, K), (N, 6)),
    "gated_linear": ((N, K), (N, K)),
    "ragged_linear": ((2, N, K), (2, N)),
    "unequal_linear 0": ((N, K), (6, K), (N,), (6,)),
    "unequal_linear 1": ((N, K), (6, K), (N,), (6,)),
}
FAMILIES = (*GROUPED, *list(SHAPES)[1:])


def backends_of(name: str) -> tuple[str | None, ...]:
    if name.startswith("unequal"):
        return None, "together", "eager"
    if name == "ragged_linear":
        return None, "cpp", "eager"
    registered = {"gated_linear": "gated_mlp", "... k": "linear_act"}
    found = registered.get(name, "grouped_linear" if name in LAYOUTS else name)
    return None, *sorted({b.name for b in family(found).backends})


def calls_of(
    name: str, call: Call, x: Tensor, activation: str, training: bool = True
) -> Iterator[Callable[[], Tensor]]:
    """The call by every backend that serves it here."""
    for backend in backends_of(name):
        try:
            with torch.set_grad_enabled(training):
                first = [call(x, activation, backend)]
        except FastlinearError:
            continue

        def run(first: list[Tensor] = first, backend: str | None = backend) -> Tensor:
            return first.pop() if first else call(x, activation, backend)

        yield run


def halved_and_cut(y: Tensor) -> Tensor:
    """In place: a product, and a ReLU over it."""
    y *= 0.5
    return F.relu(y, inplace=True)


def gradients(y: Tensor, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
    loss = y.float().square().sum()
    return torch.autograd.grad(loss, given, allow_unused=True, materialize_grads=True)


def same(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_result_in_training_is_changed_in_place(name: str, autocast: bool) -> None:
    """At the first call, the second, the third, and for another number of rows again."""
    changed_in_training(name, autocast)


@pytest.mark.skipif(autograd_node.reason_not() is not None, reason="no C++ nodes here")
@pytest.mark.usefixtures("nodes_built")
@pytest.mark.parametrize("name", FAMILIES)
def test_also_where_nodes_record_it(name: str) -> None:
    changed_in_training(name, False)


def changed_in_training(name: str, autocast: bool) -> None:
    call, given, shapes = of_family(name)
    for m in (3, 4):
        for shape in shapes(m):
            x = torch.randn(shape)
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                for run in calls_of(name, call, x, "none"):
                    for _ in range(3):
                        found = gradients(halved_and_cut(run()), given)
                        assert same(found, gradients(torch.relu(run() * 0.5), given))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_result_that_was_kept_is_no_silent_error(name: str) -> None:
    """The derivative of relu reads y: a y that has changed is autograd's own error."""
    if name.startswith("gated") or name == "diagonal_linear":  # these keep no output
        return
    call, given, shapes = of_family(name)
    for shape in shapes(4):
        for run in calls_of(name, call, torch.randn(shape), "relu"):
            for _ in range(3):
                y = run()
                y *= -1
                try:
                    found = gradients(y, given)
                except RuntimeError as error:
                    if "inplace operation" not in str(error):
                        raise
                else:
                    assert same(found, gradients(run() * -1, given))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_result_without_gradients_takes_what_is_learned(name: str) -> None:
    """As where a frozen part runs under ``no_grad`` and a learned bias is added behind it."""
    call, _, shapes = of_family(name)
    learned = torch.ones((), requires_grad=True)
    for shape in shapes(4):
        for run in calls_of(name, call, torch.randn(shape), "relu", training=False):
            for _ in range(3):
                with torch.no_grad():
                    y = run()
                y *= learned
                (grad,) = torch.autograd.grad(y.sum(), learned)
                assert torch.isfinite(grad)


@pytest.mark.parametrize("layout", [*LAYOUTS, "... k"])
def test_second_derivatives_go_through_it(layout: str) -> None:
    call, given, shapes = of_family(layout)
    for run in calls_of(layout, call, torch.randn(shapes(4)[-1]), "gelu"):
        y = run()
        y *= 2
        (grad,) = torch.autograd.grad(y.square().sum(), given[0], create_graph=True)
        (found,) = torch.autograd.grad(grad.square().sum(), given[0])
        (grad,) = torch.autograd.grad((run() * 2).square().sum(), given[0], create_graph=True)
        (want,) = torch.autograd.grad(grad.square().sum(), given[0])
        torch.testing.assert_close(found, want, rtol=1e-4, atol=1e-5)


def test_a_model_with_a_relu_in_place_trains_at_any_batch() -> None:
    model = nn.Sequential(fl.nn.GroupedLinear(4, 16, 16), nn.ReLU(inplace=True))
    for rows in (32, 32, 7, 32):
        model(torch.randn(rows, 64)).sum().backward()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(3, 64)).float().sum().backward()


def test_also_compiled() -> None:
    layer = fl.nn.GroupedLinear(G, K, N, layout="b (g k) ...")
    x = torch.randn(2, G * K, 6)
    compiled = torch.compile(
        lambda x: halved_and_cut(layer(x)), fullgraph=True, backend="aot_eager"
    )
    outside = torch.compile(layer, fullgraph=True, backend="aot_eager")
    given = [*layer.parameters()]
    want = gradients(halved_and_cut(layer(x)), given)
    for y in (compiled(x), halved_and_cut(outside(x))):
        torch.testing.assert_close(gradients(y, given), want)


def test_the_fast_path_serves_these() -> None:
    """Else the tests above would all be of the same path."""
    layer = fl.nn.GroupedLinear(G, K, N)
    x = torch.randn(4, G * K)
    for _ in range(3):
        layer(x)
    assert lookup.reason_not() is not None or lookup.table("grouped_linear") is not None
