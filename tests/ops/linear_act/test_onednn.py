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
from fastlinear.ops.common import cpp_elementwise
from fastlinear.ops.linear_act import onednn
from fastlinear.ops.linear_act.problem import problem

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


def test_nan_in_the_weight_packs_once() -> None:
    layer, x = packed_layer(), torch.randn(16, 40)
    with torch.no_grad():
        layer.weight[0, 0] = torch.nan  # NaN differs from itself, its bytes do not
        layer(x)
        (first,) = [pack.value[0] for _, pack in onednn._packs.held.values()]
        layer(x)
    (second,) = [pack.value[0] for _, pack in onednn._packs.held.values()]
    assert first is second


def test_square_weight_transposed_in_place() -> None:
    layer, x = packed_layer(40, 40), torch.randn(16, 40)
    check(layer, x)
    layer.weight.data = layer.weight.data.t()
    check(layer, x)


def test_pack_is_made_once_and_used() -> None:
    layer, x = packed_layer(), torch.randn(16, 40)
    check(layer, x)
    (first,) = [pack.value[0] for _, pack in onednn._packs.held.values()]
    check(layer, x)
    (second,) = [pack.value[0] for _, pack in onednn._packs.held.values()]
    assert first is second


@pytest.mark.parametrize("rows", [1, 2, 3, 16, 64, 200])
def test_pack_serves_other_batches_than_it_was_made_for(rows: int) -> None:
    layer = packed_layer()
    check(layer, torch.randn(16, 40))
    check(layer, torch.randn(rows, 40))
    assert len(onednn._packs.held) == 1


def test_pack_dies_with_its_weight() -> None:
    layer = packed_layer()
    check(layer, torch.randn(16, 40))
    (blocked,) = [weakref.ref(pack.value[0]) for _, pack in onednn._packs.held.values()]
    del layer
    gc.collect()
    assert onednn._packs.held == {}
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
        assert len(onednn._packs.held) == 1
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
    assert len(onednn._packs.held) == 3


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
    assert onednn._packs.held == {}


def test_many_weights_in_turn() -> None:
    layers = [packed_layer() for _ in range(5)]
    x = torch.randn(16, 40)
    for _ in range(2):
        for layer in layers:
            check(layer, x)
    assert len(onednn._packs.held) == 5
    del layers[1:], layer
    gc.collect()
    assert len(onednn._packs.held) == 1


def test_reasons() -> None:
    def why(dtype: str, device: str = "cpu", **options: Any) -> str | None:
        return onednn.reason_not(problem("forward", 4, 4, 4, dtype=dtype, device=device, **options))

    assert why("float32") is None
    assert "CPU only" in str(why("float32", "cuda"))
    assert "float64" in str(why("float64"))
    grad = problem("forward", 4, 4, 4, dtype="float32", device="cpu", needs_grad=True)
    assert "inference only" in str(onednn.reason_not_packed(grad))


# ---------------------------------------------------------------- relu inside oneDNN, proven


PROVES = cpp_elementwise.why_not_loaded() is None
proves = pytest.mark.skipif(not PROVES, reason="no C++ compiler")
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Small problems take the fused relu too; what each proof said, call by call."""
    said: list[bool] = []
    proves_no_nan = cpp_elementwise.proves_no_nan

    def told(y: Tensor, x: Tensor, bias: Tensor | None) -> bool:
        said.append(proves_no_nan(y, x, bias))
        return said[-1]

    monkeypatch.setattr(onednn, "_PROOF_ELEMENTS", 1)
    monkeypatch.setattr(onednn, "_PROOF_COLUMNS", 1)
    monkeypatch.setattr(cpp_elementwise, "proves_no_nan", told)
    return said


def relu_case(m: int = 40, k: int = 24, n: int = 32) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(m, k), torch.randn(n, k) / k**0.5, torch.randn(n)


def check_relu(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Ours has NaN, infinities and zeros just where a relu after oneDNN's own GEMM has them."""
    y, _ = onednn.forward_packed(x, weight, bias, "relu", False)
    plain = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "").relu_()
    torch.testing.assert_close(y, plain, rtol=1e-5, atol=1e-6, equal_nan=True)
    truth = F.relu(F.linear(x.double(), weight.double(), None if bias is None else bias.double()))
    assert torch.equal(y.isnan(), truth.isnan())
    assert torch.equal(y.isinf(), truth.isinf())
    return y


@proves
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("m", "k", "n"), [(40, 24, 32), (1, 7, 5), (700, 3, 16), (13, 1, 17)])
def test_relu_is_fused_where_all_is_finite(
    m: int, k: int, n: int, bias: bool, fused: list[bool]
) -> None:
    x, w, b = relu_case(m, k, n)
    check_relu(x, w, b if bias else None)
    assert fused == [True]


@proves
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_relu_keeps_what_is_not_finite_in_x(bad: float, threads: int, fused: list[bool]) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for row in (0, 17, 599):
            for column in (0, 11, 23):
                x, w, b = relu_case(m=600)
                x[row, column] = bad
                check_relu(x, w, b)
    finally:
        torch.set_num_threads(before)
    assert fused == [False] * 9


@proves
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_relu_keeps_what_is_not_finite_in_the_bias(bad: float, fused: list[bool]) -> None:
    for at in (0, 20, 31):
        x, w, b = relu_case()
        b[at] = bad
        check_relu(x, w, b)
    assert fused == [False] * 3


@proves
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_relu_is_never_fused_with_a_weight_that_is_not_finite(
    bad: float, fused: list[bool]
) -> None:
    x, w, b = relu_case()
    x[3, 5] = 0.0
    w[20, 5] = bad
    check_relu(x, w, b)
    w.zero_()
    check_relu(x, w, b)
    w[31, 23] = bad
    check_relu(x, w, b)
    assert fused == [True]


@proves
def test_zero_times_infinity_is_seen(fused: list[bool]) -> None:
    """A row that holds an infinity and a weight that holds zeros: NaN beside infinities."""
    x, w, b = relu_case()
    x[5, 2], w[::3, 2] = INF, 0.0
    y = check_relu(x, w, b)
    assert y[5].isnan().any()
    assert y[5].isinf().any()
    x[5, 7] = -INF
    check_relu(x, w, b)
    assert fused == [False, False]


@proves
def test_dead_outputs_are_proven_by_x(fused: list[bool]) -> None:
    """Rows and whole outputs of zeros are common behind a relu; they cost a look at x, no more."""
    x, w, b = relu_case()
    b[:20] = -1e4
    check_relu(x, w, b)
    x[7] = 0
    check_relu(x, w, torch.full_like(b, -1.0))
    assert fused == [True, True]
    x[9, 9] = NAN
    check_relu(x, w, b)
    assert fused == [True, True, False]


@proves
def test_infinite_output_of_finite_input(fused: list[bool]) -> None:
    """A sum that overflows is an infinity as before; x is finite, so nothing was hidden."""
    x, w, b = relu_case(n=4)
    x[3], w[:] = 3e38, 1.0
    y, _ = onednn.forward_packed(x, w, b, "relu", False)
    assert y[3].isinf().all()
    assert fused == [True]


@proves
def test_relu_reads_padded_rows_and_strided_bias(fused: list[bool]) -> None:
    x, w, b = relu_case()
    wide = torch.full((40, 40), NAN)
    wide[:, :24] = x
    check_relu(wide[:, :24], w, b)
    check_relu(wide[:, :24], w, b - 1e4)
    bias = torch.stack([b, torch.full_like(b, NAN)], 1)[:, 0]
    y, _ = onednn.forward_packed(x, w, bias, "relu", False)
    assert not y.isnan().any()
    assert fused == [True] * 3
    check_relu(torch.randn(24, 40).t(), w, b)
    assert fused == [True] * 3, "columns of x that lie apart are not read"


def test_relu_without_a_compiler(monkeypatch: pytest.MonkeyPatch, fused: list[bool]) -> None:
    monkeypatch.setattr(cpp_elementwise, "why_not_loaded", lambda: "no compiler")
    x, w, b = relu_case()
    x[3, 3] = NAN
    assert check_relu(x, w, b)[3].isnan().all()
    assert fused == []


@proves
def test_small_relu_is_a_pass_of_its_own() -> None:
    x, w, b = relu_case()
    assert not onednn._provable(x, w)
    assert onednn._provable(torch.randn(4096, 8), torch.randn(128, 8))
    assert not onednn._provable(torch.randn(4096, 8).double(), torch.randn(128, 8))
    assert not onednn._provable(torch.randn(8192, 8), torch.randn(64, 8))
    check_relu(x, w, b)
