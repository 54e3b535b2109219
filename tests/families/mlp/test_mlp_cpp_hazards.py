"""The C++ whole-net kernels where things go wrong: threads, forks, extreme sizes and numbers."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.mlp import reference
from fastlinear.families.mlp.cpu import whole
from fastlinear.native import cpp_build

pytestmark = pytest.mark.skipif(
    cpp_build.reason_not() is not None, reason="C++ cannot be compiled here"
)
needs_threads = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="counts threads in /proc, forks"
)

_REGION = """
#include <cstdint>
using Forward = void (*)(int64_t, const int64_t*, const int32_t*, const float* const*,
                         const float* const*, const float*, float*, float* const*, int64_t);
extern "C" void region(Forward forward, int64_t m, const int64_t* widths, const int32_t* acts,
                       const float* const* weights, const float* const* biases, const float* x,
                       float* const* y) {
#pragma omp parallel for num_threads(2) schedule(static)
  for (int i = 0; i < 2; ++i) forward(2, widths, acts, weights, biases, x, y[i], nullptr, m);
}
"""


def net(m: int, *widths: int) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...]]:
    weights = tuple(torch.randn(n, k) * (2 / k) ** 0.5 for k, n in pairwise(widths))
    return torch.randn(m, widths[0]), weights, tuple(torch.randn(n) for n in widths[1:])


def verdict(x: Tensor, ws: Any, bs: Any, save: bool = False) -> Any:
    y, saved = whole.forward(x, ws, bs, "relu", "none", save)
    assert len(saved) == (len(ws) if save else 0)
    wide = [tuple(None if t is None else t.double() for t in part) for part in (ws, bs)]
    oracle = reference.mlp(x.double(), *wide, "relu", "none")
    return judge("y", y, reference.mlp(x, ws, bs, "relu", "none"), oracle)


def test_extreme_widths_and_rows() -> None:
    """One number a row, one row, and both; with and without bias; through every path."""
    for m in (1, 2, 16, 17, 64, 65, 513):
        for widths in ((1, 1), (1, 1, 1), (1, 700, 1), (3, 1, 2), (16, 16)):
            x, ws, bs = net(m, *widths)
            assert verdict(x, ws, bs, save=True).passed, (m, widths)
            assert verdict(x, ws, (None,) * len(ws)).passed, (m, widths)


def test_no_rows_and_no_features_through_the_op() -> None:
    """Empty calls never reach the kernels, and give what torch gives."""
    for m, widths in ((0, (5, 4, 3)), (2, (0, 4, 3)), (2, (5, 0, 3)), (2, (5, 4, 0))):
        x, ws, bs = net(max(m, 1), *(max(w, 1) for w in widths))
        x, ws = (
            x[:m, : widths[0]],
            tuple(w[:n, :k] for w, (k, n) in zip(ws, pairwise(widths), strict=True)),
        )
        bs = tuple(b[:n] for b, n in zip(bs, widths[1:], strict=True))
        assert torch.equal(fl.mlp(x, ws, bs), reference.mlp(x, ws, bs, "relu", "none"))


@pytest.mark.parametrize("activation", NAMES)
def test_gradients_far_out(activation: str) -> None:
    """At NaN and at the largest and smallest numbers the gradient is what float64 says."""
    numbers = [0.0, 1e-40, 9.0, 13.0, 14.0, 30.0, 86.0, 88.0, 90.0, 200.0, 1e19, 1e36]
    x = torch.tensor([float("nan"), *numbers, *[-v for v in numbers]]).view(-1, 1)
    if activation != "relu2":  # its own value overflows there
        x = torch.cat((x, torch.tensor([[3e38], [-3e38]])))
    weight, dy = torch.ones(1, 1), torch.ones_like(x)
    pre = activation_of(activation).saved == "pre"

    def gradient(module: Any, kind: torch.dtype) -> Tensor:
        given, w = x.to(kind), weight.to(kind)
        y = module.forward(given, (w,), (None,), "none", activation, True)[0]
        needs = (True, (True,), (False,))
        saved = given if pre else y  # one product a row: what is saved is x itself
        dx = module.backward(dy.to(kind), given, (w,), (saved,), "none", activation, needs)[0]
        assert isinstance(dx, Tensor)
        return dx

    ours, oracle = gradient(whole, torch.float32), gradient(reference, torch.float64)
    torch.testing.assert_close(ours, oracle.float(), rtol=2e-5, atol=1e-6, equal_nan=True)


@needs_threads
def test_a_forked_process_does_not_wait_for_threads_it_has_not() -> None:
    """OpenMP's pool does not survive a fork; a parallel region would never end there."""
    code = """
import os, signal, torch  # torch's own regions would not end there either: none is needed here
from fastlinear.kernels.cpu import elementwise
from fastlinear.families.mlp.cpu import whole
torch.set_num_threads(2)
x, weights = torch.randn(64, 256), tuple(torch.randn(256, 256) / 16 for _ in range(3))
many = torch.randn(2048, 256)
def run():
    y, saved = whole.forward(x, weights, (None,) * 3, "relu", "silu", True)
    needs = True, (True,) * 3, (False,) * 3
    dx = whole.backward(y, x, weights, saved, "relu", "silu", needs)[0]
    sums = elementwise.differentiate("relu", many, many, True)[1]
    elementwise.activate("silu", many, torch.empty_like(many))
    return torch.cat((dx.view(-1), sums))
before = run()
child = os.fork()
if child == 0:
    signal.alarm(20)
    os._exit(0 if run().equal(before) else 3)
status = os.waitpid(child, 0)[1]
assert run().equal(before)
raise SystemExit(status)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=200)
    assert done.returncode == 0


@needs_threads
def test_kernels_first_used_in_a_forked_process() -> None:
    """Its thread has had a pool of OpenMP's in the parent, by torch alone."""
    code = """
import os, signal, threading, torch
from fastlinear.kernels.cpu import elementwise
from fastlinear.native import cpp_build
from fastlinear.families.mlp.cpu import whole
torch.set_num_threads(2)
x, weights = torch.randn(64, 256), tuple(torch.randn(256, 256) for _ in range(3))
many, out = torch.randn(2048, 256), torch.empty(2048, 256)
many.relu() + many @ weights[0]
cpp_build._lock.acquire()  # as another thread of the parent may hold it
child = os.fork()
if child == 0:
    signal.alarm(60)
    y = whole.forward(x, weights, (None,) * 3, "relu", "silu", False)[0]
    elementwise.activate("silu", many, out)
    same = []
    def work():  # a thread of the child's own may have a pool
        same.append(whole.forward(x, weights, (None,) * 3, "relu", "silu", False)[0].equal(y))
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    os._exit(0 if same == [True] else 3)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=200)
    assert done.returncode == 0


@needs_threads
def test_new_threads_obey_torch_and_agree() -> None:
    """A thread that torch has not used takes as many threads as torch was told; several at once."""
    code = """
import os, threading, torch
from fastlinear.families.mlp.cpu import whole
torch.set_num_threads(1)
x, weights = torch.randn(64, 256), tuple(torch.randn(256, 256) for _ in range(3))
def run():
    return whole.forward(x, weights, (None,) * 3, "relu", "silu", False)[0]
expected, results, counts = run(), [], []
def work():
    for _ in range(20):
        results.append(run())
    counts.append(len(os.listdir("/proc/self/task")))
work()
alone = counts.pop()
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
for t in threads: t.join()
assert len(results) == 80 and all(r.equal(expected) for r in results)
assert max(counts) <= alone + 3, (alone, counts)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=200)
    assert done.returncode == 0


@needs_threads
def test_within_a_parallel_region_and_at_once(tmp_path: Path) -> None:
    """Called by all threads of somebody else's parallel region: each computes alone."""
    source = tmp_path / "region.cpp"
    source.write_text(_REGION)
    region = cpp_build.load(source).region
    region.argtypes = [ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 6]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for m in (3, 40, 600):
            x, ws, bs = net(m, 128, 128, 128)
            y, other = x.new_empty(m, 128), x.new_empty(m, 128)
            widths = (ctypes.c_int64 * 3)(128, 128, 128)
            acts = (ctypes.c_int32 * 2)(*whole.codes(2, "relu", "none"))
            pointers = [(ctypes.c_void_p * 2)(*(t.data_ptr() for t in part)) for part in (ws, bs)]
            places = (ctypes.c_void_p * 2)(y.data_ptr(), other.data_ptr())
            region(whole.address(), m, widths, acts, *pointers, x.data_ptr(), places)
            expected = whole.forward(x, ws, bs, "relu", "none", False)[0]
            assert torch.equal(y, expected)
            assert torch.equal(other, expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("m", [512, 700, 1300])
@pytest.mark.parametrize("widths", [(256, 320), (512, 64), (144, 512)])
def test_many_rows_of_one_wide_layer(m: int, widths: tuple[int, int]) -> None:
    """A single layer's weight is turned where rows are many: the same bits as by blocks."""
    x, ws, bs = net(m, *widths)
    assert verdict(x, ws, bs, save=True).passed
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(whole.forward(x, ws, bs, "relu", "gelu", True))
        blocks = [whole.forward(x[i : i + 64], ws, bs, "relu", "gelu", True) for i in (0, 448)]
    finally:
        torch.set_num_threads(before)
    for y, (pre,) in results[1:]:
        assert torch.equal(y, results[0][0])
        assert torch.equal(pre, results[0][1][0])
    for i, (y, _) in zip((0, 448), blocks, strict=True):
        assert torch.equal(y, results[0][0][i : i + 64])
