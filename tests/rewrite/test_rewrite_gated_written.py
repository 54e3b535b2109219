"""Gated MLPs whose activation is written out, in forwards that do more and in ones of their own."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.rules.gated import forward as gated_forward

FAST = {"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": 50.0}
K, H = 64, 96


def optimized(model: nn.Module, x: Any, mode: str = "inference", **how: Any) -> Any:
    how.setdefault("families", ("gated_mlp",))
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0, **how)
    return fl.optimize_(model, x, config=config)


def gelu_tanh(g: Tensor) -> Tensor:
    cube = 0.044715 * torch.pow(g, 3)
    return 0.5 * g * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (g + cube)))


def gelu(g: Tensor) -> Tensor:
    return 0.5 * g * (1.0 + torch.erf(g / math.sqrt(2.0)))


def in_place(_: nn.Module, g: Tensor, u: Tensor) -> Tensor:
    opened = torch.sigmoid(g).mul(g)
    opened *= u
    return opened


def on_the_output(_: nn.Module, g: Tensor, u: Tensor) -> Tensor:
    g *= torch.sigmoid(g)
    g *= u
    return g


ON_IT = "on the output"
WAYS = {
    "(g*s)*u": ("silu", lambda _, g, u: (g * torch.sigmoid(g)) * u),
    "g*(s*u)": ("silu", lambda _, g, u: g * (g.sigmoid() * u)),
    "u*g*s": ("silu", lambda _, g, u: u * g * F.sigmoid(g)),
    "u*(s*g)": ("silu", lambda _, g, u: torch.mul(u, g.sigmoid().mul(g))),
    "over": ("silu", lambda _, g, u: u * g / (1.0 + torch.exp(-g))),
    "in place": ("silu", in_place),
    ON_IT: ("silu", on_the_output),
    "quick": ("quick_gelu", lambda _, g, u: g * torch.sigmoid(1.702 * g) * u),
    "tanh's gelu": ("gelu_tanh", lambda _, g, u: gelu_tanh(g) * u),
    "gelu": ("gelu", lambda _, g, u: u * gelu(g)),
    "a module": ("silu", lambda self, g, u: g * self.sig(g) * u),
    "relu's square": ("relu2", lambda _, g, u: u * torch.square(F.relu(g))),
    "a module's square": ("relu2", lambda self, g, u: self.act(g).square() * u),
    "squared": ("relu2", lambda _, g, u: F.relu(g) * u * F.relu(g)),
}


class Own(nn.Module):
    """A gated MLP and nothing else."""

    opened: Any

    def __init__(self, *, stacked: bool = False) -> None:
        super().__init__()
        self.gate = nn.Linear(K, 2 * H if stacked else H)
        self.up = None if stacked else nn.Linear(K, H)
        self.down, self.sig, self.act = nn.Linear(H, K), nn.Sigmoid(), nn.ReLU()

    def mlp(self, h: Tensor) -> Tensor:
        if self.up is None:
            both = self.gate(h)
            g, u = both[..., :96], both[..., 96:]
        else:
            g, u = self.gate(h), self.up(h)
        y: Tensor = self.down(self.opened(g, u))
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


class Block(Own):
    """A transformer's block that computes its gated MLP itself."""

    def __init__(self, *, stacked: bool = False) -> None:
        super().__init__(stacked=stacked)
        self.norm1, self.norm2 = nn.LayerNorm(K), nn.LayerNorm(K)
        self.qkv, self.out = nn.Linear(K, 3 * K), nn.Linear(K, K)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        return x + self.mlp(self.norm2(x))


def written(kind: type[Own], opened: Any, **how: Any) -> Own:
    """One whose gate and up projection are made one of by ``opened``."""
    made: Own = type(kind.__name__, (kind,), {"opened": opened})(**how)
    return made


def calls_seen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activations of gated MLPs that are called from here on."""
    seen: list[str] = []
    real = gated_forward.call

    def call(*args: Any) -> Tensor:
        seen.append(args[3])
        return real(*args)

    monkeypatch.setattr(gated_forward, "call", call)
    return seen


def expect_one_call(
    model: nn.Module, plain: nn.Module, x: Tensor, activation: str, seen: list[str]
) -> None:
    given = [x.clone().requires_grad_() for _ in range(2)]
    ours, theirs = model(given[0]), plain(given[1])
    assert seen == [activation]
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    ours.square().sum().backward()
    theirs.square().sum().backward()
    torch.testing.assert_close(given[0].grad, given[1].grad, rtol=1e-3, atol=1e-4)
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize(
    ("way", "stacked"),
    # halves that are written to have no gradient in PyTorch itself
    [(way, stacked) for way in WAYS for stacked in (False, True) if way != ON_IT or not stacked],
)
def test_in_a_larger_forward_it_becomes_one_call(
    way: str, stacked: bool, mode: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    torch.manual_seed(0)
    model = nn.Sequential(written(Block, WAYS[way][1], stacked=stacked), nn.Linear(K, 8)).train(
        mode == "train"
    )
    x, plain = torch.randn(2, 20, K), copy.deepcopy(model)
    result = optimized(model, x, mode)
    names = {"0.gate", "0.down"} if stacked else {"0.gate", "0.up", "0.down"}
    kept = {s.fqn for s in result.sites if (s.rule, s.status) == ("gated_mlp", "kept")}
    assert kept == names, result.table()
    activation = WAYS[way][0]
    assert f"linears ({activation} written out) in one call" in " ".join(
        result.table(width=80).split()
    )
    (found,) = [f for f in result.findings if f.code == "gated_mlp"]
    assert found.details["activation"] == activation
    assert {f"0.{name}" for name in found.details["linears"]} == names
    assert f"{activation} and the product are written out as" in found.message
    expect_one_call(model, plain, x, activation, calls_seen(monkeypatch))
    stored = result.plan.to_json()
    result.revert()
    model.zero_grad()
    assert torch.equal(model(x), plain(x))
    again = fl.apply_(model, stored, x)
    assert {s.fqn for s in again.sites if (s.rule, s.status) == ("gated_mlp", "kept")} == names


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("way", ["(g*s)*u", "g*(s*u)", "u*g*s", "tanh's gelu", "a module"])
def test_in_a_module_of_its_own_it_becomes_one_call(
    way: str, mode: str, clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock(FAST)
    torch.manual_seed(0)
    model = nn.Sequential(written(Own, WAYS[way][1]), nn.Linear(K, 8)).train(mode == "train")
    x, plain = torch.randn(2, 20, K), copy.deepcopy(model)
    result = optimized(model, x, mode)
    assert {s.fqn for s in result.sites if s.status == "kept"} == {"0.gate", "0.up", "0.down"}
    activation = WAYS[way][0]
    expect_one_call(model, plain, x, activation, calls_seen(monkeypatch))


def read(_: nn.Module, g: Tensor, u: Tensor) -> Tensor:
    s = torch.sigmoid(g)
    return g * s * u + s.mean()


NOT = {
    "sums": lambda _, g, u: g * torch.sigmoid(g) + u,
    "up twice": lambda _, g, u: g * torch.sigmoid(g) * u * u,
    "another": lambda _, g, u: g * torch.sigmoid(1.5 * g) * u,
    "both": lambda _, g, u: g * torch.sigmoid(g) * torch.sigmoid(u),
    "clamped": lambda _, g, u: g * torch.sigmoid(g).clamp(min=0.1) * u,
    "no gradient": lambda _, g, u: g * torch.sigmoid(g).detach() * u,
    "a third": lambda self, g, u: g * torch.sigmoid(g) * (u + self.out(u[..., :K])[..., :1]),
    "read": read,
}


@pytest.mark.parametrize("way", NOT)
def test_what_is_no_gate_or_is_read_stays(way: str, clock: Any) -> None:
    clock(FAST)
    model, x = nn.Sequential(written(Block, NOT[way])).eval(), torch.randn(2, 20, K)
    plain = copy.deepcopy(model)
    result = optimized(model, x)
    assert result.kept == 0
    assert torch.equal(model(x), plain(x))
    told = [f.message for f in result.findings if f.code == "gated_mlp"]
    assert way != "read" or "is read elsewhere as well" in told[0]


def test_the_passes_of_its_operations_are_counted(clock: Any) -> None:
    """``g * sigmoid(g) * u``: three operations, eight numbers; in the other way one more."""
    clock(FAST)
    x, moved = torch.randn(2, 20, K), []
    for way in ("(g*s)*u", "over"):
        model = nn.Sequential(written(Block, WAYS[way][1])).eval()
        (found,) = [f for f in optimized(model, x).findings if f.code == "gated_mlp"]
        moved.append(found.details["avoidable_bytes"])
    in_other_ops = 3 + 2 + 2 + 2 + 3  # u * g / (1 + exp(-g))
    assert moved[1] - moved[0] == (in_other_ops - 8) * 40 * H * 4
