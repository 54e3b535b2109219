"""Results are handed out where the graph writes them, and nobody's are overwritten."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.cuda_graphs import record
from fastlinear.cuda_graphs.graphed import Graphed, graphed
from fastlinear.cuda_graphs.results import Results
from tests.cuda_graphs.cases import counts, mlp


def spares(g: Graphed) -> list[Results]:
    (entry,) = g._graphs._graphs._values.values()
    return entry.spares + entry.backward_spares


def batches(device: str, many: int) -> list[Tensor]:
    return [torch.randn(2, 4, device=device) for _ in range(many)]


@torch.no_grad()
def test_a_result_nobody_holds_is_not_copied(device: str) -> None:
    g = graphed(mlp(device))
    (x,) = batches(device, 1)
    places = set()
    y = None
    for _ in range(6):
        y = g(x)  # the one before is still held while the call is under way
        places.add(y.data_ptr())
    assert y is not None
    assert len(places) == 2
    assert not all(s.free() for s in spares(g))
    del y
    assert all(s.free() for s in spares(g))
    assert counts(g) == (1, 6, 0)


HOLDS: dict[str, Callable[[Tensor], Any]] = {
    "itself": lambda y: y,
    "a view": lambda y: y[1:].t(),
    "a detached alias": lambda y: y.detach(),
    "a list": lambda y: [y],
    "autograd": lambda y: y * torch.ones(2, 3, device=y.device, requires_grad=True),
}


@pytest.mark.parametrize("hold", HOLDS)
def test_results_held_in_any_way_are_kept(device: str, hold: str) -> None:
    model = mlp(device)
    g = graphed(model)
    xs = batches(device, 5)
    held = []
    for x in xs:
        with torch.no_grad():
            y = g(x)
        held.append(HOLDS[hold](y))
        del y
    with torch.no_grad():
        expected = [model(x) for x in xs]
    for h, e in zip(held, expected, strict=True):
        if hold == "autograd":
            (ones,) = [f.variable for f, _ in h.grad_fn.next_functions if f is not None]
            assert_close(torch.autograd.grad(h.sum(), ones), (e,))
        else:
            assert_close(h, HOLDS[hold](e))
    assert g.counts.recorded == 1


@torch.no_grad()
def test_results_edited_in_place_leave_no_trace(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    (x,) = batches(device, 1)
    expected = model(x)
    for _ in range(4):
        g(x).fill_(float("nan"))
    assert_close(g(x), expected)
    y = g(x)
    y.untyped_storage().resize_(4096)  # its memory is elsewhere now
    z = g(x)
    assert_close(y, expected)
    assert_close(z, expected)
    del y, z
    assert not all(s.free() for s in spares(g))  # the graph does not write there
    for _ in range(3):
        assert_close(g(x), expected)


@torch.no_grad()
def test_an_argument_or_buffer_passed_through_is_a_copy(device: str) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.ones(2, 4))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x, self.held, x + self.held

    g = graphed(Two().to(device))
    x1, x2 = batches(device, 2)
    first = g(x1)
    second = g(x2)
    for y, x in ((first, x1), (second, x2)):
        assert_close(y, (x, torch.ones_like(x), x + 1))
        y[1].zero_()
    assert g.target.held.all()
    assert not spares(g)


@torch.no_grad()
def test_large_recordings_are_kept_once(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "_SMALL", 16)
    model = mlp(device)
    g = graphed(model)
    x1, x2 = batches(device, 2)
    y1, y2 = g(x1), g(x2)
    assert_close((y1, y2), (model(x1), model(x2)))
    assert not spares(g)


@torch.no_grad()
def test_reused_outputs_need_one_recording(device: str) -> None:
    g = graphed(mlp(device), reuse_outputs=True)
    g(*batches(device, 1))
    assert not spares(g)


@torch.no_grad()
def test_results_outlive_their_graph(device: str) -> None:
    model = mlp(device)
    g = graphed(model, max_graphs=1)
    (x,) = batches(device, 1)
    y = g(x)
    g(torch.randn(3, 4, device=device))
    g.clear()
    junk = [torch.full((64,), 7.0, device=device) for _ in range(64)]
    assert_close(y, model(x))
    del junk


@torch.no_grad()
def test_one_shape_does_not_overwrite_what_another_returned(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    xs = [torch.randn(rows, 4, device=device) for rows in (2, 4, 3, 8, 1, 5, 16, 4, 3)]
    expected = [model(x) for x in xs]
    for _ in range(2):
        assert_close([g(x) for x in xs], expected)


@pytest.mark.parametrize("hold", ["accumulate", "keep lists", "set to none", "zero"])
def test_gradients_held_in_any_way_are_kept(device: str, hold: str) -> None:
    model = mlp(device)
    g = graphed(model)
    xs = batches(device, 5)
    wanted = [torch.autograd.grad(model(x).square().sum(), list(model.parameters())) for x in xs]
    kept: list[list[Tensor]] = []
    total = [torch.zeros_like(p) for p in model.parameters()]
    for x, w in zip(xs, wanted, strict=True):
        if hold in ("keep lists", "set to none"):
            model.zero_grad(set_to_none=True)
            total = [torch.zeros_like(p) for p in model.parameters()]
        elif hold == "zero":
            model.zero_grad(set_to_none=False)
            total = [torch.zeros_like(p) for p in model.parameters()]
        g(x).square().sum().backward()
        total = [t + w for t, w in zip(total, w, strict=True)]
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        assert_close(grads, total)
        if hold == "keep lists":
            kept.append(grads)
        del grads
    for k, w in zip(kept, wanted, strict=False):
        assert_close(k, list(w))
    assert counts(g) == (1, 5, 0)


def test_gradients_nobody_holds_are_not_copied(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    (x,) = batches(device, 1)
    places = set()
    for _ in range(4):
        model.zero_grad()
        g(x).sum().backward()
        assert model[0].weight.grad is not None
        places.add(model[0].weight.grad.data_ptr())
    assert places == {spares(g)[0].places()[0]}


@pytest.mark.parametrize("scale", [1, 2])  # what both gradients are: the output's, a new one
def test_gradients_that_share_memory_are_copies(device: str, scale: int) -> None:
    def f(a: Tensor, b: Tensor) -> Tensor:
        return a + b if scale == 1 else (a + b) * scale

    g = graphed(f)
    a, b = (torch.ones(3, device=device, requires_grad=True) for _ in range(2))
    for i in range(1, 4):
        g(a, b).backward(torch.full((3,), 2.0, device=device))
        assert_close((a.grad, b.grad), (torch.full_like(a, 2.0 * i * scale),) * 2)
    assert not spares(g)
