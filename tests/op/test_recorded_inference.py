"""Calls without gradients on a CPU: Python runs the first of a kind, tapes the third and later."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import fastlinear as fl
from fastlinear.core.errors import UnsupportedError
from fastlinear.dispatch import cache
from fastlinear.dispatch.backend import family
from fastlinear.families.linear import spec as linear_spec
from fastlinear.fastpath import autograd_node, lookup, recorded, recorder
from fastlinear.op.front import Front
from fastlinear.op.spec import leaves

pytestmark = [
    pytest.mark.skipif(lookup.reason_not() is not None, reason="no compiled fast path here"),
    pytest.mark.usefixtures("_built"),
]


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


W, B = draw(16, 16), draw(16)
SIZES = torch.tensor([3, 0, 3])
# family → x of a call → the arguments of Front.call without the backend
CALLS: dict[str, Callable[[Tensor], tuple[Any, ...]]] = {
    "linear_act": lambda x: (x, W, B, "gelu"),
    "mlp": lambda x: (x, (W, W.t()), (B, B[:1].expand(16)), "relu", "tanh"),
    "gated_mlp": lambda x: (x, (W, W, W), (B, None, B), "gated_mlp", "silu", "apart", None),
    "diagonal_linear": lambda x: (x, B, (B, x), "gelu"),
    "grouped_linear": lambda x: (x, W.view(2, 16, 8), None, "relu", "... (g k)"),
    "ragged_linear": lambda x: (x, draw(3, 16, 16), (SIZES, None), "relu"),
    "experts": lambda x: (
        *(
            x,
            (draw(3, 8, 16), draw(3, 16, 4)),
            (torch.tensor([[0, 2]] * 6), draw(6, 2), None, None),
        ),
        *("silu", "gate_up", "inf 1.0 0.0", "0", False),
    ),
}
BACKENDS = [
    (name, backend)
    for name, backends in {
        "linear_act": ("eager", "onednn", "cpp", "gemm_cpp"),
        "mlp": ("eager", "layerwise"),
        "gated_mlp": ("eager", "onednn", "cpp", "gemm_cpp"),
        "diagonal_linear": ("eager", "addcmul", "cpp"),
        "grouped_linear": ("eager", "loop", "baddbmm", "cpp"),
        "ragged_linear": ("cpp",),
        "experts": ("cpp",),
    }.items()
    for backend in backends
]


@pytest.fixture(scope="module")
def _built() -> None:
    assert lookup.wait(), lookup.reason_not()
    assert autograd_node.wait(), autograd_node.reason_not()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    cache.forget()
    yield
    cache.forget()


def front(name: str) -> Front:
    found: Front = family(name).load_command().front
    return found


def serves(f: Front, call: tuple[Any, ...]) -> bool:
    """Whether the call's forced backend can serve it here."""
    try:
        f.explain(call, False)
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_the_first_call_records_nothing_and_the_second_does(
    name: str, backend: str, recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    call = (*CALLS[name](draw(6, 16)), backend)
    f = front(name)
    if not serves(f, call):
        pytest.skip("not here")
    first = f.call(*call)
    assert not recordings
    assert f.table(*call) is None
    second = f.call(*call)
    assert len(recordings) == 1
    assert recordings[0] is not None
    monkeypatch.setattr(f, "looked_up", None)
    third = f.call(*call)
    assert len(recordings) == 1
    assert torch.equal(first, second)
    assert torch.equal(first, third)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("name", CALLS)
def test_pytorchs_own_way_is_found_in_the_table(name: str, grad: bool) -> None:
    """Where it is no tape, too: the look-up in Python costs as much as a small layer."""
    call = (*CALLS[name](draw(6, 16).requires_grad_(grad)), "eager")
    for _ in range(3):
        front(name).call(*call)
    assert front(name).table(*call) is not None


def test_what_lies_in_the_table_runs_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own ops among them, whose Python plan the table held before."""
    ran = []

    def linear(*given: Any) -> Tensor:
        ran.append(recorder.active() is not None)
        return torch.nn.functional.linear(*given)

    monkeypatch.setattr(linear_spec, "_linear", linear)
    x = draw(1, 16)
    for activation in ("none", "gelu"):
        ran.clear()
        for _ in range(4):
            fl.linear_act(x, W, B, activation=activation, backend="eager")
        assert ran == [False, False, True]


@pytest.mark.parametrize(("name", "backend"), BACKENDS)
def test_tapes_return_what_plans_do(name: str, backend: str, recordings: list[Any]) -> None:
    """Bit for bit and laid out alike, in new memory each time."""
    wide = torch.empty(6, 32)
    off = torch.empty(6 * 16 + 1)[1:].view(6, 16)
    views = [draw(6, 16), wide[:, ::2].copy_(draw(6, 16)), draw(16, 6).t(), off.copy_(draw(6, 16))]
    if name not in ("ragged_linear", "experts"):
        views += [draw(2, 3, 16), draw(1, 16), draw(0, 16), draw(16)]
    f = front(name)
    for x in views:
        call = (*CALLS[name](x), backend)
        if not serves(f, call):
            continue
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                f.forget()
                recordings.clear()
                expected = f.call(*call)
                ys = [f.call(*call) for _ in range(3)]
                assert (f.table(*call) is None) == (name == "ragged_linear" and x.numel() == 0)
            assert x.numel() == 0 or (len(recordings) == 1 and recordings[0] is not None)
            for y in ys:
                assert torch.equal(y, expected)
                assert y.stride() == expected.stride()
                assert y.is_inference() == expected.is_inference()
                assert not y.requires_grad
            if x.numel():
                given = {t.untyped_storage().data_ptr() for t in leaves(call) if t is not None}
                results = {t.untyped_storage().data_ptr() for t in (expected, *ys)}
                assert len(results - given) == 4


def test_plans_serve_where_no_tape_can_be_made_yet(
    recordings: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the second call asks for the library of tapes, which may begin to compile it."""
    asked = []
    with monkeypatch.context() as patch:
        patch.setattr(autograd_node, "begun", lambda: bool(asked.append(None)))
        call = (*CALLS["mlp"](draw(1, 16)), "layerwise")
        f = front("mlp")
        y = f.call(*call)
        assert not asked
        assert torch.equal(f.call(*call), y)
        assert len(asked) == 1
        patch.setattr(f, "looked_up", None)
        assert torch.equal(f.call(*call), y)
    assert not recordings
    autograd_node._tell()  # it is there
    for _ in range(2):
        assert torch.equal(f.call(*call), y)
    assert len(recordings) == 1


class Doubling(TorchFunctionMode):
    """Changes what F.linear returns."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y * 2 if getattr(func, "__name__", "") == "linear" else y


class Watching(TorchDispatchMode):
    """Notes what runs."""

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ran.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("before", [0, 3])
def test_modes_see_the_ops_that_python_calls(before: int, recordings: list[Any]) -> None:
    """With a tape at hand and without."""
    call = (*CALLS["linear_act"](draw(1, 16))[:3], "none", "eager")
    f = front("linear_act")
    y = torch.nn.functional.linear(*call[:3])
    for _ in range(before):
        assert torch.equal(f.call(*call), y)
    for _ in range(4):
        with Doubling():
            assert torch.equal(f.call(*call), 2 * y)
        with Watching() as watch:
            f.call(*call)
        assert watch.ran == ["aten.t.default", "aten.addmm.default"]
    for _ in range(3):
        assert torch.equal(f.call(*call), y)
    assert len(recordings) == 1


class _Poll(ctypes.Structure):
    _fields_ = (("fd", ctypes.c_int), ("events", ctypes.c_short), ("revents", ctypes.c_short))


def test_other_threads_run_beside_a_tape() -> None:
    """A tape waits in C for what another Python thread writes."""
    table = lookup.table("linear_act.test")
    assert table is not None
    end, other = os.pipe()
    poll = ctypes.CDLL(None).poll
    wanted = _Poll(end, 1, 0)

    def plan(x: Tensor, *_: None) -> Tensor:
        if recorder.active() is None:
            raise TimeoutError("nobody wrote")
        recorder.attempt(poll, wanted, 1, 3000)
        return x + 1

    def write() -> None:
        time.sleep(0.1)
        os.write(other, b"x")

    x = draw(64, 128)  # of a few numbers a tape keeps Python's lock
    table.clear()
    try:
        with torch.no_grad():
            assert table.admit(x, None, None, recorded.inference(plan, x, None, None))
            thread = threading.Thread(target=write)
            thread.start()
            y = table.call(x, None, None)
            thread.join()
    finally:
        os.close(end)
        os.close(other)
        table.clear()
    assert torch.equal(y, x + 1)


def test_an_equal_name_that_lies_elsewhere_is_the_same_name(recordings: list[Any]) -> None:
    for _ in range(4):
        name = "".join(["ge", "lu"])
        assert name is not "gelu"  # noqa: F632 - what is tried
        fl.linear_act(draw(6, 16), W, B, activation=name)
    assert len(recordings) == 1


def test_forward_mode_after_calls_without_it() -> None:
    x, w = draw(5, 16).double(), W.double()
    for _ in range(4):
        fl.mlp(x, [w, w], activation="gelu")
    with torch.autograd.forward_ad.dual_level():
        y = fl.mlp(
            torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)), [w, w], activation="gelu"
        )
        tangent = torch.autograd.forward_ad.unpack_dual(y).tangent
    _, expected = torch.func.jvp(
        lambda x: torch.nn.functional.gelu(x @ w.t()) @ w.t(), (x,), (torch.ones_like(x),)
    )
    torch.testing.assert_close(tangent, expected)
