"""mlp's backend ``graph`` against the layerwise forward that it records."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from graph_tape import Tape, TapeRecorder
from torch import Tensor
from torch.testing import assert_close

from fastlinear.core.graphs import Table
from fastlinear.dispatch.backend import family
from fastlinear.ops.common import door
from fastlinear.ops.mlp import graph, layerwise
from fastlinear.ops.mlp.problem import problem

Layers = tuple[tuple[Tensor, ...], tuple[Tensor | None, ...]]


@pytest.fixture(autouse=True)
def recorded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_FIRST_CALLS", 0)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(graph, "_graphs", Table(4))
    if request.param == "cpu":
        monkeypatch.setattr(graph, "_recorder", TapeRecorder())
    return str(request.param)


def layers(device: str, bias: str = "yes") -> Layers:
    widths = (5, 8, 8, 3)
    weights = tuple(torch.randn(n, k, device=device) for k, n in itertools.pairwise(widths))
    has = {"yes": (1, 1, 1), "no": (0, 0, 0), "some": (1, 0, 1)}[bias]
    return weights, tuple(
        torch.randn(n, device=device) if h else None for n, h in zip(widths[1:], has, strict=True)
    )


@pytest.mark.parametrize("bias", ["yes", "no", "some"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_equals_layerwise_for_every_batch(device: str, bias: str, activation: str) -> None:
    weights, biases = layers(device, bias)
    for m in (1, 3, 4, 7, 3):
        x = torch.randn(m, 5, device=device)
        for save in (False, True):
            call = (x, weights, biases, activation, "tanh", save)
            y, saved = graph.forward(*call)
            expected, expected_saved = layerwise.forward(*call)
            assert_close(y, expected)
            assert_close(saved, expected_saved)


def test_the_buffer_is_written_after_the_streams_are_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another stream's replay may still read it."""
    monkeypatch.setattr(graph, "_graphs", Table(4))
    monkeypatch.setattr(graph, "_recorder", TapeRecorder())
    weights, biases = layers("cpu")
    graph.forward(torch.randn(4, 5), weights, biases, "relu", "none", False)
    (made,) = graph._graphs._values.values()
    seen: list[tuple[str, int]] = []
    for name in ("order", "replay"):
        real = getattr(Tape, name)

        def noted(self: Tape, name: str = name, real: Any = real) -> None:
            seen.append((name, made.x._version))
            real(self)

        monkeypatch.setattr(Tape, name, noted)
    before = made.x._version
    graph.forward(torch.randn(4, 5), weights, biases, "relu", "none", False)
    assert seen == [("order", before), ("replay", before + 1)]


def test_weights_seen_once_are_not_recorded(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graph, "_FIRST_CALLS", 2)
    monkeypatch.setattr(graph, "_seen", {})
    x = torch.randn(4, 5, device=device)
    sets = [layers(device) for _ in range(3)]
    for calls in range(1, 4):
        for weights, biases in sets:
            y, _ = graph.forward(x, weights, biases, "relu", "none", False)
            expected, _ = layerwise.forward(x, weights, biases, "relu", "none", False)
            assert_close(y, expected)
        assert len(graph._graphs) == (0 if calls < 3 else 3)
    assert not graph._seen


def test_outputs_are_fresh_and_weights_live(device: str) -> None:
    weights, biases = layers(device)
    x = torch.randn(4, 5, device=device)
    first, _ = graph.forward(x, weights, biases, "relu", "none", False)
    kept = first.clone()
    weights[0].mul_(2)
    weights[1].data.add_(1)  # no version counter moves
    y, _ = graph.forward(x, weights, biases, "relu", "none", False)
    assert_close(y, layerwise.forward(x, weights, biases, "relu", "none", False)[0])
    assert torch.equal(first, kept)
    assert len(graph._graphs) == 1
    other = (weights[0].clone(), *weights[1:])
    other[0].zero_()
    y, _ = graph.forward(x, other, biases, "relu", "none", False)
    assert_close(y, layerwise.forward(x, other, biases, "relu", "none", False)[0])
    assert len(graph._graphs) == 2


def test_a_transposed_view_of_the_same_memory_is_another_weight(device: str) -> None:
    w, x = torch.randn(5, 5, device=device), torch.randn(2, 5, device=device)
    for weight in (w, w.t()):
        y, _ = graph.forward(x, (weight,), (None,), "relu", "none", False)
        assert_close(y, x @ weight.t())


def test_strided_and_negated_rows(device: str) -> None:
    weights, biases = layers(device)
    z = torch.view_as_complex(torch.randn(3, 5, 2, device=device)).conj().imag
    assert z.is_neg()
    for x in (torch.randn(3, 10, device=device)[:, ::2], torch.randn(5, 3, device=device).t(), z):
        y, _ = graph.forward(x, weights, biases, "relu", "none", False)
        expected = layerwise.forward(
            x.resolve_neg().contiguous(), weights, biases, "relu", "none", False
        )
        assert_close(y, expected[0])


def test_graphs_are_bounded(device: str) -> None:
    weights, biases = layers(device)
    for m in (1, 2, 4, 8, 16, 32, 1):
        x = torch.randn(m, 5, device=device)
        y, _ = graph.forward(x, weights, biases, "relu", "none", False)
        assert_close(y, layerwise.forward(x, weights, biases, "relu", "none", False)[0])
    assert len(graph._graphs) == 4


def test_inference_mode_and_back(device: str) -> None:
    weights, biases = layers(device)
    with torch.inference_mode():
        graph.forward(torch.randn(4, 5, device=device), weights, biases, "relu", "none", False)
    x = torch.randn(3, 5, device=device)
    y, _ = graph.forward(x, weights, biases, "relu", "none", False)
    assert_close(y, layerwise.forward(x, weights, biases, "relu", "none", False)[0])


@pytest.mark.gpu
def test_inside_another_capture_the_layers_join_it() -> None:
    weights, biases = layers("cuda")
    x = torch.randn(4, 5, device="cuda")
    graph.forward(x, weights, biases, "relu", "none", False)
    outer = torch.cuda.CUDAGraph()
    with torch.cuda.graph(outer):
        y, _ = graph.forward(x, weights, biases, "relu", "none", False)
    x.normal_()
    outer.replay()
    assert_close(y, layerwise.forward(x, weights, biases, "relu", "none", False)[0])


@pytest.mark.gpu
def test_ten_thousand_replays_give_one_result() -> None:
    weights, biases = layers("cuda")
    x = torch.randn(3, 5, device="cuda")
    first, _ = graph.forward(x, weights, biases, "relu", "none", False)
    wrong = torch.zeros((), device="cuda", dtype=torch.int64)
    for _ in range(10_000):
        wrong += (graph.forward(x, weights, biases, "relu", "none", False)[0] != first).any()
    assert not wrong.item()


def test_what_it_cannot_serve_is_said() -> None:
    def why(m: int = 4, device: str = "cuda", needs_grad: bool = False) -> str | None:
        return graph.reason_not(
            problem("forward", m, (5, 8, 3), dtype="float32", device=device, needs_grad=needs_grad)
        )

    assert "CUDA device" in (why(device="cpu") or "")
    assert "graphed records a step" in (why(needs_grad=True) or "")
    assert "rows take longer" in (why(m=4097) or "")
    assert why() in (None, "torch sees no CUDA device")


@pytest.mark.parametrize("compiler", [True, False])
def test_chains_are_recorded_by_default_where_python_would_launch_their_layers(
    compiler: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "reason_not", lambda: None if compiler else "no C++ compiler")

    def order(rows: int, layers: int, **kind: Any) -> tuple[str, ...]:
        widths = (1024,) * (layers + 1)
        p = problem("forward", rows, widths, dtype="bfloat16", device="cuda", **kind)
        return tuple(family("mlp").prefer(p))

    recorded = () if compiler else ("graph",)
    assert order(256, 8) == (*recorded, "layerwise", "eager")
    assert order(64, 8) == ("whole_cuda", *recorded, "layerwise", "eager")
    assert "graph" not in order(256, 8, captured=True)
    assert "graph" not in order(256, 8, needs_grad=True)
    assert "graph" not in order(256, 2)
    assert "graph" not in order(8192, 8)
