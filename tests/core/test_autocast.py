"""One cast of a parameter per autocast block, and never a gradient or a value lost for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from fastlinear.core import autocast
from fastlinear.core.autocast import cast

BF16 = torch.bfloat16


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> Iterator[str]:
    autocast._empty.clear()
    yield request.param
    autocast._empty.clear()


def block(device: str, **options: Any) -> AbstractContextManager[None]:
    return torch.autocast(device, dtype=BF16, **options)


def parameter(*shape: int, device: str) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, device=device))


def casts(run: Callable[[], object], *shape: int) -> int:
    """How many tensors of that shape ``run`` casts."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run()
    events = [e for e in recorded.events() if e.name == "aten::_to_copy"]
    return sum(list(e.input_shapes[0]) == list(shape) for e in events)


MODES = [nullcontext, torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(48, 40), (48,)])
def test_cast_once_per_block(
    mode: Callable[[], AbstractContextManager[None]], shape: tuple[int, ...], device: str
) -> None:
    t = parameter(*shape, device=device)
    expected = t.detach().to(BF16)

    def run() -> None:
        with mode(), block(device):
            first, second, third = (cast(t, BF16) for _ in range(3))
        assert first is second is third
        assert torch.equal(first, expected)

    assert casts(run, *shape) == 1
    assert casts(run, *shape) == 1, "the next block casts anew"


def test_shared_with_torchs_own_linear(device: str) -> None:
    w, b, x = parameter(48, 40, device=device), parameter(48, device=device), torch.randn(3, 40)
    x = x.to(device)

    def run() -> None:
        with block(device):
            F.linear(x, w, b)
            cast(w, BF16), cast(b, BF16)
            F.linear(x, w, b)

    assert casts(run, 48, 40) == 1
    assert casts(run, 48) == 1


def test_gradients_reach_the_leaf(device: str) -> None:
    w, b = parameter(48, 40, device=device), parameter(48, device=device)
    x = torch.randn(3, 40, device=device)
    grads = []
    for linear in (
        lambda: F.linear(x.to(BF16), cast(w, BF16), cast(b, BF16)),
        lambda: F.linear(x, w, b),
    ):
        with block(device):
            y = linear() + linear()
        y.float().square().sum().backward()
        grads.append((w.grad, b.grad))
        w.grad = b.grad = None
    for ours, theirs in zip(*grads, strict=True):
        assert ours is not None
        assert ours.dtype is torch.float32
        assert torch.equal(ours, theirs)


def test_new_values_in_a_new_block(device: str) -> None:
    w = parameter(8, 4, device=device)
    for _ in range(3):
        with block(device):
            assert torch.equal(cast(w, BF16), w.detach().to(BF16))
        w.data.mul_(2)  # not even the version counter knows


def test_a_copy_cached_without_a_graph_is_not_used_where_one_is_needed(device: str) -> None:
    w = parameter(8, 4, device=device)
    with block(device):
        with torch.no_grad():
            F.linear(torch.randn(2, 4, device=device), w)
        kept = cast(w, BF16)
        with torch.no_grad():
            assert not F.linear(torch.randn(2, 4, device=device), w).requires_grad
    assert kept.requires_grad
    kept.float().sum().backward()
    assert w.grad is not None


def test_a_copy_without_a_way_back_is_never_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "_cached", lambda t, dtype: t.detach().to(dtype))
    w = parameter(8, 4, device="cpu")
    with block("cpu"):
        assert cast(w, BF16).requires_grad
        with torch.no_grad():
            assert cast(w, BF16).dtype is BF16


def test_used_with_a_graph_after_inference(device: str) -> None:
    w = parameter(8, 4, device=device)
    with block(device):
        with torch.inference_mode():
            first = cast(w, BF16)
            assert not first.is_inference()
        with torch.no_grad():
            assert cast(w, BF16) is first
        assert cast(w, BF16) is first
    first.float().sum().backward()
    assert w.grad is not None


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.detach(),
        lambda w: w * 1,
        lambda w: w.t(),
        lambda w: w.detach().to(torch.float16).requires_grad_(),
        lambda w: w.detach()[:0].clone().requires_grad_(),
        lambda w: w.detach().view(2, 4, 4).clone().requires_grad_(),
    ],
    ids=["frozen", "not a leaf", "view", "float16", "empty", "3-D"],
)
def test_what_autocast_does_not_cache_is_cast(make: Callable[[Tensor], Tensor]) -> None:
    t = make(parameter(8, 4, device="cpu"))
    with block("cpu"):
        found = cast(t, BF16)
    assert found.dtype is BF16
    assert torch.equal(found, t.to(BF16))
    assert found.requires_grad == t.requires_grad


def test_what_autocast_leaves_alone() -> None:
    with block("cpu"):
        for t in (torch.randn(3, 3, dtype=torch.float64), torch.arange(4)):
            assert cast(t, BF16) is t


def test_respects_a_cache_that_is_off(device: str) -> None:
    w = parameter(8, 4, device=device)
    with block(device, cache_enabled=False):
        assert cast(w, BF16) is not cast(w, BF16)


def test_hooks_on_saved_tensors_see_nothing(device: str) -> None:
    """Checkpointing counts what is packed, and what unpacks recomputes."""
    w = parameter(8, 4, device=device)
    seen: list[Tensor] = []

    def fail(_: Tensor) -> Tensor:
        raise AssertionError

    with (
        block(device),
        torch.autograd.graph.saved_tensors_hooks(lambda t: (seen.append(t), t)[1], fail),
    ):
        assert cast(w, BF16).dtype is BF16
    assert seen == []


def test_a_torch_that_does_not_tell_of_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autocast, "_saved_hooks", None)
    w = parameter(8, 4, device="cpu")
    with block("cpu"):
        assert torch.equal(cast(w, BF16), w.to(BF16))


@pytest.mark.gpu
def test_captured_graphs_cast_for_themselves() -> None:
    w = parameter(64, 64, device="cuda")
    x = torch.randn(8, 64, device="cuda", dtype=BF16)
    with block("cuda"), torch.no_grad():
        F.linear(x, cast(w, BF16))  # cached before the capture
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = F.linear(x, cast(w, BF16))
        w.mul_(2)
        graph.replay()
        assert torch.equal(y, F.linear(x, w.to(BF16)))
