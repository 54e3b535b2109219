"""Memory of large results on a CPU that is kept for the next ones."""

from __future__ import annotations

import os
import platform
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.core.errors import InputError
from fastlinear.core.settings import kept_bytes
from fastlinear.fastpath import autograd_node, lookup
from fastlinear.kernels.cpu import allocator

pytestmark = pytest.mark.skipif(
    autograd_node.reason_not() is not None, reason="no C++ library here"
)
ROWS, FEATURES = 8192, 1024
SIZE = 4 * ROWS * FEATURES  # bytes in float32


@pytest.fixture(autouse=True)
def _library() -> Iterator[None]:
    assert autograd_node.wait(), autograd_node.reason_not()
    fl.release_memory()
    yield
    fl.release_memory()


def large(value: float, more: int = 0) -> Tensor:
    return allocator.empty((ROWS + more, FEATURES), torch.float32).fill_(value)


def test_memory_is_used_again_and_never_twice_at_a_time() -> None:
    first, second = large(1.0), large(2.0)
    assert first.data_ptr() != second.data_ptr()
    place = first.data_ptr()
    assert place % (1 << 21) == 0
    del first
    third, fourth = large(3.0), large(4.0)
    assert third.data_ptr() == place
    found = [t.unique().tolist() for t in (second, third, fourth)]
    assert found == [[2.0], [3.0], [4.0]]


def test_results_that_are_kept_get_no_new_pages() -> None:
    x, weight, bias = torch.randn(ROWS, FEATURES), torch.randn(FEATURES), torch.randn(FEATURES)
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    dy = torch.ones(ROWS, FEATURES)

    def step() -> tuple[Tensor, ...]:
        y = fl.diagonal_linear(*leaves, activation="silu", backend="cpp")
        return torch.autograd.grad(y, leaves, dy)

    for _ in range(3):
        step()
        lookup.settle()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(4):
        found = step()
    pages = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    assert pages < 4 * 2 * SIZE / (1 << 21)  # that many if each result were new
    reference = [t.detach().double().requires_grad_() for t in leaves]
    y = torch.nn.functional.silu(reference[0] * reference[1] + reference[2])
    for a, b in zip(found, torch.autograd.grad(y, reference, dy.double()), strict=True):
        torch.testing.assert_close(a, b.float(), rtol=1e-4, atol=1e-3)


def test_results_of_a_call_keep_their_places() -> None:
    """Call by call: stores around the caches are slow where the caches hold another result."""

    def places() -> tuple[int, int]:
        y, dx = large(1.0), large(2.0)
        return y.data_ptr(), dx.data_ptr()

    first = sorted(places())
    assert [list(places()) for _ in range(4)] == [first] * 4


def test_idle_memory_is_lent_to_the_system() -> None:
    """After a while; its next result finds it as good as new."""
    a, b = large(1.0), large(2.0, more=ROWS)
    del b
    for _ in range(70):
        large(3.0)
    again = large(4.0, more=ROWS)
    assert again.unique().tolist() == [4.0]
    assert a.unique().tolist() == [1.0]


def test_what_is_free_is_given_back() -> None:
    assert fl.release_memory() == 0
    a, b = large(1.0), large(1.0, more=512)
    size = b.numel() * 4
    del a, b
    assert fl.release_memory() == SIZE + size
    assert fl.release_memory() == 0
    kept = large(1.0)
    assert fl.release_memory() == 0  # it is in use
    assert kept.sum() == kept.numel()


def test_what_is_kept_stands_in_no_ones_way() -> None:
    """Where memory may not grow any more, what is idle makes room."""
    script = """
import resource, torch, fastlinear as fl
from fastlinear.fastpath import autograd_node
from fastlinear.kernels.cpu import allocator
assert autograd_node.wait()
tensors = [allocator.empty((10 << 20,), torch.float32) for _ in range(8)]
del tensors
with open("/proc/self/statm") as f:
    size = int(f.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (size + (64 << 20),) * 2)
print(allocator.empty((40 << 20,), torch.float32).numel(), fl.release_memory())
"""
    said = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"FASTLINEAR_KEEP_MIB": "1000"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert said.stdout.split()[0] == str(40 << 20)


def test_a_much_larger_block_is_left_for_larger_results() -> None:
    a = large(1.0, more=ROWS)
    place = a.data_ptr()
    del a
    small = large(1.0)
    assert small.data_ptr() != place
    assert large(1.0, more=ROWS - 512).data_ptr() == place  # less than an eighth larger


def test_no_more_is_kept_than_allowed() -> None:
    script = """
import torch, fastlinear as fl
from fastlinear.fastpath import autograd_node
from fastlinear.kernels.cpu import allocator
assert autograd_node.wait()
tensors = [allocator.empty((4096, 4096), torch.float32) for _ in range(3)]
del tensors
print(fl.release_memory() >> 20)
"""

    def kept(mib: str) -> int:
        said = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | {"FASTLINEAR_KEEP_MIB": mib},
            capture_output=True,
            text=True,
            check=True,
        )
        return int(said.stdout)

    assert kept("0") == 0
    assert kept("130") == 128  # two of 64 MiB
    assert kept("1000") == 192


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="about glibc's malloc")
def test_malloc_keeps_smaller_results() -> None:
    """Steps of three results of 23 MiB have no new pages, unless somebody has decided on malloc."""
    script = """
import resource, torch, fastlinear as fl
from fastlinear.fastpath import autograd_node, lookup
assert lookup.wait() and autograd_node.wait()  # a compiler's start has pages copied
w = torch.ones(4096, requires_grad=True)
for _ in range(4):  # the first call that is recorded
    fl.diagonal_linear(torch.ones(64, 4096), w, backend="cpp").sum().backward()
x = torch.ones(1500, 4096)
def faults(steps):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(steps):
        a = x * 2.0
        b = a + 1.0
        c = b.relu()
        del a, b, c
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(5)
kept = min(faults(20) for _ in range(3))
fl.release_memory()
print(kept, faults(1))
"""

    def faults(**more: str) -> list[int]:
        decided = ("MALLOC_", "GLIBC_TUNABLES")
        env = {k: v for k, v in os.environ.items() if not k.startswith(decided)}
        said = subprocess.run(
            [sys.executable, "-c", script],
            env=env | {"FASTLINEAR_KEEP_MIB": "1000"} | more,
            capture_output=True,
            text=True,
            check=True,
        )
        return [int(word) for word in said.stdout.split()]

    kept, behind_release = faults()
    assert kept < 300
    assert behind_release > 1000, "it was given back"
    each = {f"MALLOC_{name}_THRESHOLD_": str(1 << 20) for name in ("MMAP", "TRIM")}
    assert faults(**each)[0] > 20 * 30, "large pages at least"


def test_a_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTLINEAR_KEEP_MIB", "12")
    assert kept_bytes() == 12 << 20
    monkeypatch.setenv("FASTLINEAR_KEEP_MIB", "plenty")
    with pytest.raises(InputError, match=r"FASTLINEAR_KEEP_MIB.*whole number of MiB"):
        kept_bytes()
    script = "from fastlinear.fastpath import autograd_node as d; print(d.wait(), d.reason_not())"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith("False FASTLINEAR_KEEP_MIB: expected a whole number")


def test_a_result_is_a_tensor_like_others() -> None:
    t = large(5.0)
    copy = t.clone()
    t.resize_(4, 4)  # smaller: the memory stays
    assert t.unique().tolist() == [5.0]
    t.resize_(2 * ROWS, FEATURES)
    assert t.flatten()[: copy.numel()].unique().tolist() == [5.0]
    assert copy.share_memory_().is_shared()
    assert t.numpy()[0, 0] == 5.0
    assert t.share_memory_().is_shared()
    assert large(6.0).unique().tolist() == [6.0]
    for shape in ((allocator.LEAST // 4,), (allocator.LEAST // 4 - 1,)):
        assert allocator.empty(shape, torch.float32).shape == shape
    small = allocator.empty((3, 5), torch.bfloat16)
    assert (small.shape, small.dtype) == ((3, 5), torch.bfloat16)
    assert allocator.empty((ROWS, FEATURES), torch.int64).dtype is torch.int64


def test_the_profiler_sees_it() -> None:
    with torch.profiler.profile(profile_memory=True) as seen:
        for _ in range(2):  # a new block, then the same again
            t = large(1.0)
            del t
    told = [e.cpu_memory_usage for e in seen.events() if e.name == "[memory]"]
    assert [u for u in told if abs(u) == SIZE] == 2 * [SIZE, -SIZE]


def test_threads_and_forked_processes() -> None:
    wrong: list[float] = []

    def work(value: float) -> None:
        for _ in range(20):
            t = large(value)
            if t[0, 0] != value or t[-1, -1] != value or t.sum() != value * t.numel():
                wrong.append(value)
            del t

    threads = [threading.Thread(target=work, args=(float(v),)) for v in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    mine = large(7.0)
    idle = large(8.0)
    del idle
    child = os.fork()
    if child == 0:
        good = False
        try:
            torch.set_num_threads(1)
            here = allocator.empty((ROWS, FEATURES), torch.float32)
            here[0, 0] = 9.0
            good = bool(mine[0, 0] == 7.0) and bool(here[0, 0] == 9.0)
        finally:
            os._exit(0 if good else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert mine.unique().tolist() == [7.0]
