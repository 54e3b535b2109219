"""Graphed callables beside other captures, transforms, threads and streams."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from fastlinear.cuda_graphs import graphed as module_of_graphed
from fastlinear.cuda_graphs.graphed import graphed
from tests.core.graph_tape import Tape, TapeRecorder
from tests.cuda_graphs.cases import gradients, mlp


@pytest.mark.gpu
def test_recorded_inside_another_capture_the_kernels_join_it() -> None:
    model = mlp("cuda")
    g = graphed(model)
    x = torch.randn(2, 4, device="cuda")
    with torch.no_grad():
        g(x)
        outer = torch.cuda.CUDAGraph()
        with torch.cuda.graph(outer):
            y = g(x)
        x.copy_(torch.randn(2, 4, device="cuda"))
        outer.replay()
        assert_close(y, model(x))
    assert g.counts.plain == 1


@torch.no_grad()
def test_nested_graphed_callables_record_once(device: str) -> None:
    inner = graphed(mlp(device))
    outer = graphed(lambda x: inner(x) * 2, watch=[inner.target])
    x = torch.randn(2, 4, device=device)
    assert_close(outer(x), inner.target(x) * 2)
    assert inner.counts.recorded == 0


@torch.no_grad()
def test_compiled_and_transformed_callers_see_the_callable(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device)
    assert_close(torch.func.vmap(g)(x), model(x))
    assert g.counts.recorded == 0


def test_transforms_over_parameters_see_the_callable(device: str) -> None:
    model = mlp(device)
    x = torch.randn(2, 4, device=device)
    weights = {n: p.detach() for n, p in model.named_parameters()}

    class Graphing(torch.nn.Module):
        """Graphed where its weights are a transform's."""

        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = graphed(self.inner)(x)
            return y

    def loss(called: torch.nn.Module, prefix: str) -> Any:
        return lambda named: torch.func.functional_call(
            called, {prefix + n: w for n, w in named.items()}, (x,)
        ).sum()

    ours = torch.func.grad(loss(Graphing(), "inner."))(weights)
    assert_close(ours, torch.func.grad(loss(model, ""))(weights))


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("recorded", [0, 2])
def test_forward_mode_sees_the_callable(device: str, recorded: int, grad: bool) -> None:
    model = mlp(device)
    g = graphed(model)
    x, dx = torch.randn(2, 2, 4, device=device)
    with torch.set_grad_enabled(grad):
        for _ in range(recorded):
            g(x)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, dx)
            ours, theirs = (forward_ad.unpack_dual(f(dual)) for f in (g, model))
            assert ours.tangent is not None
            assert_close(ours.tangent, theirs.tangent)
        assert_close(g(x), model(x))
    assert g.counts.plain == 1


@pytest.mark.parametrize("recorded", [0, 2])
@pytest.mark.parametrize("early_stop", [False, True])
def test_checkpoints_save_what_the_callable_saves(
    device: str, recorded: int, early_stop: bool
) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device)

    def checkpointed(f: Any) -> Any:
        return lambda x: checkpoint(f, x, use_reentrant=False, early_stop=early_stop)

    for _ in range(recorded):
        gradients(g, model, x)
    ours = gradients(checkpointed(g), model, x)
    assert_close(ours, gradients(checkpointed(model), model, x))
    assert (g.counts.recorded, g.counts.replayed) == (recorded > 0, recorded)


def test_hooks_on_saved_tensors_see_the_callables(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device)
    g(x).sum().backward()
    seen: list[list[torch.Size]] = []
    for f in (g, model):
        seen.append([])
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (seen[-1].append(t.shape), t)[1], lambda t: t
        ):
            f(x)
    assert seen[0] == seen[1] != []


def test_buffers_are_written_by_the_replay_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it, a replay on another stream may still read what the call is about to write."""
    monkeypatch.setattr(module_of_graphed, "CudaRecorder", TapeRecorder)
    model = mlp("cpu")
    g = graphed(model)
    x = torch.randn(2, 4, requires_grad=True)
    g(x).sum().backward()  # recorded
    (entry,) = g._graphs._graphs._values.values()
    buffers = [t for t in (*entry.statics, *entry.dys) if t is not None]
    seen: list[int] = []
    real = Tape.replay

    def noted(self: Tape, *given: Any) -> None:
        seen.append(sum(t._version for t in buffers))
        real(self, *given)

    monkeypatch.setattr(Tape, "replay", noted)
    before = sum(t._version for t in buffers)
    g(x).sum().backward()
    assert seen[0] == before
    assert seen[1] == before + 1  # x
    assert sum(t._version for t in buffers) == before + 2  # dy


def test_threads_and_streams_share_one_object(device: str) -> None:
    model = mlp(device)
    expected = copy.deepcopy(model)  # the parameters of a module that is recorded are swapped
    g = graphed(model, batch_dim=0)
    wrong: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        stream = torch.cuda.Stream() if device == "cuda" else None
        with torch.no_grad(), torch.cuda.stream(stream):
            for i in range(30):
                x = torch.randn(1 + (seed + i) % 8, 4, generator=generator).to(device)
                y = g(x)
                if not torch.allclose(y, expected(x), atol=1e-4):
                    wrong.append(f"thread {seed}, call {i}")

    threads = [threading.Thread(target=work, args=(s,)) for s in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert g.counts.recorded == 4
