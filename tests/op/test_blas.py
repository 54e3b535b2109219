"""A capture takes PyTorch's products where the calls before it took kernels of ours."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from threading import Thread, get_ident, local
from typing import Any

import pytest
import torch

from fastlinear.native import cuda_driver
from fastlinear.op import blas

_SCRIPT = """
import torch, fastlinear as fl
x = torch.randn(64, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
w = torch.randn(128, 96, device="cuda", dtype=torch.bfloat16, requires_grad=True)
b = torch.randn(128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
dy = torch.ones(64, 128, device="cuda", dtype=torch.bfloat16)
def step(backend):
    y = fl.linear_act(x, w, b, activation="silu", backend=backend)
    grads = torch.autograd.grad(y, (x, w, b), dy)
    return y.detach(), *grads  # a graph that lives on keeps its nodes to the stream of before
for _ in range(3):
    known = step("triton")
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="{mode}"):
    found = step("eager")
graph.replay()
torch.cuda.synchronize()
for a, b in zip(found, known):
    assert (a.float() - b.float()).norm() <= 0.02 * b.float().norm()
"""


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["global", "thread_local"])
def test_a_capture_may_be_the_first_to_take_products_of_pytorch(mode: str) -> None:
    script = _SCRIPT.replace("{mode}", mode)  # a process of its own: no thread has a handle
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Which handles were asked for, on a machine that need not have a GPU."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(blas, "_make", made.append)
    monkeypatch.setattr(blas, "_of_backwards", set())
    return made


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
def test_backwards_have_theirs_after_one_plan(mode: Any, asked: list[torch.device]) -> None:
    place = torch.device("cpu")
    with mode(), torch.enable_grad():
        blas.make_ready(place)
        assert asked == [place]
        for _ in range(2):
            blas.make_ready(place, True)
    assert len(asked) == 1 + 2 + 1


def test_inside_a_backward_it_waits_for_nobody(asked: list[torch.device]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: blas.make_ready(torch.device("cpu"), True))
    y.sum().backward()
    assert len(asked) == 1
    assert not blas._of_backwards


def test_each_thread_makes_a_handle_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, made = torch.device("cuda", 0), []
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(cuda_driver, "loading_allowed", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: made.append(get_ident()))
    monkeypatch.setattr(blas, "_made", local())
    threads = [Thread(target=lambda: [blas._make(device) for _ in range(3)]) for _ in range(2)]
    for thread in threads:
        thread.start()
        thread.join()
    assert len(made) == 2
