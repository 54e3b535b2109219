"""A capture takes PyTorch's products where the calls before it took kernels of ours."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from threading import Thread, get_ident, local

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
