"""Packed weights: always those of now, never kept longer than the weight."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.ops.linear_act import onednn
from fastlinear.ops.linear_act.backends import problem

WHY = onednn.reason_not(problem("forward", 1, 1, 1, dtype="float32", device="cpu"))
pytestmark = pytest.mark.skipif(WHY is not None, reason=str(WHY))


@pytest.fixture(autouse=True)
def no_packs() -> Iterator[None]:
    onednn.forget_packed()
    yield
    onednn.forget_packed()


def packed_layer(n: int = 48, k: int = 40) -> fl.nn.Linear:
    return fl.nn.Linear(k, n, activation="gelu", backend="onednn_packed")


@torch.no_grad()
def check(layer: nn.Module, x: Tensor) -> None:
    expected = F.gelu(F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


def sgd_step(layer: nn.Linear) -> None:
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.SGD([layer.weight], lr=0.5).step()


def adam_foreach_step(layer: nn.Linear) -> None:
    layer.weight.grad = torch.randn_like(layer.weight)
    torch.optim.AdamW([layer.weight], lr=0.5, foreach=True).step()


def load(layer: nn.Linear) -> None:
    layer.load_state_dict({k: torch.randn_like(v) for k, v in layer.state_dict().items()})


def load_assign(layer: nn.Linear) -> None:
    state = {k: torch.randn_like(v) for k, v in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)


def data_mul(layer: nn.Linear) -> None:
    layer.weight.data.mul_(2)


def data_copy(layer: nn.Linear) -> None:
    layer.weight.data.copy_(torch.randn_like(layer.weight))


def data_assigned(layer: nn.Linear) -> None:
    layer.weight.data = torch.randn_like(layer.weight)


@torch.no_grad()
def in_place(layer: nn.Linear) -> None:
    layer.weight.add_(1)


@torch.no_grad()
def single_element(layer: nn.Linear) -> None:
    layer.weight[3, 5] = 100.0


def detached_write(layer: nn.Linear) -> None:
    layer.weight.detach()[3, 5] = 100.0


def numpy_write(layer: nn.Linear) -> None:
    layer.weight.detach().numpy()[...] *= 3


def init_again(layer: nn.Linear) -> None:
    layer.reset_parameters()


def same_memory_other_layout(layer: nn.Linear) -> None:
    """Not even the address changes: the transposed view of the same storage."""
    layer.weight.data = layer.weight.data.view(layer.out_features, -1).flip(0).contiguous()


CHANGES = [
    sgd_step,
    adam_foreach_step,
    load,
    load_assign,
    data_mul,
    data_copy,
    data_assigned,
    in_place,
    single_element,
    detached_write,
    numpy_write,
    init_again,
    same_memory_other_layout,
]


@pytest.mark.parametrize("change", CHANGES)
def test_pack_follows_the_weight(change: Callable[[nn.Linear], Any]) -> None:
    layer, x = packed_layer(), torch.randn(16, 40)
    check(layer, x)
    for _ in range(2):
        change(layer)
        check(layer, x)
        check(layer, x)


def test_version_counter_sees_what_the_probe_misses() -> None:
    layer, x = packed_layer(96, 80), torch.randn(16, 80)
    check(layer, x)
    before = onednn._probe(layer.weight).clone()
    with torch.no_grad():
        layer.weight[3, 6] = 100.0
    assert torch.equal(onednn._probe(layer.weight), before)  # it does miss this element
    check(layer, x)


def test_square_weight_transposed_in_place() -> None:
    layer, x = packed_layer(40, 40), torch.randn(16, 40)
    check(layer, x)
    layer.weight.data = layer.weight.data.t()
    check(layer, x)


def test_pack_is_made_once_and_used() -> None:
    layer, x = packed_layer(), torch.randn(16, 40)
    check(layer, x)
    (first,) = [pack.blocked for _, pack in onednn._packs.values()]
    check(layer, x)
    (second,) = [pack.blocked for _, pack in onednn._packs.values()]
    assert first is second


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 64, 200])
def test_pack_serves_other_batches_than_it_was_made_for(rows: int) -> None:
    layer = packed_layer()
    check(layer, torch.randn(16, 40))
    check(layer, torch.randn(rows, 40))
    assert len(onednn._packs) == 1


def test_pack_dies_with_its_weight() -> None:
    layer = packed_layer()
    check(layer, torch.randn(16, 40))
    (blocked,) = [weakref.ref(pack.blocked) for _, pack in onednn._packs.values()]
    del layer
    gc.collect()
    assert onednn._packs == {}
    assert blocked() is None


def test_replaced_storage_is_not_kept_alive() -> None:
    """After ``.data = new`` (as ``module.to`` does) nothing here holds the old memory."""
    layer = packed_layer()
    check(layer, torch.randn(16, 40))
    old = weakref.ref(layer.weight.untyped_storage())
    held = layer.weight.data.untyped_storage()
    layer.weight.data = torch.randn(48, 40)
    gc.collect()
    assert held.data_ptr() != layer.weight.data_ptr()
    assert all(not isinstance(v, torch.UntypedStorage) for v in gc.get_referrers(held))
    del held, old


def test_transposed_view_made_anew_at_every_call() -> None:
    """transformers' Conv1D keeps (K, N) and is a Linear of its transpose."""
    weight = nn.Parameter(torch.randn(40, 48))
    x, b = torch.randn(16, 40), torch.randn(48)
    with torch.no_grad():
        for _ in range(3):
            y = fl.linear_act(x, weight.t(), b, activation="gelu", backend="onednn_packed")
            torch.testing.assert_close(y, F.gelu(x @ weight + b), rtol=1e-5, atol=1e-5)
        assert len(onednn._packs) == 1
        weight.data.mul_(2)
        y = fl.linear_act(x, weight.t(), b, activation="gelu", backend="onednn_packed")
        torch.testing.assert_close(y, F.gelu(x @ weight + b), rtol=1e-5, atol=1e-5)


def test_two_slices_of_one_tensor_keep_apart() -> None:
    """A fused qkv weight: three views of one base, of equal shape and strides."""
    weight, x = torch.randn(3 * 24, 40), torch.randn(16, 40)
    for _ in range(2):
        for part in weight.chunk(3):
            y = fl.linear_act(x, part, activation="silu", backend="onednn_packed")
            torch.testing.assert_close(y, F.silu(F.linear(x, part)), rtol=1e-5, atol=1e-5)
    assert len(onednn._packs) == 3


def test_write_to_the_far_half_of_a_sliced_weight() -> None:
    base, x = torch.randn(48, 80), torch.randn(16, 40)
    part = base[:, 40:]
    fl.linear_act(x, part, activation="silu", backend="onednn_packed")
    base.data.mul_(2)
    y = fl.linear_act(x, part, activation="silu", backend="onednn_packed")
    torch.testing.assert_close(y, F.silu(F.linear(x, part)), rtol=1e-5, atol=1e-5)


def test_inference_tensors_are_never_kept() -> None:
    with torch.inference_mode():
        layer, x = packed_layer(), torch.randn(16, 40)
        check(layer, x)
        layer.weight.mul_(2)
        check(layer, x)
    assert onednn._packs == {}


def test_many_weights_in_turn() -> None:
    layers = [packed_layer() for _ in range(5)]
    x = torch.randn(16, 40)
    for _ in range(2):
        for layer in layers:
            check(layer, x)
    assert len(onednn._packs) == 5
    del layers[1:], layer
    gc.collect()
    assert len(onednn._packs) == 1


def test_reasons() -> None:
    def why(dtype: str, device: str = "cpu", **options: Any) -> str | None:
        return onednn.reason_not(problem("forward", 4, 4, 4, dtype=dtype, device=device, **options))

    assert why("float32") is None
    assert "CPU only" in str(why("float32", "cuda"))
    assert "float64" in str(why("float64"))
    grad = problem("forward", 4, 4, 4, dtype="float32", device="cpu", needs_grad=True)
    assert "inference only" in str(onednn.reason_not_packed(grad))
