"""Gated MLPs in the forward of a module that does more: found by dataflow, made one call."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.function_mode import KnowingMode
from fastlinear.rewrite.rules.gated import forward as gated_forward

FAST = {"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": 50.0}
K, H = 64, 96


def optimized(model: nn.Module, x: Any, mode: str = "inference", **how: Any) -> Any:
    how.setdefault("families", ("gated_mlp",))
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0, **how)
    return fl.optimize_(model, x, config=config)


class Inline(nn.Module):
    """A transformer's block that computes its gated MLP itself."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(K), nn.LayerNorm(K)
        self.qkv, self.out = nn.Linear(K, 3 * K), nn.Linear(K, K)
        self.gate, self.up = nn.Linear(K, H, bias), nn.Linear(K, H, bias)
        self.down = nn.Linear(H, K, bias)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        y: Tensor = self.out(F.scaled_dot_product_attention(q, k, v))
        return y

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(h)) * self.up(h))
        return y

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class UpFirst(Inline):
    """The other factor first, without attention, one more linear beside it."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        y: Tensor = self.down(self.up(h) * F.gelu(self.gate(h))) + self.out(h)
        return y


class InSequential(Inline):
    """The gate with its activation in a Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Sequential(self.gate, nn.SiLU())

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate(h) * self.up(h))
        return y


class ByModule(Inline):
    """A module as the activation, and a product in place."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.GELU(approximate="tanh")

    def mlp(self, h: Tensor) -> Tensor:
        opened = self.act(self.gate(h))
        opened *= self.up(h)
        y: Tensor = self.down(opened)
        return y


class InPlace(Inline):
    """An activation that overwrites what it is given, and a method as the product."""

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(h), inplace=True).mul_(self.up(h)))
        return y


class Bilinear(Inline):
    """No activation at all."""

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(self.gate(h) * self.up(h))
        return y


class Stacked(Inline):
    """Both halves in one linear, taken as ``how`` says."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(K, 2 * H), None  # type: ignore[assignment]

    def mlp(self, h: Tensor) -> Tensor:
        gate, up = self.gate(h).chunk(2, dim=-1)
        y: Tensor = self.down(F.silu(gate) * up)
        return y


class SplitBySize(Stacked):
    def mlp(self, h: Tensor) -> Tensor:
        up, gate = torch.split(self.gate(h), H, dim=-1)
        y: Tensor = self.down(F.relu(gate) * up)
        return y


class Sliced(Stacked):
    def mlp(self, h: Tensor) -> Tensor:
        both = self.gate(h)
        y: Tensor = self.down(both[..., :96] * torch.sigmoid(both[..., 96:]))
        return y


class InTurns(Stacked):
    def mlp(self, h: Tensor) -> Tensor:
        both = self.gate(h)
        y: Tensor = self.down(F.silu(both[..., ::2]) * both[..., 1::2])
        return y


class Glu(Stacked):
    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(F.glu(self.gate(h), -1))
        return y


class Half(Inline):
    """What follows the product is no linear: half of it is one call."""

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down((F.silu(self.gate(h)) * self.up(h)).clamp(-3.0, 3.0))
        return y


WHOLE = [
    *(Inline, UpFirst, InSequential, ByModule, InPlace, Bilinear),
    *(Stacked, SplitBySize, Sliced, InTurns, Glu),
]


def calls_seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The functions that rewritten modules call from here on."""
    seen: list[str] = []
    real = gated_forward.call

    def call(*args: Any) -> Tensor:
        seen.append(args[-1])
        return real(*args)

    monkeypatch.setattr(gated_forward, "call", call)
    return seen


class Linears(KnowingMode):
    """Counts the linears that are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += f is F.linear
        return f(*args, **(kwargs or {}))


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("make", [*WHOLE, Half])
def test_parts_of_a_forward_become_one_call(
    make: Any, mode: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    torch.manual_seed(0)
    model = nn.Sequential(make(), nn.Linear(K, 8)).train(mode == "train")
    x, plain, keys = torch.randn(2, 20, K), copy.deepcopy(model), list(model.state_dict())
    result = optimized(model, x, mode)
    kept = {s.fqn for s in result.sites if (s.rule, s.status) == ("gated_mlp", "kept")}
    gate = "0.gate.0" if make is InSequential else "0.gate"
    up = set() if issubclass(make, Stacked) else {"0.up"}
    assert kept == {gate, *up, *(() if make is Half else ("0.down",))}, result.table()
    assert list(model.state_dict()) == keys
    seen = calls_seen(monkeypatch)
    given = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = model(given[0]), plain(given[1])
    assert seen == ["gated_linear" if make is Half else "gated_mlp"]
    with Linears() as one, torch.no_grad():
        model(x)
    with Linears() as other, torch.no_grad():
        plain(x)
    assert one.count == other.count - len(kept), "each of them ran once"
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-3, atol=1e-4)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)
    stored = result.plan.to_json()
    result.revert()
    assert all("forward" not in vars(m) for m in model.modules())
    assert torch.equal(model(x), plain(x))
    again = fl.apply_(model, stored, x)
    names = {s.fqn for s in again.sites if (s.rule, s.status) == ("gated_mlp", "kept")}
    assert names == kept


def test_pairs_and_rows_beside_it_stay_rewritten(clock: Any) -> None:
    """One forward is built of all that is fused in it."""
    clock(FAST)

    class More(Inline):
        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.out(x))
            y: Tensor = self.mlp(self.norm2(h))
            return y

    model, x = nn.Sequential(More()).eval(), torch.randn(40, K)
    expected = model(x)
    result = optimized(model, x, families=("gated_mlp", "linear_act"))
    rules = {s.fqn: s.rule for s in result.sites if s.status == "kept"}
    assert rules == {
        "0.out": "linear_act",
        **dict.fromkeys(("0.gate", "0.up", "0.down"), "gated_mlp"),
    }
    torch.testing.assert_close(model(x), expected, rtol=2e-5, atol=2e-5)


def test_a_down_projection_with_an_activation_stays_a_pair(clock: Any) -> None:
    clock(FAST)

    class Activated(Inline):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.mlp(self.norm2(x)))

    model, x = nn.Sequential(Activated()).eval(), torch.randn(40, K)
    expected = model(x)
    result = optimized(model, x, families=("gated_mlp", "linear_act"))
    rules = {s.fqn: s.rule for s in result.sites if s.status == "kept"}
    assert rules == {"0.gate": "gated_mlp", "0.up": "gated_mlp", "0.down": "linear_act"}
    torch.testing.assert_close(model(x), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("make", [Inline, InSequential])
def test_a_changed_layer_keeps_its_say(
    make: Any, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    model, x = nn.Sequential(make()).eval(), torch.randn(40, K)
    optimized(model, x)
    block, seen = model[0], calls_seen(monkeypatch)

    def expected() -> Tensor:
        y: Tensor = type(block).forward(block, x)
        return y

    with torch.no_grad():  # a weight written to
        block.up.weight.mul_(3)
    torch.testing.assert_close(block(x), expected(), rtol=2e-5, atol=2e-5)
    assert len(seen) == 1
    hook = block.up.register_forward_hook(lambda _, __, y: 2 * y)  # a layer with a hook
    torch.testing.assert_close(block(x), expected())
    hook.remove()
    block.down = nn.Sequential(block.down, nn.Tanh())  # another layer in its place
    torch.testing.assert_close(block(x), expected())
    block.down = block.down[0]
    if make is InSequential:
        assert len(seen) == 1
        block(x)
        assert len(seen) == 2
        block.gate.append(nn.Tanh())  # a longer Sequential
        torch.testing.assert_close(block(x), expected())
        del block.gate[2]
        block.gate[1] = nn.ReLU()
        torch.testing.assert_close(block(x), expected())
        assert len(seen) == 2


class Dropping(Inline):
    """Drops what the gate lets through."""

    def __init__(self, functional: bool) -> None:
        super().__init__()
        self.drop, self.functional = nn.Dropout(0.5), functional

    def mlp(self, h: Tensor) -> Tensor:
        h = F.silu(self.gate(h)) * self.up(h)
        h = F.dropout(h, 0.5, self.training) if self.functional else self.drop(h)
        y: Tensor = self.down(h)
        return y


@pytest.mark.parametrize("functional", [False, True])
def test_dropout_is_passed_over_only_while_it_sleeps(
    functional: bool, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    torch.manual_seed(0)
    x = torch.randn(40, K)
    asleep = nn.Sequential(Dropping(functional)).eval()
    assert optimized(asleep, x).kept == 3
    assert torch.equal(asleep(x), asleep(x))
    asleep.train()
    assert not torch.equal(asleep(x), asleep(x)), "it drops"
    awake = nn.Sequential(Dropping(functional)).train()
    plain = copy.deepcopy(awake)
    result = optimized(awake, x, "train")
    assert {s.fqn for s in result.sites if s.status == "kept"} == {"0.gate", "0.up"}
    seen = calls_seen(monkeypatch)
    torch.manual_seed(3)
    ours = awake(x)
    torch.manual_seed(3)
    torch.testing.assert_close(ours, plain(x), rtol=2e-5, atol=2e-5)
    assert seen == ["gated_linear"]


class Read(Inline):
    """Something reads a value between the products."""

    def mlp(self, h: Tensor) -> Tensor:
        opened = F.silu(self.gate(h))
        y: Tensor = self.down(opened * self.up(h)) + opened.mean()
        return y


class Shared(Inline):
    """The forward calls a linear of its gated MLP twice."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(self.mlp(self.norm1(x)))


class Written(Inline):
    """Something writes to the input between the products."""

    def mlp(self, h: Tensor) -> Tensor:
        opened = F.silu(self.gate(h))
        h.add_(1.0)
        y: Tensor = self.down(opened * self.up(h))
        return y


class Hooked(Inline):
    def __init__(self) -> None:
        super().__init__()
        self.up.register_forward_hook(lambda *_: None)


class Watched(Inline):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda *_: None)


LEFT = {
    Read: "is read elsewhere as well",
    Shared: "is called more than once there",
    Written: "may write to its input",
    Hooked: "is left alone itself",
    Watched: "carries a forward hook",
}


@pytest.mark.parametrize("make", LEFT)
def test_what_cannot_be_one_call_is_left_alone(make: Any, clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(make()).eval(), torch.randn(40, K)
    plain = copy.deepcopy(model)
    result = optimized(model, x)
    assert result.kept == 0
    assert all("forward" not in vars(m) for m in model.modules())
    assert torch.equal(model(x.clone()), plain(x.clone()))
    (found,) = [f for f in result.findings if f.code == "gated_mlp"]
    assert LEFT[make] in found.message, found.message
    assert found.fqn == "0"


class Both(Inline):
    """An activation on either half."""

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(torch.tanh(self.gate(h)) * torch.sigmoid(self.up(h)))
        return y


class Apart(Inline):
    """Halves of two values."""

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(h)) * self.up(h + 1.0))
        return y


class Added(Inline):
    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = self.down(F.silu(self.gate(h)) + self.up(h))
        return y


class Scaled(Inline):
    """A squeeze and excitation: the other factor is no linear's."""

    def mlp(self, h: Tensor) -> Tensor:
        y: Tensor = h * torch.sigmoid(self.out(h))
        return y


class Narrow(Inline):
    """One gate for all features."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(K, 1)


@pytest.mark.parametrize("make", [Both, Apart, Added, Scaled, Narrow])
def test_what_is_no_gated_mlp_is_none(make: Any, clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(make()).eval(), torch.randn(40, K)
    result = optimized(model, x)
    assert result.kept == 0
    assert not [f for f in result.findings if f.code == "gated_mlp"]
