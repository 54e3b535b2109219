"""Gated MLPs in every spelling: on parameters, in Sequentials, by einsum, by glu of two."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.function_mode import KnowingMode
from fastlinear.rewrite.rules.gated import forward as gated_forward

FAST = {"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": 50.0}
K, H = 32, 96


def optimized(model: nn.Module, x: Tensor, mode: str = "inference", **how: Any) -> Any:
    how.setdefault("families", ("gated_mlp",))
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0, **how)
    return fl.optimize_(model, x, config=config)


def told(result: Any) -> list[Any]:
    return [f for f in result.findings if f.code == "gated_mlp"]


class Counted(KnowingMode):
    """Notes every gated MLP that runs as one call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func in (gated_forward.gated_mlp, gated_forward.gated_linear)
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A block of layers and parameters for the spellings below."""

    mlp: Callable[[Any, Tensor], Tensor]

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.g, self.u, self.d = nn.Linear(K, H), nn.Linear(K, H), nn.Linear(H, K)
        self.both = nn.Linear(K, 2 * H)
        self.gate = nn.Sequential(nn.Linear(K, H), nn.SiLU(), nn.Dropout(0.0))
        self.up = nn.Sequential(nn.Dropout(0.0), nn.Linear(K, H))
        self.down = nn.Sequential(nn.Identity(), nn.Dropout(0.0), nn.Linear(H, K))
        for name, shape in {"wg": (H, K), "wu": (H, K), "wd": (K, H)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape) / shape[1] ** 0.5))
            setattr(self, f"{name}t", nn.Parameter(torch.randn(shape[::-1]) / shape[1] ** 0.5))
            setattr(self, name.replace("w", "b"), nn.Parameter(torch.randn(shape[0])))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def sequentials(s: Any, x: Tensor) -> Any:
    return s.down(s.gate(x) * s.up(x))


def functional(s: Any, x: Tensor) -> Any:
    return F.linear(F.silu(F.linear(x, s.wg, s.bg)) * F.linear(x, s.wu), s.wd, s.bd)


def of_layers(s: Any, x: Tensor) -> Any:
    h = F.silu(F.linear(x, s.g.weight, s.g.bias)) * F.linear(x, s.u.weight, s.u.bias)
    return F.linear(h, s.d.weight, s.d.bias)


def mixed(s: Any, x: Tensor) -> Any:
    return s.down(F.gelu(s.g(x)) * (x @ s.wut + s.bu))


def products(s: Any, x: Tensor) -> Any:
    return (F.silu(x @ s.wg.T + s.bg) * (x @ s.wu.mT + s.bu)) @ s.wd.t() + s.bd


def turned(s: Any, x: Tensor) -> Any:
    return (F.silu(x @ s.wgt) * torch.matmul(input=x, other=s.wut)) @ s.wdt


def equations(s: Any, x: Tensor) -> Any:
    gate = F.silu(torch.einsum("...k,hk->...h", x, s.wg) + s.bg)
    h = torch.einsum("bsh,bsh->bsh", gate, torch.einsum("kh,bsk->bsh", s.wut, x))
    return torch.einsum("bsh,hk->bsk", h, s.wdt)


def added(s: Any, x: Tensor) -> Any:
    rows = x.reshape(-1, K)
    gate, up = torch.addmm(s.bg, rows, s.wg.t()), torch.addmm(s.bu, rows, s.wut)
    return torch.addmm(s.bd, F.relu(gate) * up, s.wdt).view(x.shape)


def einsum_of_layers(s: Any, x: Tensor) -> Any:
    return s.d(torch.einsum("...h,...h->...h", F.silu(s.g(x)), s.u(x)))


def glu_of_two(s: Any, x: Tensor) -> Any:
    return s.d(F.glu(torch.cat([s.u(x), s.g(x)], -1)))


def glu_of_two_named(s: Any, x: Tensor) -> Any:
    return F.linear(F.glu(input=torch.cat(tensors=(s.u(x), x @ s.wgt), dim=-1), dim=-1), s.wd)


def glu_on_parameters(s: Any, x: Tensor) -> Any:
    return s.d(F.glu(F.linear(input=x, weight=s.both.weight)))


def chunk_named(s: Any, x: Tensor) -> Any:
    gate, up = torch.chunk(input=s.both(x), chunks=2, dim=-1)
    return s.d(torch.mul(input=F.silu(input=gate), other=up))


def split_named(s: Any, x: Tensor) -> Any:
    up, gate = torch.split(tensor=s.both(x), split_size_or_sections=H, dim=-1)
    return s.d(F.gelu(input=gate, approximate="tanh").mul(other=up))


def narrow_named(s: Any, x: Tensor) -> Any:
    h = F.linear(x, s.both.weight, s.both.bias)
    gate = torch.narrow(input=h, dim=-1, start=0, length=H)
    return s.d(torch.sigmoid(input=gate) * torch.narrow(h, -1, H, H))


SPELLINGS = {
    sequentials: ("silu", ("gate.0", "up.1", "down.2")),
    functional: ("silu", ("wg", "wu", "wd")),
    of_layers: ("silu", ("g.weight", "u.weight", "d.weight")),
    mixed: ("gelu", ("g", "wut", "down.2")),
    products: ("silu", ("wg", "wu", "wd")),
    turned: ("silu", ("wgt", "wut", "wdt")),
    equations: ("silu", ("wg", "wut", "wdt")),
    added: ("relu", ("wg", "wut", "wdt")),
    einsum_of_layers: ("silu", ("g", "u", "d")),
    glu_of_two: ("sigmoid", ("g", "u", "d")),
    glu_of_two_named: ("sigmoid", ("wgt", "u", "wd")),
    glu_on_parameters: ("sigmoid", ("both.weight", "d")),
    chunk_named: ("silu", ("both", "d")),
    split_named: ("gelu_tanh", ("both", "d")),
    narrow_named: ("sigmoid", ("both.weight", "d")),
}


def spelled(how: Any, mode: str = "inference") -> nn.Module:
    torch.manual_seed(0)
    block = type("Spelled", (Block,), {"mlp": how})()
    return nn.Sequential(block, nn.Linear(K, 8)).train(mode == "train")


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    held = [p for p in model.parameters() if p.requires_grad]
    return list(torch.autograd.grad(model(x).square().sum(), (x, *held), allow_unused=True))


@pytest.mark.parametrize("how", SPELLINGS)
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_it_becomes_one_call(how: Any, mode: str, clock: Any) -> None:
    clock(FAST)
    model, x = spelled(how, mode), torch.randn(2, 20, K)
    plain, keys = copy.deepcopy(model), list(model.state_dict())
    result = optimized(model, x, mode)
    activation, names = SPELLINGS[how]
    kept = {s.fqn for s in result.sites if (s.rule, s.status) == ("gated_mlp", "kept")}
    assert kept == {f"0.{name}" for name in names}
    (found,) = told(result)
    assert found.fqn == "0"
    assert found.details["activation"] == activation
    assert found.details["linears"] == list(names)
    assert found.details["calls"] == 1
    assert "optimize_ has put it in place" in found.message
    with Counted() as counted:
        ours = model(x)
    assert counted.calls == 1
    torch.testing.assert_close(ours, plain(x), rtol=1e-4, atol=1e-5)
    for a, b in zip(gradients(model, x), gradients(plain, x), strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)
    assert list(model.state_dict()) == keys
    result.revert()
    assert torch.equal(model(x), plain(x))


@pytest.mark.parametrize("how", [products, turned, equations, mixed, glu_of_two_named])
def test_it_is_found_when_told_alone(how: Any, clock: Any) -> None:
    clock(FAST)
    (found,) = told(fl.profile(spelled(how), torch.randn(2, 20, K)))
    assert found.fqn == "0"
    advice = found.details["advice"] or found.message
    for name in SPELLINGS[how][1]:
        turned = ".t()" if name.endswith("t") and name[0] == "w" else ""
        parts = [f"[{p}]" if p.isdecimal() else f".{p}" for p in ["0", *name.split(".")]]
        assert f"model{''.join(parts)}{turned}" in advice


def test_parameters_are_looked_up_at_each_call(clock: Any) -> None:
    clock(FAST)
    model, x = spelled(products), torch.randn(2, 20, K)
    optimized(model, x)
    plain = copy.deepcopy(spelled(products))
    for m in (model, plain):
        torch.manual_seed(1)
        m[0].wu = nn.Parameter(torch.randn(H, K))  # type: ignore[index,union-attr]
        with torch.no_grad():
            m[0].bd.mul_(3.0)  # type: ignore[index,union-attr]
    with Counted() as counted:
        ours = model(x)
    assert counted.calls == 1
    torch.testing.assert_close(ours, plain(x), rtol=1e-4, atol=1e-5)


class Doubled(nn.Parameter):
    """A weight that does more than one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            y = func(*args, **(kwargs or {}))
            return y * 2 if func in (Tensor.matmul, Tensor.__matmul__, torch.matmul) else y


def other_weight(model: Any) -> None:
    torch.manual_seed(1)
    model[0].wut = Doubled(torch.randn(K, H))


def other_layer(model: Any) -> None:
    model[0].g = nn.Sequential(model[0].g, nn.Tanh())


def hooked(model: Any) -> None:
    model[0].down[2].register_forward_hook(lambda m, args, y: y * 2)


@pytest.mark.parametrize("change", [other_weight, other_layer, hooked])
def test_what_is_no_plain_linear_any_more_is_called(change: Any, clock: Any) -> None:
    clock(FAST)
    model, x = spelled(mixed), torch.randn(2, 20, K)
    plain = copy.deepcopy(model)
    assert optimized(model, x).kept == 3
    change(model)
    change(plain)
    with Counted() as counted:
        ours = model(x)
    assert counted.calls == 0
    torch.testing.assert_close(ours, plain(x))


def test_under_autocast_a_bias_that_is_added_is_not_cast(clock: Any) -> None:
    clock(FAST)
    model, x = spelled(products), torch.randn(2, 20, K)
    plain = copy.deepcopy(model)
    assert optimized(model, x).kept == 3
    with torch.autocast("cpu"), Counted() as counted:
        assert torch.equal(model(x), plain(x))
    assert counted.calls == 0


def test_a_dropout_that_wakes_up_drops(clock: Any) -> None:
    clock(FAST)
    model, x = spelled(sequentials), torch.randn(2, 20, K)
    assert optimized(model, x).kept == 3
    dropout: Any = model[0].gate[2]  # type: ignore[index,union-attr]
    dropout.p = 0.5
    dropout.train()
    torch.manual_seed(3)
    first = model(x)
    assert not torch.equal(first, model(x))


def other_products(s: Any, x: Tensor) -> Any:
    return s.d(torch.einsum("bsh,bth->bst", F.silu(s.g(x)), s.u(x)) @ s.u(x))


def cat_of_rows(s: Any, x: Tensor) -> Any:
    return s.d(F.glu(torch.cat([s.u(x), s.g(x)], 1), 1))


def read_twice(s: Any, x: Tensor) -> Any:
    return s.d(F.silu(x @ s.wgt) * (x @ s.wut)) + s.wgt.sum()


@pytest.mark.parametrize("how", [other_products, cat_of_rows, read_twice])
def test_what_is_another_computation_is_left_alone(how: Any, clock: Any) -> None:
    clock(FAST)
    model, x = spelled(how), torch.randn(2, 20, K)
    plain = copy.deepcopy(model)
    assert optimized(model, x).kept == 0
    assert torch.equal(model(x), plain(x))
