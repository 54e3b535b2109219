"""The Strassen chain's Triton kernels: under Triton's CPU interpreter, and on a GPU.

Triton reads TRITON_INTERPRET when a kernel is defined, so the interpreted tests run in a process
of their own, started by ``test_under_the_interpreter``.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.experiments.strassen import chain as strassen
from benchmarks.experiments.strassen.scheme import Scheme, error_growth
from fastlinear.core.compare import relative_error, unit_rounding
from fastlinear.families.mlp import reference
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    gpu,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from benchmarks.experiments.strassen import gpu as backend

# the interpreter truncates to bfloat16 and takes long
DTYPES = (torch.float32, torch.bfloat16, torch.float16) if ON_GPU else (torch.float32,)
CHAINS = [
    (64, (64, 128, 64), "rows"),  # planes fit tiles and matrices
    (7, (33, 65, 17, 5), "rows"),
    (1, (1, 1), "rows"),
    (6, (40, 20), "strided"),
]
if ON_GPU:
    CHAINS += [(1000, (777, 2048, 1111, 64), "rows"), (4096, (2048, 2048, 2048), "rows")]


@pytest.mark.slow
@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Planes and results start as NaN, so an element that is never written is seen."""
    if INTERPRETED or ON_GPU:
        empty = backend._empty
        monkeypatch.setattr(backend, "_empty", lambda *a: empty(*a).fill_(float("nan")))
        backend._launches.clear()
        backend.forget_weights()
    yield
    if INTERPRETED or ON_GPU:
        backend.forget_weights()


def draw(m: int, widths: tuple[int, ...], dtype: torch.dtype, layout: str = "rows") -> Any:
    """x, weights, biases (every second one) of a chain."""
    x = torch.randn(widths[0], m).t() if layout == "strided" else torch.randn(m, widths[0])
    shapes = list(itertools.pairwise(widths))
    weights = [torch.randn(n, k) * (2 / k) ** 0.5 for k, n in shapes]
    if layout == "strided":
        weights = [w.t().contiguous().t() for w in weights]
    biases = [torch.randn(2 * n)[::2] if i % 2 == 0 else None for i, (_, n) in enumerate(shapes)]
    to = lambda t: None if t is None else t.to(DEVICE, dtype)  # noqa: E731
    return to(x), tuple(map(to, weights)), tuple(map(to, biases))


def check(m: int, widths: Any, layout: str, dtype: Any, scheme: Scheme, acts: Any) -> None:
    """Outputs and what is saved, against float64, within the ratio of the bounds."""
    x, weights, biases = draw(m, widths, dtype, layout)
    names = (acts[0],) * (len(weights) - 1) + (acts[1],)
    y, saved = backend.run(x, weights, biases, names, True, scheme)
    again, none = backend.run(x, weights, biases, names, False, scheme)
    assert torch.equal(y, again)
    assert none == ()
    wide = tuple(b if b is None else b.double() for b in biases)
    double = tuple(w.double() for w in weights)
    exact, exact_saved = reference.forward(x.double(), double, wide, *acts, True)
    own, own_saved = reference.forward(x, weights, biases, *acts, True)
    growth = error_growth(scheme.levels) if scheme.name == "strassen" else 2
    for ours, theirs, true in zip(
        (y, *saved), (own, *own_saved), (exact, *exact_saved), strict=True
    ):
        assert ours.shape == true.shape
        assert ours.dtype is dtype
        limit = growth * (relative_error(theirs, true) + 2 * unit_rounding(dtype))
        assert relative_error(ours, true) <= limit


@compares
@pytest.mark.parametrize("name", ["strassen", "classical"])
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_error(chain: Any, dtype: torch.dtype, levels: int, name: str) -> None:
    if INTERPRETED and name == "classical" and chain[0] != 7:
        pytest.skip("the interpreter takes long")
    check(*chain, dtype, Scheme(name, levels), ("relu", "silu"))


@compares
@pytest.mark.parametrize("act", ["gelu", "sigmoid"])
def test_activations(act: str) -> None:
    check(5, (20, 30, 20), "rows", torch.float32, Scheme("strassen", 1), (act, "gelu_tanh"))


@compares
def test_a_wrong_weight_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    planes = backend.weight_planes
    monkeypatch.setattr(backend, "weight_planes", lambda w, s: planes(w, s).roll(1, 0))
    with pytest.raises(AssertionError):
        test_error(CHAINS[0], torch.float32, 1, "strassen")


# weights of now: the kernel that hashes them sees any change


def sgd(layer: nn.Linear) -> None:
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def load(layer: nn.Linear) -> None:
    layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})


def load_assign(layer: nn.Linear) -> None:
    state = {k: torch.randn_like(v) for k, v in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def no_grad_row(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[3] += 1


def data_one_element(layer: nn.Linear) -> None:
    layer.weight.data[17, 29] += 1


def data_swapped(layer: nn.Linear) -> None:
    layer.weight.data[:2] = layer.weight.data[:2].flip(0)


def data_negated(layer: nn.Linear) -> None:
    layer.weight.data.neg_()


def data_replaced(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


CHANGES: list[Callable[[nn.Linear], None]] = [
    sgd,
    load,
    load_assign,
    no_grad_row,
    data_one_element,
    data_swapped,
    data_negated,
    data_replaced,
]


def run_layer(layer: nn.Linear, x: Tensor, levels: int = 1) -> Tensor:
    with torch.no_grad():
        scheme = Scheme("strassen", levels)
        return backend.run(x, (layer.weight,), (layer.bias,), ("none",), False, scheme)[0]


@compares
@pytest.mark.parametrize("levels", [1, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights(change: Callable[[nn.Linear], None], levels: int) -> None:
    if INTERPRETED and levels == 2 and change is not data_one_element:
        pytest.skip("the interpreter takes long")
    layer, x = nn.Linear(40, 48).to(DEVICE), torch.randn(12, 40, device=DEVICE)
    for _ in range(2):
        y = run_layer(layer, x, levels)
        torch.testing.assert_close(y, layer(x).detach(), rtol=1e-4, atol=1e-4)
        change(layer)
    y = run_layer(layer, x, levels)
    torch.testing.assert_close(y, layer(x).detach(), rtol=1e-4, atol=1e-4)


@compares
def test_unchanged_weights_are_not_transformed_again() -> None:
    layer, x = nn.Linear(40, 48).to(DEVICE), torch.randn(12, 40, device=DEVICE)
    run_layer(layer, x)
    ((_, planes, _),) = backend._kept.values()
    planes.fill_(float("nan"))
    assert run_layer(layer, x).isnan().all()
    no_grad_row(layer)  # and only the tile that changed is
    run_layer(layer, x)
    assert planes.isnan().any()
    assert not planes.isnan().all()


@compares
def test_planes_go_with_the_weight() -> None:
    weight, scheme = torch.randn(6, 8, device=DEVICE), Scheme("strassen", 1)
    backend.weight_planes(weight, scheme)
    assert len(backend._kept) == 1
    del weight
    gc.collect()
    assert not backend._kept


class TestOnAGpu:
    pytestmark = gpu

    def test_graph_replays_see_new_weights(self) -> None:
        x, weights, biases = draw(64, (64, 96, 64), torch.float32)
        call = (x, weights, biases, "relu", "none", False)
        for _ in range(2):
            strassen.forward(*call)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = strassen.forward(*call)
        for _ in range(3):
            for weight in weights:
                weight.data[5, 7] += 1
            x.mul_(0.9)
            graph.replay()
            expected = reference.forward(*call)[0]
            torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)

    def test_first_call_under_capture(self) -> None:
        x, weights, biases = draw(64, (64, 96, 64), torch.float32)
        call = (x, weights, biases, "relu", "none", False)
        torch.mm(x, x.t())  # its library cannot start under capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y, _ = strassen.forward(*call)
        graph.replay()
        torch.testing.assert_close(y, reference.forward(*call)[0], rtol=1e-4, atol=1e-4)
        assert not backend._kept

    def test_every_stream_has_its_own_planes(self) -> None:
        layer, x = nn.Linear(40, 48).to(DEVICE), torch.randn(12, 40, device=DEVICE)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        run_layer(layer, x)
        with torch.cuda.stream(side):
            y = run_layer(layer, x)
        torch.cuda.current_stream().wait_stream(side)
        torch.testing.assert_close(y, layer(x).detach(), rtol=1e-4, atol=1e-4)
        assert len(backend._kept) == 2

    def test_many_calls_give_one_result(self) -> None:
        x, weights, biases = draw(200, (300, 500, 100), torch.float32)
        call = (x, weights, biases, "gelu", "none", False)
        first, _ = strassen.forward(*call)
        same = torch.ones((), dtype=torch.bool, device="cuda")
        for _ in range(300):
            same &= (strassen.forward(*call)[0] == first).all()
        assert bool(same)
