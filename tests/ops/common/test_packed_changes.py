"""No kept copy of a weight outlives a change of its bytes, whoever makes it and however small."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import UnsupportedError
from fastlinear.ops.common import cpp_build, weight_hash
from fastlinear.ops.gated_mlp import onednn as gated
from fastlinear.ops.linear_act import mkl, onednn
from fastlinear.ops.linear_act.problem import problem
from fastlinear.ops.mlp import strassen_cpu

K, N = 80, 96
NO_HASH = weight_hash.why_not_loaded()
compiled = pytest.mark.skipif(NO_HASH is not None, reason=str(NO_HASH))


@pytest.fixture(autouse=True)
def nothing_kept() -> None:
    for forget in (
        mkl.forget_packed,
        onednn.forget_packed,
        gated.forget_packed,
        strassen_cpu.forget_weights,
    ):
        forget()


# ways to y (M, N) = relu(x Wᵀ + b), or the like, through what keeps a copy of W


def linear(backend: str) -> Callable[[Tensor, nn.Linear], Tensor]:
    return lambda x, of: fl.linear_act(x, of.weight, of.bias, activation="relu", backend=backend)


def gated_linear(x: Tensor, of: nn.Linear) -> Tensor:
    """One weight in both places: gate and up are equal, and so are their biases."""
    return fl.gated_linear(
        x, of.weight, of.weight, of.bias, of.bias, activation="relu", backend="onednn_packed"
    )


def mlp(x: Tensor, of: nn.Linear) -> Tensor:
    return fl.mlp(
        x,
        [of.weight],
        [of.bias],
        final_activation="relu",
        backend="strassen",
        allow_fast_matmul=True,
    )


def module(x: Tensor, of: nn.Linear) -> Tensor:
    return mlp_module_of(of)(x)  # type: ignore[no-any-return]


def mlp_module_of(of: nn.Linear) -> nn.Module:
    """fl.nn.MLP over the layer's own parameters."""
    net = fl.nn.MLP([K, N], final_activation="relu", backend="strassen", allow_fast_matmul=True)
    (own,) = [m for m in net.modules() if isinstance(m, nn.Linear)]
    own.weight, own.bias = of.weight, of.bias
    return net


def relu(x: Tensor, of: nn.Linear) -> Tensor:
    return F.relu(F.linear(x.double(), of.weight.double(), of.bias.double()))


def squared(x: Tensor, of: nn.Linear) -> Tensor:
    return relu(x, of) ** 2


WAYS = {
    "onednn_packed": (linear("onednn_packed"), relu),
    "mkl_packed": (linear("mkl_packed"), relu),
    "gated onednn_packed": (gated_linear, squared),
    "strassen": (mlp, relu),
    "strassen in fl.nn.MLP": (module, relu),
}

# changes; those of HIDDEN leave the version counter as it is


def data_element(of: nn.Linear) -> None:
    of.weight.data[50, 7] = 30.0


def data_last_element(of: nn.Linear) -> None:
    of.weight.data[-1, -1] = 30.0


def data_rows(of: nn.Linear) -> None:
    of.weight.data[40:44] = 0


def data_clamp_of_one(of: nn.Linear) -> None:
    assert int((of.weight > 2).sum()) == 1
    of.weight.data.clamp_(max=0.5)


def detached_numpy(of: nn.Linear) -> None:
    of.weight.detach().numpy()[9, 9] = 25.0


def rows_permuted(of: nn.Linear) -> None:
    of.weight.data.copy_(of.weight.data[torch.randperm(N)].clone())


def columns_permuted(of: nn.Linear) -> None:
    of.weight.data.copy_(of.weight.data[:, torch.randperm(K)].clone())


def ema(of: nn.Linear) -> None:
    of.weight.data.mul_(0.9).add_(torch.randn(N, K), alpha=0.1)


def signs(of: nn.Linear) -> None:
    of.weight.data.neg_()


def load(of: nn.Linear) -> None:
    of.load_state_dict({k: torch.randn_like(v) for k, v in of.state_dict().items()})


def load_assign(of: nn.Linear) -> None:
    state = {k: torch.randn_like(v) for k, v in of.state_dict().items()}
    of.load_state_dict(state, assign=True)


def optimizer_step(of: nn.Linear) -> None:
    of.weight.grad = torch.randn_like(of.weight)
    torch.optim.SGD([of.weight], lr=0.5).step()


def fused_step(of: nn.Linear) -> None:
    of.weight.grad = torch.randn_like(of.weight)
    torch.optim.AdamW([of.weight], lr=0.5, fused=True).step()


HIDDEN = [
    data_element,
    data_last_element,
    data_rows,
    data_clamp_of_one,
    detached_numpy,
    rows_permuted,
    columns_permuted,
    ema,
    signs,
]
CHANGES = [*HIDDEN, load, load_assign, optimizer_step, fused_step]


def layer() -> nn.Linear:
    of = nn.Linear(K, N)
    of.weight.data[60, 33] = 20.0
    return of


def served(way: str) -> None:
    if way == "mkl_packed":
        why = mkl.reason_not(problem("forward", 16, K, N, dtype="float32", device="cpu"))
    elif way.endswith("onednn_packed"):
        why = onednn.reason_not_packed(problem("forward", 16, K, N, dtype="float32", device="cpu"))
    else:
        why = None
    if why is not None:
        pytest.skip(why)


@torch.no_grad()
def follow(way: str, change: Callable[[nn.Linear], None]) -> None:
    """The result is that of the weight before and after the change, which shows in it."""
    served(way)
    run, expected = WAYS[way]
    of, x = layer(), torch.randn(16, K)
    for _ in range(2):
        stale = expected(x, of)
        torch.testing.assert_close(run(x, of).double(), stale, rtol=1e-4, atol=2e-3)
    version = of.weight._version
    change(of)
    assert change not in HIDDEN or of.weight._version == version
    now = expected(x, of)
    assert not torch.allclose(now, stale, rtol=1e-2, atol=1e-1)
    for _ in range(2):
        torch.testing.assert_close(run(x, of).double(), now, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", WAYS)
def test_follows(way: str, change: Callable[[nn.Linear], None]) -> None:
    follow(way, change)


@compiled
@pytest.mark.parametrize("change", HIDDEN)
@pytest.mark.parametrize("way", WAYS)
def test_these_tests_see_a_stale_copy(
    way: str, change: Callable[[nn.Linear], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_hash, "digest", lambda weight: (0, 0, 0))
    with pytest.raises(AssertionError, match="not close"):
        follow(way, change)


@compiled
@pytest.mark.parametrize("way", WAYS)
def test_every_element(way: str) -> None:
    """Whichever element is written behind the version counter."""
    served(way)
    run, expected = WAYS[way]
    of, x = nn.Linear(K, N), torch.randn(3, K)
    weight = of.weight.detach().numpy()
    with torch.no_grad():
        for at in range(0, N * K, 97):
            kept = weight.flat[at]
            weight.flat[at] = 40.0
            got, now = run(x, of).double(), expected(x, of)
            torch.testing.assert_close(got, now, rtol=1e-4, atol=2e-2)
            weight.flat[at] = kept


def test_without_a_compiler_nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that fails when it is first needed: the answers stay right."""

    def unused(weight: Tensor) -> None:
        raise AssertionError

    monkeypatch.setattr(weight_hash, "why_not_loaded", lambda: "no compiler")
    monkeypatch.setattr(weight_hash, "digest", unused)
    for way in WAYS:
        follow(way, data_element)
    packs = (mkl._packs, onednn._packs, gated._packs, strassen_cpu._packs)
    assert not any(p.held for p in packs)


def test_without_a_compiler_no_packed_backend_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp_build, "reason_not", lambda: "no C++ compiler on the PATH")
    p = problem("forward", 16, K, N, dtype="float32", device="cpu")
    for why in (mkl.reason_not(p), onednn.reason_not_packed(p), gated.reason_not_packed(p)):
        assert "no C++ compiler on the PATH" in str(why)
        assert "install g++" in str(why)
    with pytest.raises(UnsupportedError, match="install g\\+\\+"):
        fl.linear_act(torch.randn(2, 3), torch.randn(4, 3), backend="onednn_packed")


def test_two_dtypes_over_the_same_bytes() -> None:
    """Views of one memory in two dtypes are two weights."""
    base, scheme = torch.randn(N, K).bfloat16(), strassen_cpu.Scheme("strassen", 1)
    one = strassen_cpu.weight_planes(base, scheme)
    other = strassen_cpu.weight_planes(base.view(torch.float16), scheme)
    assert one.dtype is torch.bfloat16
    assert other.dtype is torch.float16
