"""The compiled fast path serves linear_act's calls with the very results of the Python way."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import BaseTorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import fastlinear as fl
from fastlinear.activations.reference import NAMES
from fastlinear.core.compare import judge
from fastlinear.core.errors import InputError
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.families.linear import reference, spec
from fastlinear.families.linear.cpu import onednn
from fastlinear.families.linear.problem import problem
from fastlinear.families.linear.spec import FRONT
from fastlinear.fastpath import autograd_node, lookup, recorded, recorder

needs_fastpath = pytest.mark.skipif(
    lookup.reason_not() is not None, reason="no compiled fast path here"
)
pytestmark = needs_fastpath

KINDS = [(name, None) for name in NAMES] + [("silu", "cpp"), ("relu2", "onednn")]
Given = tuple[Tensor, Tensor, Tensor | None]


@pytest.fixture(scope="module", autouse=True)
def _built() -> None:
    assert lookup.wait(), lookup.reason_not()
    assert autograd_node.wait(), autograd_node.reason_not()


@pytest.fixture
def table() -> Iterator[lookup.Table]:
    found = lookup.table("linear_act")
    assert found is not None
    yield found
    cache.forget()


def given(m: int = 5, k: int = 16, n: int = 8, **kind: Any) -> Given:
    return torch.randn(m, k, **kind), torch.randn(n, k, **kind), torch.randn(n, **kind)


def twice(call: Callable[[], Tensor]) -> Tensor:
    """The result of a call and its repetition: from the next one on the fast path serves it."""
    y = call()
    assert torch.equal(call(), y)
    return y


def only_fastpath(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on a call that the fast path does not serve fails."""
    monkeypatch.setattr(FRONT, "looked_up", None)


@pytest.mark.parametrize(("activation", "backend"), KINDS)
def test_the_third_call_is_the_fast_paths(
    activation: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = [given(), (torch.randn(2, 3, 16), *given()[1:]), (*given()[:2], None)]
    calls += [(torch.randn(16, 5).t(), torch.randn(16, 8).t(), torch.randn(16)[::2])]

    def run(*c: Any) -> Tensor:
        return fl.linear_act(*c, activation=activation, backend=backend)

    before = [twice(partial(run, *c)) for c in calls]
    only_fastpath(monkeypatch)
    for c, y in zip(calls, before, strict=True):
        assert torch.equal(run(*c), y)


@pytest.mark.parametrize(("activation", "backend"), KINDS)
def test_gradients_through_the_fast_path(
    activation: str, backend: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for needs in itertools.product((False, True), repeat=3):
        tensors = [t.requires_grad_(n) for t, n in zip(given(), needs, strict=True)]

        def gradients(tensors: list[Tensor] = tensors, needs: Any = needs) -> list[Tensor]:
            y = fl.linear_act(*tensors, activation=activation, backend=backend)
            if not any(needs):
                return [y]
            wanted = [t for t in tensors if t.requires_grad]
            return [y, *torch.autograd.grad(y, wanted, torch.ones_like(y))]

        before = gradients()
        gradients()
        with monkeypatch.context() as patch:
            patch.setattr(FRONT, "looked_up", None)
            after = gradients()
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


def test_a_plan_serves_only_calls_like_its_own(table: lookup.Table) -> None:
    """Whatever fact of a call differs, the plan of another is not taken."""
    cache.forget()
    x, w, b = given()
    call = (x, w, b, "relu", None)
    twice(lambda: fl.linear_act(x, w, b, activation="relu"))
    assert table.call(*call) is not None

    def misses(i: int, value: Any) -> bool:
        return table.call(*call[:i], value, *call[i + 1 :]) is None

    assert misses(0, torch.randn(4, 16))
    assert misses(0, torch.randn(16, 5).t())
    assert misses(0, x[None])
    assert misses(0, x.double())
    assert misses(0, x.to("meta"))
    assert misses(0, torch._neg_view(x))
    assert misses(0, x.to_sparse())
    assert misses(0, x.as_subclass(type("Own", (Tensor,), {})))
    assert misses(0, x.clone().requires_grad_())
    assert misses(0, "x")
    assert misses(1, torch.randn(16, 8).t())
    assert misses(2, None)
    assert misses(2, torch.randn(16)[::2])
    assert misses(2, torch._neg_view(b))
    assert misses(3, "gelu")
    assert misses(3, ["relu"])
    assert misses(4, "eager")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert table.call(*call) is None
    with torch.inference_mode():
        assert table.call(*call) is None
    with torch.autograd.forward_ad.dual_level():
        assert table.call(*call) is None
    with FlopCounterMode(display=False):
        assert table.call(*call) is None
    with BaseTorchFunctionMode():
        assert table.call(*call) is None
    torch.set_float32_matmul_precision("high")
    assert table.call(*call) is None
    torch.set_float32_matmul_precision("highest")
    seen = []
    torch.func.vmap(lambda row: (seen.append(table.call(row, *call[1:])), row)[1])(x)
    torch.func.vmap(lambda _: (seen.append(table.call(*call)), x)[1])(x)
    torch.func.grad(lambda t: (seen.append(table.call(*call)), t.sum())[1])(x)
    assert seen == [None] * 3
    assert table.call(*call) is not None
    cache.forget()
    assert table.call(*call) is None


def test_the_fast_path_learns_inference_mode_and_strides_of_a_bias(
    table: lookup.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b = given()
    cache.forget()
    sparse_bias = torch.randn(16)[::2]
    for _ in range(2):
        fl.linear_act(x, w, b, activation="relu")
        with torch.inference_mode():
            fl.linear_act(x, w, b, activation="relu")
        fl.linear_act(x, w, sparse_bias, activation="relu")
    only_fastpath(monkeypatch)
    with torch.inference_mode():
        assert fl.linear_act(x, w, b, activation="relu").is_inference()
    y = fl.linear_act(x, w, sparse_bias, activation="relu")
    assert torch.allclose(y, reference.linear_act(x, w, sparse_bias, "relu"))


def test_autocast_has_plans_by_its_dtype(
    table: lookup.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w, b = given()
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            before = fl.linear_act(x, w, b, activation="silu")
            with monkeypatch.context() as patch:
                patch.setattr(FRONT, "looked_up", None)
                after = fl.linear_act(x, w, b, activation="silu")
        assert before.dtype is after.dtype is dtype
        assert torch.equal(before, after)
    call = (x, w, b, "relu2", "onednn")
    p = problem("forward", 5, 16, 8, dtype="bfloat16", device="cpu", activation="relu2")
    if onednn.reason_not(p) is not None:
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        fl.linear_act(x, w, b, activation="relu2", backend="onednn")
        assert table.call(*call).dtype is torch.bfloat16
    with torch.autocast("cpu", dtype=torch.float16):
        assert table.call(*call) is None


def test_what_is_recorded_is_not_made_a_plan(table: lookup.Table) -> None:
    cache.forget()
    x, w, b = given()
    with FlopCounterMode(display=False) as counter:
        fl.linear_act(x, w, b, activation="relu")
        fl.linear_act(x, w, b, activation="relu")
    assert counter.get_total_flops() == 2 * 2 * 5 * 16 * 8
    assert table.call(x, w, b, "relu", None) is None


def test_what_a_transform_left_behind(table: lookup.Table) -> None:
    """A tensor that escaped from torch.func has memory only underneath its wrapper."""
    x, w, b = given()
    escaped: list[Tensor] = []
    torch.func.grad(lambda t: (escaped.append(t * 2), t.sum())[1])(x)
    for grad in (False, True):
        w.requires_grad_(grad)
        for _ in range(2):
            y = fl.linear_act(escaped[0], w, b, activation="relu")
            assert torch.allclose(y, reference.linear_act(x * 2, w, b, "relu"))
        assert table.call(escaped[0], w, b, "relu", None) is None


def test_tuning_times_what_callers_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inference outside CUDA graphs goes through the op with the backend forced."""
    p = problem("forward", 5, 16, 8, dtype="float32", device="cpu", activation="silu")
    fam = family("linear_act")
    (kernel,) = [b for b in fam.candidates("forward") if b.name == "cpp"]
    assert fam.timed is not None
    way = fam.timed(kernel, p)
    assert way is not None
    inputs = fam.make_inputs(p, torch.device("cpu"), 0)
    before = twice(lambda: way(*inputs))
    only_fastpath(monkeypatch)
    assert torch.equal(way(*inputs), before)
    assert torch.equal(before, kernel.load()(*inputs)[0])
    for other in (replace(p, needs_grad=True), replace(p, captured=True), p.with_piece("step")):
        assert fam.timed(kernel, other) is None


def test_errors_come_through_every_time() -> None:
    x, w, b = given()
    for _ in range(2):
        with pytest.raises(InputError):
            fl.linear_act(x, w[:, 1:], b)
        with pytest.raises(InputError):
            fl.linear_act(x, w, b, activation="no such")


# --------------------------------------------------------------------------------------------
# Launches from C++


def boom(*_: Any) -> Tensor:
    raise ZeroDivisionError


def only_recorded(backend: str, activation: str) -> Callable[..., Tensor]:
    """What serves such calls, but for calls that nothing records."""
    (found,) = [b for b in family("linear_act").candidates("forward") if b.name == backend]
    plan = spec._inference(found.load(), activation)
    return lambda *given: boom() if recorder.active() is None else plan(*given)


def launched(table: lookup.Table, call: tuple[Any, ...]) -> None:
    """Replace the plan of a call that ran before by its launch, whose fallback raises."""
    plan = recorded.inference(only_recorded(call[4], call[3]), *call[:3])
    assert plan is not None
    assert table.admit(*call, plan)


def hopper_only(backend: str) -> None:
    if backend in ("cuda", "few_rows") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("Hopper only")


CASES = [
    ("cuda", torch.bfloat16, 64, 1024, 1024),
    ("cuda", torch.float16, 300, 768, 3072),
    ("few_rows", torch.float32, 2, 512, 512),
    ("few_rows", torch.bfloat16, 8, 2048, 2048),
    ("triton", torch.bfloat16, 1, 1024, 1024),
    ("triton", torch.bfloat16, 64, 1024, 1024),
    ("triton", torch.float32, 2, 1000, 96),
    ("triton", torch.float32, 2048, 1024, 1024),
    ("triton", torch.float16, 7, 33, 65),
]


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=str)
def test_launches_from_cpp(case: Any, table: lookup.Table) -> None:
    backend, dtype, m, k, n = case
    hopper_only(backend)
    kind: dict[str, Any] = {"device": "cuda", "dtype": dtype}
    for activation, bias in (("none", True), ("gelu_tanh", True), ("relu2", False)):
        x, w, b = given(m, k, n, **kind)
        w = w * k**-0.5
        call = (x, w, b if bias else None, activation, backend)
        before = fl.linear_act(*call[:3], activation=activation, backend=backend)
        launched(table, call)
        for fresh in (x, torch.randn_like(x), torch.randn_like(x)):
            y = table.call(fresh, *call[1:])
            assert y.shape == (m, n)
            exact = reference.linear_act(
                *[None if t is None else t.double() for t in (fresh, w, call[2])], activation
            )
            theirs = reference.linear_act(fresh, w, call[2], activation)
            assert judge("y", y, theirs, exact).passed
        assert torch.equal(table.call(*call), before)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["none", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_slices_and_their_sum_from_cpp(bias: bool, activation: str, table: lookup.Table) -> None:
    """Two launches, which a tape makes."""
    if not autograd_node.wait(120):
        pytest.skip("no library of nodes")
    x, w, b = given(64, 1024, 1024, device="cuda", dtype=torch.float32)
    call = (x, w, b if bias else None, activation, "triton")
    before = fl.linear_act(*call[:3], activation=activation, backend="triton")
    launched(table, call)
    assert torch.equal(table.call(*call), before)
    fresh = torch.randn_like(x)
    expected = fl.linear_act(fresh, *call[1:3], activation=activation, backend="triton")
    assert torch.equal(table.call(fresh, *call[1:]), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "few_rows"])
def test_a_launch_only_for_its_own_alignment_stream_and_no_capture(
    backend: str, table: lookup.Table
) -> None:
    hopper_only(backend)
    x, w, b = given(8, 64, 64, device="cuda", dtype=torch.bfloat16)
    call = (x, w, b, "relu", backend)
    y = fl.linear_act(x, w, b, activation="relu", backend=backend)
    launched(table, call)
    odd = torch.randn(8 * 64 + 1, device="cuda", dtype=torch.bfloat16)[1:].view(8, 64)
    with pytest.raises(ZeroDivisionError):
        table.call(odd, *call[1:])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late = x.clone().neg_()
        assert torch.equal(
            table.call(late, *call[1:]),
            fl.linear_act(late, w, b, activation="relu", backend=backend),
        )
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert table.call(*call) is None
        static = fl.linear_act(x, w, b, activation="relu", backend=backend)
    graph.replay()
    assert torch.equal(static, y)
    assert table.call(*call) is not None


@pytest.mark.gpu
def test_a_launch_follows_a_hook_of_triton_and_threads(table: lookup.Table) -> None:
    import threading

    from triton import knobs

    x, w, b = given(8, 64, 64, device="cuda", dtype=torch.bfloat16)
    call = (x, w, b, "relu", "triton")
    y = fl.linear_act(x, w, b, activation="relu", backend="triton")
    launched(table, call)

    def hook(*_: Any) -> None:
        """Seen around launches."""

    knobs.runtime.launch_enter_hook.add(hook)
    try:
        with pytest.raises(ZeroDivisionError):
            table.call(*call)
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
    found: list[Any] = []

    def plain(*c: Any) -> Tensor:
        return fl.linear_act(*c, activation="relu", backend="triton")

    table.admit(*call, recorded.inference(plain, *call[:3]))
    thread = threading.Thread(
        target=lambda: found.append(fl.linear_act(x, w, b, activation="relu", backend="triton"))
    )
    thread.start()
    thread.join()
    torch.cuda.synchronize()
    assert torch.equal(found[0], y)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [2, 48, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_triton_kernels_launched_by_the_fast_path_compute_the_same(
    rows: int, dtype: torch.dtype
) -> None:
    """The first call of a plan is Triton's own; the next are the fast path's."""
    from fastlinear.families.linear.triton import backend as triton
    from fastlinear.families.linear.triton import backward

    x, w, b = given(rows, 96, 160, device="cuda", dtype=dtype)
    dy = torch.randn(rows, 160, device="cuda", dtype=dtype)
    triton._plans.clear()

    def results() -> list[Tensor]:
        y, pre = triton.forward(x, w, b, "silu", True)
        assert pre is not None
        dpre, db = triton.grad_pre(dy, pre, "silu", True)
        found = [y, pre, dpre, db, triton.grad_input(dpre, w), triton.grad_weight(dpre, x)]
        if rows <= 128:
            found += backward.backward(dy, pre, x, w, "silu", (True, True, True))
        return [t for t in found if t is not None]

    first = results()
    plans = [p for p in triton._plans.values() if hasattr(p, "_launch")]
    assert plans
    for _ in range(2):
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(results(), first, strict=True))
    assert any(p._launch._fastpath is not None for p in plans)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        static = results()
    for t in static:
        t.zero_()
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(static, first, strict=True))


@pytest.mark.parametrize("backend", ["eager", "onednn", "cpp", "gemm_cpp"])
@pytest.mark.parametrize("activation", ["none", "gelu"])
def test_calls_without_gradients_run_without_python(backend: str, activation: str) -> None:
    """PyTorch's own ops among them: bits and shapes are those of Python's path."""
    table = lookup.table("linear_act.test")
    assert table is not None
    for shape in ((8, 32), (2, 3, 32), (32,)):
        x, w, b = torch.randn(shape), torch.randn(16, 32), torch.randn(16)
        for bias in (b, None):
            p = problem("forward", 8, 32, 16, dtype="float32", device="cpu", activation=activation)
            (found,) = [c for c in family("linear_act").candidates("forward") if c.name == backend]
            if found.reason_not(p) is not None or (backend == "cpp" and bias is None):
                continue
            table.clear()
            with torch.no_grad():
                resolved = spec._resolve((x, w, bias, activation, backend), False, False)
                assert resolved.record is not None
                expected = resolved.plan(x, w, bias)
                plan = recorded.inference(only_recorded(backend, activation), x, w, bias)
                assert table.admit(x, w, bias, activation, backend, plan)
                y = table.call(x, w, bias, activation, backend)
            assert torch.equal(y, expected)
            assert not y._is_view()
