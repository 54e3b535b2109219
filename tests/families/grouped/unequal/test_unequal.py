"""unequal_linear: layers of different sizes; its kernels on a GPU, their compilation anywhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.families.grouped.unequal import autograd
from fastlinear.families.grouped.unequal.autograd import Formula, applied
from fastlinear.families.grouped.unequal.cuda import compiled
from fastlinear.families.grouped.unequal.cuda.config import (
    ADD,
    EXTRAS,
    FORWARD,
    OFFERED,
    PLAIN,
    SINGLE,
    SINGLES,
)
from fastlinear.families.grouped.unequal.spec import FRONT
from fastlinear.native import cuda_driver

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
on_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device")
# (tokens, K, N)
SIZES = (
    *((5, 3, 4), (1, 7, 65), (70, 100, 33), (64, 64, 64), (130, 31, 1), (0, 8, 9), (2, 130, 70)),
    (4, 0, 5),
)
SHARED_BYTES = {"sm_80": 163 << 10, "sm_90a": 227 << 10, "sm_100a": 227 << 10}
Lists = tuple[list[Tensor], list[Tensor], list[Tensor | None]]


def drawn(dtype: torch.dtype, sizes: tuple[tuple[int, int, int], ...] = SIZES) -> Lists:
    generator = torch.Generator().manual_seed(len(sizes))

    def values(*shape: int) -> Tensor:
        made = torch.randn(shape, generator=generator) / max(1, shape[-1]) ** 0.5
        return made.to(dtype).to(DEVICE).requires_grad_()

    xs = [values(m, k) for m, k, _ in sizes]
    weights = [values(n, k) for _, k, n in sizes]
    biases = [values(n) if i % 3 else None for i, (_, _, n) in enumerate(sizes)]
    return xs, weights, biases


def widened(lists: Lists) -> Lists:
    def wide(t: Tensor | None) -> Any:
        return None if t is None else t.detach().double().requires_grad_()

    return tuple([wide(t) for t in ts] for ts in lists)  # type: ignore[return-value]


def results(run: Any, lists: Lists, activation: str) -> list[Tensor]:
    ys = run(*lists, activation)
    dys = [torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape).to(y) for y in ys]
    given = [t for ts in lists for t in ts if t is not None]
    return [*ys, *torch.autograd.grad(ys, given, dys)]


def together(xs: Any, weights: Any, biases: Any, activation: str) -> list[Tensor]:
    return fl.unequal_linear(xs, weights, biases, activation=activation, backend="together")


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_kernels(activation: str, dtype: torch.dtype) -> None:
    lists = drawn(dtype)
    torch.full((1 << 20,), float("nan"), device=DEVICE)  # what new memory holds
    found = results(together, lists, activation)
    theirs = results(autograd.loop, lists, activation)
    oracle = results(autograd.loop, widened(lists), activation)
    count = len(SIZES)  # a lone number may be right to the last bit in PyTorch: all of a kind count
    for i, name in enumerate(("y", "dx", "dW", "db")):
        kind = slice(i * count, (i + 1) * count)
        a, t, o = (torch.cat([r.flatten() for r in rs[kind]]) for rs in (found, theirs, oracle))
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)
    again = results(together, lists, activation)
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))


DEEP = (
    tuple((1, k, 16) for k in (1024, 8, 32, 15, 130)),
    ((400, 1984, 64), (300, 1001, 33), (93, 70, 16)),
    tuple((1 + g % 4, 16 + 131 * g % 880, 16 + 97 * g % 432) for g in range(26)),
    tuple((1 + g % 4, 819 * (1 + g % 5), 4096 >> g % 3) for g in range(10)),
    ((16, 2048, 2048), (0, 8, 9), (9, 3000, 5)),
    ((64, 512, 512),) * 8,
)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("sizes", DEEP, ids=lambda sizes: f"{len(sizes)} groups")
def test_float32_of_few_rows_and_deep_sums(
    sizes: tuple[tuple[int, int, int], ...], activation: str
) -> None:
    """Low tiles and shares: as exact as PyTorch, the same every time and in a graph."""
    lists = drawn(torch.float32, sizes)
    torch.full((1 << 24,), float("nan"), device=DEVICE)  # what new memory holds
    found = results(together, lists, activation)
    theirs = results(autograd.loop, lists, activation)
    oracle = results(autograd.loop, widened(lists), activation)
    count = len(sizes)
    for i, name in enumerate(("y", "dx", "dW", "db")):
        kind = slice(i * count, (i + 1) * count)
        a, t, o = (torch.cat([r.flatten() for r in rs[kind]]) for rs in (found, theirs, oracle))
        verdict = judge(name, a, t, o)
        assert verdict.passed, str(verdict)
    with torch.no_grad():
        together(*lists, activation)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = together(*lists, activation)
        graph.replay()
        torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(recorded, found, strict=False))
    assert all(
        torch.equal(a, b) for a, b in zip(results(together, lists, activation), found, strict=True)
    )


@on_gpu
@pytest.mark.gpu
def test_one_launch_forward_and_two_backward_in_a_graph() -> None:
    from benchmarks.harness.kernels import kernels_of

    lists = drawn(torch.bfloat16)

    def forward() -> Any:
        with torch.no_grad():
            return together(*lists, "gelu")

    def step() -> Any:
        return results(together, lists, "gelu")

    assert len(kernels_of(forward, torch.device("cuda"))) == 1
    ys = together(*lists, "gelu")
    dys = [torch.ones_like(y) for y in ys]
    given = [t for ts in lists for t in ts if t is not None]

    def backward() -> Any:
        return torch.autograd.grad(ys, given, dys, retain_graph=True)

    assert len(kernels_of(backward, torch.device("cuda"))) == 2
    torch.cuda.set_sync_debug_mode("error")
    try:
        forward()
        backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected = forward()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = forward()
    graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, e) for a, e in zip(recorded, expected, strict=True))


@on_gpu
@pytest.mark.gpu
@pytest.mark.usefixtures("nodes_built")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", ["none", "relu", "gelu"])
@pytest.mark.parametrize("times", [1, 5])
def test_calls_that_come_again_need_no_python(
    activation: str, dtype: torch.dtype, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit what Python launches, also in a graph."""
    xs, weights, biases = lists = drawn(dtype, SIZES * times)
    expected = results(lambda *given: applied(Formula(activation), *given[:3]), lists, activation)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            results(together, lists, activation)
            with torch.no_grad():
                together(*lists, activation)

    def fails(*_: Any, **__: Any) -> None:
        raise AssertionError("in Python")

    torch.cuda.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(FRONT, "looked_up", fails)
        patch.setattr(autograd, "kernels", fails)
        torch.full((1 << 20,), float("nan"), device=DEVICE)  # what new memory holds
        ys = together(*lists, activation)
        assert ys[0].grad_fn is not None
        assert ys[0].grad_fn.name() == "UnequalLinearBackward"
        del ys
        with torch.no_grad():
            quiet = together(xs, weights, biases, activation)
        found = results(together, lists, activation)
    # Leaves of a graph are met on its stream first: theirs are held by the results above.
    again = tuple([None if t is None else t.detach().requires_grad_() for t in ts] for ts in lists)
    with torch.cuda.stream(side):
        results(together, again, activation)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        kept = results(together, again, activation)
    graph.replay()
    torch.cuda.synchronize()
    for calls in (found, kept, quiet):
        for a, e in zip(calls, expected[: len(calls)], strict=True):
            assert torch.equal(a, e)


@on_gpu
@pytest.mark.gpu
def test_more_groups_than_a_launch_takes_and_weights_that_move() -> None:
    sizes = tuple((1 + g % 5, 3 + g % 7, 2 + g % 4) for g in range(2 * compiled.MAX_GROUPS + 3))
    for _ in range(2):
        lists = drawn(torch.float32, sizes)
        found, expected = together(*lists, "relu"), autograd.loop(*lists, "relu")
        for a, e in zip(found, expected, strict=True):
            torch.testing.assert_close(a, e)


@on_gpu
@pytest.mark.gpu
def test_strides_dimensions_and_second_derivatives() -> None:
    xs = [torch.randn(2, 8, 5, device=DEVICE).transpose(1, 2), torch.randn(6, device=DEVICE)]
    weights = [torch.randn(8, 3, device=DEVICE).t(), torch.randn(4, 12, device=DEVICE)[:, ::2]]
    given = [t.requires_grad_() for t in (*xs, *weights)]

    def second(run: Any) -> Any:
        ys = run(xs, weights, [None, None], "tanh")
        (dx,) = torch.autograd.grad([y.square().sum() for y in ys], given[:1], create_graph=True)
        return [*ys, *torch.autograd.grad(dx.square().sum(), [given[0], given[2]])]

    for a, e in zip(second(together), second(autograd.loop), strict=True):
        torch.testing.assert_close(a, e)


@on_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_pieces_of_one_tensor(dtype: torch.dtype) -> None:
    """Bit for bit as dense copies of them, at the first call and by tapes."""
    for sizes in (((64, 32), (8, 72), (40, 16), (24, 8)), ((33, 7), (10, 66), (1, 8), (64, 5))):
        weights = [torch.randn(n, k, device=DEVICE, dtype=dtype) for k, n in sizes]
        for w in weights:
            w.requires_grad_()
        x, dy = (
            torch.randn(70, 3 + sum(size[i] for size in sizes), device=DEVICE, dtype=dtype)
            for i in (0, 1)
        )
        for skipped in (0, 3):
            xs = x[:, skipped : skipped + x.shape[1] - 3].split([k for k, _ in sizes], 1)
            dys = dy[:, skipped : skipped + dy.shape[1] - 3].split([n for _, n in sizes], 1)
            expected = together([t.contiguous() for t in xs], weights, None, "relu")
            grads = torch.autograd.grad(expected, weights, [t.contiguous() for t in dys])
            for _ in range(4):
                ys = fl.unequal_linear(xs, weights, activation="relu", backend="together")
                found = torch.autograd.grad(ys, weights, dys)
                for a, e in zip((*ys, *found), (*expected, *grads), strict=True):
                    assert torch.equal(a, e)


def test_loop_is_right_anywhere() -> None:
    lists = drawn(torch.float64)
    ys = fl.unequal_linear(*lists, activation="silu")
    for y, x, w, b in zip(ys, *lists, strict=True):
        pre = x @ w.t() + (0 if b is None else b)
        torch.testing.assert_close(y, torch.nn.functional.silu(pre))
    assert fl.unequal_linear([], []) == []


def test_autocast() -> None:
    lists = drawn(torch.float32, SIZES[:2])
    with torch.autocast(DEVICE, torch.bfloat16):
        ys = fl.unequal_linear(*lists)
    assert {y.dtype for y in ys} == {torch.bfloat16}


def test_compiles_whole() -> None:
    xs, weights, _ = drawn(torch.float32, SIZES[:2])

    def run(xs: list[Tensor]) -> list[Tensor]:
        return fl.unequal_linear(xs, weights, activation="relu")

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for a, e in zip(compiled(xs), run(xs), strict=True):
        torch.testing.assert_close(a, e)


def test_clear_errors() -> None:
    x, w, b = torch.ones(5, 3), torch.ones(4, 3), torch.ones(4)
    bad: list[tuple[str, Any, Any, Any, dict[str, Any]]] = [
        ("as many inputs", [x], [w, w], None, {}),
        ("weight 0 to be a tensor", [x], [[1.0]], None, {}),
        ("weight 0 of shape", [x], [w[0]], None, {}),
        ("input 1 with 3 features", [x, x.t()], [w, w], None, {}),
        ("bias 0 of shape", [x], [w], [b[:2]], {}),
        ("weight 1 of dtype", [x, x], [w, w.double()], None, {}),
        ("activation in", [x], [w], None, {"activation": "swish"}),
        ("backend in", [x], [w], None, {"backend": "fast"}),
        ("a dtype in", [x.long()], [w.long()], None, {}),
    ]
    for expected, xs, weights, biases, more in bad:
        with pytest.raises(InputError, match=expected):
            fl.unequal_linear(xs, weights, biases, **more)
    with pytest.raises(UnsupportedError, match="float64"):
        fl.unequal_linear([x.double()], [w.double()], backend="together")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a"])
def test_kernels_compile_without_spilling(arch: str, tmp_path: Path) -> None:
    try:
        cuda_driver._nvrtc()
    except cuda_driver.DriverError:
        pytest.skip("no NVRTC here")
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        pytest.skip("cuobjdump comes with triton")
    tool = Path(spec.origin).parent / "backends/nvidia/bin/cuobjdump"
    specialised = [
        (dtype, mode, activation, tiles, *kind)
        for kind, activations in (
            ((False, ()), ("none", "gelu")),
            ((True, EXTRAS), ("relu", "gelu")),
        )
        for dtype in (torch.bfloat16, torch.float32)
        for mode in range(3)
        for activation in activations
        for tiles in (
            SINGLES
            if dtype is torch.float32
            else PLAIN
            if (mode, activation) == (1, "none")
            else OFFERED[mode]
        )
        if mode or activation != "relu"
    ]
    sums = (False, ("ADDS", "EARLY"))
    specialised += [(torch.float32, ADD, name, SINGLE, *sums) for name in ("none", "gelu")]
    every = 1 if arch == "sm_90a" else 4  # of the others a sample
    for dtype, mode, activation, tiles, pitched, extras in specialised[::every]:
        save_pre = mode in (FORWARD, ADD) and activation == "gelu"
        rest = {"pitched": pitched, "extras": extras}
        text = compiled.source(dtype, mode, activation, save_pre, tiles, **rest)
        cubin = tmp_path / "kernel.cubin"
        cubin.write_bytes(cuda_driver.compile_cubin(text, "half.cu", arch))
        told = subprocess.run(
            [tool, "--dump-resource-usage", cubin], capture_output=True, text=True, check=True
        ).stdout
        stack = re.search(r"STACK:(\d+) ", told)
        assert stack is not None, told
        # two large blocks of 128 registers a multiprocessor: a third faster than one, spilt or not
        allowed = 48 if tiles.blocks == 2 and tiles.cols == 128 else 0
        assert int(stack[1]) <= allowed, (mode, activation, tiles, told)
        assert (
            tiles.shared_bytes(mode not in (FORWARD, ADD) and activation != "none", True)
            <= SHARED_BYTES[arch]
        )
