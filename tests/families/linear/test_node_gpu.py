"""Training calls recorded in C++, on a GPU: the very results of the Python formula."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from typing import Any

import pytest
import torch

from fastlinear.families.linear.autograd import LinearAct
from tests.families.compiled_nodes import needs_nodes
from tests.families.linear.node_ways import ALL, Way, able, leaves, same, trained

pytestmark = needs_nodes


LAUNCHED = [
    ({"forward": "triton", "backward": "triton"}, (2, 64)),
    ({"forward": "triton", "grad_pre": "triton"}, (300,)),
    ({"grad_pre": "triton", "grad_input": "triton", "grad_weight": "triton"}, (64, 300)),
    ({"forward": "cuda", "backward": "triton"}, (1, 64)),
    ({"forward": "cuda", "grad_pre": "triton"}, (300, 4096)),
    ({}, (1, 300)),
]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # autograd's own thread, at first
@pytest.mark.parametrize("case", LAUNCHED, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_launches_give_the_bits_of_the_python_formula(case: Any, dtype: str) -> None:
    names, rows = case
    if not able(names, "gelu", "cuda", dtype):
        pytest.skip("a backend does not serve this")
    kind: dict[str, Any] = {"device": "cuda", "dtype": getattr(torch, dtype)}
    for m, activation in itertools.product(rows, ("none", "relu", "gelu_tanh")):
        for shape, needs in (((m, 160), ALL), ((2, m, 160), ALL), ((m, 160), (False, True, True))):
            if activation == "relu" and (len(shape) == 3 or needs != ALL):
                continue
            if "backward" in names and shape[0] * m > 64 and len(shape) == 3:
                continue
            given = leaves(*shape, n=96, needs=needs, **kind)
            wanted = [t for t in given if t.requires_grad]
            way = Way(trained(activation, **names), *given)
            expected = LinearAct.apply(*given, way.formula)
            for _ in range(3):
                dy = torch.randn(expected.shape, **kind)
                before = torch.autograd.grad(expected, wanted, dy, retain_graph=True)
                ran = way.ran
                y = way(*given)
                same(
                    [y, *torch.autograd.grad(y, wanted, dy)],
                    [expected, *before],
                )
            # what takes descriptors or more than launches is Python's
            more = ("grad_weight" in names and m > 64) or (activation == "none" and m > 2000)
            assert way.ran == ran or more, (m, activation, shape)


@pytest.mark.gpu
def test_streams_and_threads() -> None:
    x, w, b = leaves(64, 128, n=128, device="cuda", dtype=torch.bfloat16)
    way = Way(trained("gelu_tanh", forward="triton", backward="triton"), x, w, b)
    dy = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16)
    expected = torch.autograd.grad(way(x, w, b), (x, w, b), dy)
    same(torch.autograd.grad(way(x, w, b), (x, w, b), dy), expected)
    side = torch.cuda.Stream()
    for _ in range(3):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(10_000_000)
            late = dy * 1
            found = torch.autograd.grad(way(x, w, b), (x, w, b), late)
        torch.cuda.current_stream().wait_stream(side)
        same(found, expected)
    results: list[Any] = []

    def work() -> None:
        torch.cuda.current_stream().synchronize()  # a thread's first call makes it known to CUDA
        results.extend(torch.autograd.grad(way(x, w, b), (x, w, b), dy) for _ in range(30))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    torch.cuda.synchronize()
    assert len(results) == 120
    for found in results:
        same(found, expected)


@pytest.mark.gpu
def test_memory_on_the_device_is_given_back() -> None:
    x, w, b = leaves(64, 512, n=512, device="cuda")
    way = Way(trained("gelu_tanh"), x, w, b)
    for _ in range(3):
        torch.autograd.grad(way(x, w, b).sum(), (x, w, b))
    torch.cuda.synchronize()
    gc.collect()  # what recording a call left
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        torch.autograd.grad(way(x, w, b).sum(), (x, w, b))
    gc.collect()
    end = time.monotonic() + 10  # autograd's own thread may hold the last gradients for a moment
    while torch.cuda.memory_allocated() != before and time.monotonic() < end:
        time.sleep(0.01)
    assert torch.cuda.memory_allocated() == before
