"""The layerwise backend: its buffers are never returned, bounded, and each thread's own."""

from __future__ import annotations

import threading
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.dispatch.select import Choice
from fastlinear.families.linear import selection as linear_act_selection
from fastlinear.families.linear.problem import WHOLE_BACKWARD
from fastlinear.families.linear.selection import whole_is_measured
from fastlinear.families.mlp import layerwise, reference
from fastlinear.families.mlp.problem import problem
from fastlinear.families.mlp.selection import tuning_order


def net(m: int, *widths: int) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    pairs = list(pairwise(widths))
    weights = tuple(torch.randn(n, k) * (2 / k) ** 0.5 for k, n in pairs)
    return torch.randn(m, widths[0]), weights, tuple(torch.randn(n) for _, n in pairs)


def pointers() -> set[int]:
    held = getattr(layerwise._held, "buffers", None)
    return set() if held is None else {b.data_ptr() for b in held}


@pytest.mark.parametrize("activation", NAMES)
def test_no_result_lies_in_a_buffer(activation: str) -> None:
    with torch.no_grad():
        for layers in (1, 2, 3, 4):
            x, ws, bs = net(6, *(16,) * (layers + 1))
            y, saved = layerwise.forward(x, ws, bs, activation, activation, False)
            assert saved == ()
            assert y.untyped_storage().data_ptr() not in pointers()
            kept = y.clone()
            layerwise.forward(torch.randn(6, 16), ws, bs, activation, activation, False)
            assert torch.equal(y, kept)
            expected = reference.mlp(x, ws, bs, activation, activation)
            assert torch.allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_buffers_are_reused_and_grow_with_the_widest_net() -> None:
    layerwise._held.buffers = None
    with torch.no_grad():
        layerwise.forward(*net(8, 32, 64, 32, 4), "relu", "none", False)
        first = pointers()
        layerwise.forward(*net(4, 16, 16, 16), "relu", "none", False)
        assert pointers() == first
        layerwise.forward(*net(8, 32, 256, 32, 4), "relu", "none", False)
        assert layerwise._held.buffers[0].numel() == 8 * 256


def test_buffers_beyond_the_bound_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layerwise, "_MAX_BUFFER_BYTES", 1000)
    layerwise._held.buffers = None
    with torch.no_grad():
        layerwise.forward(*net(8, 32, 64, 32), "relu", "none", False)
    assert layerwise._held.buffers is None


def test_buffers_of_dtypes_and_inference_mode() -> None:
    with torch.inference_mode():
        layerwise.forward(*net(8, 32, 64, 32), "relu", "none", False)
    with torch.no_grad():
        x, ws, bs = net(8, 32, 64, 32)
        y = layerwise.forward(x, ws, bs, "relu", "none", False)[0]
        assert torch.allclose(y, reference.mlp(x, ws, bs, "relu", "none"), atol=1e-4)
        half = [tuple(t.bfloat16() for t in part) for part in (ws, bs)]
        y = layerwise.forward(x.bfloat16(), *half, "relu", "none", False)[0]
        assert y.dtype is torch.bfloat16


def test_threads_have_their_own_buffers() -> None:
    x, ws, bs = net(64, 200, 200, 200, 200)
    with torch.no_grad():
        expected = reference.mlp(x, ws, bs, "relu", "none")
    wrong: list[float] = []

    def work() -> None:
        with torch.no_grad():
            for _ in range(20):
                y = layerwise.forward(x, ws, bs, "relu", "none", False)[0]
                if not torch.allclose(y, expected, atol=1e-4):
                    wrong.append(float((y - expected).abs().max()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


def test_saved_is_what_the_reference_saves() -> None:
    for names in (("gelu", "silu"), ("relu", "none"), ("relu", "gelu"), ("tanh", "relu")):
        x, ws, bs = net(6, 16, 12, 8)
        _, ours = layerwise.forward(x, ws, bs, *names, True)
        _, theirs = reference.forward(x, ws, bs, *names, True)
        for a, b in zip(ours, theirs, strict=True):
            assert torch.allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("layout", ["nk", "mixed"])
@pytest.mark.parametrize("bias", ["yes", "no", "some"])
def test_tuning_begins_with_the_choices_it_takes(
    bias: str, layout: str, grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more and no fewer Problems than the backend looks up."""
    p = problem(
        "forward",
        6,
        (16, 16, 16, 8),
        dtype="float32",
        device="cpu",
        activation="gelu",
        bias=bias,
        w_layout=layout,
        needs_grad=grad,
        precision="highest",
    )
    asked = []

    def select(q: Problem, *, ready: bool = True) -> Choice:
        asked.append(q)
        return choose(q, ready=ready)

    choose = layerwise.select
    for module in (layerwise, linear_act_selection):
        monkeypatch.setattr(module, "select", select)
    layerwise._plans.clear()
    fam = family("mlp")
    for piece in ("forward", "backward") if grad else ("forward",):
        inputs = fam.make_inputs(p.with_piece(piece), torch.device("cpu"), 0)
        getattr(layerwise, piece)(*inputs)
    layers = layerwise.layer_problems(p)
    whole = {q for q in asked if q.piece == WHOLE_BACKWARD and not whole_is_measured(q)}
    assert set(layers) == set(asked) - whole
    assert len(layers) == len(set(layers))
    order = tuning_order(p)
    assert order[: len(layers)] == layers
    assert [q.family for q in order[len(layers) :]] == ["mlp"] * (4 if grad else 1)


def test_float64_has_no_layers_to_tune() -> None:
    p = problem("forward", 6, (16, 16), dtype="float64", device="cpu")
    assert tuning_order(p) == (p,)


def test_plans_are_dropped_with_the_tuned_cache() -> None:
    x, ws, bs = net(6, 16, 16)
    fl.mlp(x, ws, bs, backend="layerwise")
    assert layerwise._plans
    cache.forget()
    assert not layerwise._plans


@pytest.mark.gpu
def test_on_cuda() -> None:
    x, ws, bs = net(64, 64, 64, 64)
    on = [x.cuda(), tuple(w.cuda() for w in ws), tuple(b.cuda() for b in bs)]
    y = fl.mlp(*on, backend="layerwise")
    assert torch.allclose(y.cpu(), reference.mlp(x, ws, bs, "relu", "none"), atol=1e-3)
