"""Gated MLPs that are told but cannot be one call: adapters, parametrizations, tied weights, active
dropouts; and what is told where no time is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal, weight_norm

import fastlinear as fl
from fastlinear.rewrite.evaluate import chains

FAST = {"onednn": 50.0, "cpp": 50.0, "pieces": 50.0, "after": 50.0}
K, H = 32, 96


def told(model: nn.Module, mode: str = "inference", x: Tensor | None = None) -> Any:
    """Its one gated MLP, of the block at ``b``."""
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, time_budget_s=60.0)
    result = fl.optimize_(model, torch.randn(2, 20, K) if x is None else x, config=config)
    assert not [s for s in result.sites if (s.rule, s.status) == ("gated_mlp", "kept")]
    (found,) = [f for f in result.findings if f.code == "gated_mlp"]
    assert found.fqn == "b"
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(K)
        self.g: Any = nn.Linear(K, H)
        self.u: Any = nn.Linear(K, H)
        self.d: Any = nn.Linear(H, K)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.d(F.silu(self.g(h)) * self.u(h))
        return y


class Model(nn.Module):
    def __init__(self, change: Callable[[Any], Any], block: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.b, self.head = block(), nn.Linear(K, 8)
        change(self.b)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.b(x))
        return y


class LoRA(nn.Module):
    def __init__(self, base: nn.Linear, first: bool = False) -> None:
        super().__init__()
        self.base, self.first = base, first
        self.a = nn.Linear(base.in_features, 4, False)
        self.b = nn.Linear(4, base.out_features, False)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return 2.0 * self.b(self.a(x)) + self.base(x)
        y: Tensor = self.base(x) + self.b(self.a(x)) * 2.0
        return y


class Merged(nn.Linear):
    """Its weight is put together at each call."""

    def __init__(self) -> None:
        super().__init__(K, H)
        self.a, self.b = nn.Parameter(torch.randn(4, K)), nn.Parameter(torch.randn(H, 4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight + self.b @ self.a, self.bias)


def gate(block: Any) -> None:
    block.g = LoRA(block.g)


def down_first(block: Any) -> None:
    block.d, block.u = LoRA(block.d, True), LoRA(block.u, True)


def every(block: Any) -> None:
    block.g, block.u, block.d = LoRA(block.g), LoRA(block.u), LoRA(block.d)


def merged(block: Any) -> None:
    block.u = Merged()


def normed(block: Any) -> None:
    weight_norm(block.g)


def two_parametrized(block: Any) -> None:
    weight_norm(block.u)
    orthogonal(block.d)


MIXED = {
    gate: ("'b.g' (LoRA) adds", "'b.g.base.weight', 'b.g.b.weight', 'b.g.a.weight'"),
    down_first: ("'b.u' (LoRA), 'b.d' (LoRA) each add", "'b.u.b.weight', 'b.u.a.weight'"),
    every: ("'b.g' (LoRA), 'b.u' (LoRA), 'b.d' (LoRA) each add", "merged"),
    merged: ("'b.u' (Merged) adds", "'b.u.weight', 'b.u.b', 'b.u.a'"),
    normed: ("'b.g': parametrized", "its weight is computed at each call"),
    two_parametrized: ("'b.u', 'b.d': parametrized", ""),
}


@pytest.mark.parametrize("change", MIXED)
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_a_projection_that_is_more_than_one_product_is_named(
    change: Any, mode: str, clock: Any
) -> None:
    clock(FAST)
    found = told(Model(change).train(mode == "train"), mode)
    for part in MIXED[change]:
        assert part in found.message, found.message
    assert f"products {K} → {H} twice (gate, up), {H} → {K} (down)" in found.message
    assert found.details["advice"] is None
    assert found.details["calls"] == 1


class Residual(Block):
    """A product and what it was made of: no adapter, and no gated MLP of one input either."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = self.d(F.silu(self.g(h)) * self.u(self.r(h)))
        return y


class Swish(Block):
    """An activation written out is no gate."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.g(self.norm(x))
        y: Tensor = self.d(h * torch.sigmoid(h))
        return y


def square(block: Any) -> None:
    block.r = nn.Linear(K, K)


@pytest.mark.parametrize("kind", [Residual, Swish])
def test_what_is_no_gated_mlp_is_not_told(kind: Any, clock: Any) -> None:
    clock(FAST)
    config = fl.Config(draws=1, time_budget_s=60.0)
    model = Model(square, kind).eval()
    result = fl.optimize_(model, torch.randn(2, 20, K), config=config)
    assert not [f for f in result.findings if f.code == "gated_mlp"]


def tied(block: Any) -> None:
    block.u.weight = block.g.weight


def test_gate_and_up_of_one_weight_are_told(clock: Any) -> None:
    clock(FAST)
    found = told(Model(tied).eval())
    assert "its linears 'b.g' and 'b.u' have one weight" in found.message


def dropping(block: Any) -> None:
    block.g = nn.Sequential(block.g, nn.SiLU(), nn.Dropout(0.25))


class Opened(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.d(self.g(h) * self.u(h))
        return y


class Functional(Block):
    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        y: Tensor = x + self.d(F.dropout(F.silu(self.g(h)), 0.25, self.training) * self.u(h))
        return y


@pytest.mark.parametrize(("change", "kind"), [(dropping, Opened), (lambda _: None, Functional)])
def test_an_active_dropout_is_told(change: Any, kind: Any, clock: Any) -> None:
    clock(FAST)
    found = told(Model(change, kind).train(), "train")
    assert "in training a dropout of 0.25 is active between its products" in found.message


# ---------------------------------------------------------------- reasons


class OfWeights(Block):
    """Products with the weights of layers that it never calls, in a loop by a tensor's value."""

    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 1e9:
            x = x / 2
        h = self.norm(x)
        gate, up = F.linear(h, self.g.weight), F.linear(h, self.u.weight)
        return x + F.linear(F.silu(gate) * up, self.d.weight)


def test_the_reason_is_the_callers(clock: Any) -> None:
    """Not that of the layers, which are never called, nor that of a Sequential around."""
    clock(FAST)
    config = fl.Config(draws=1, time_budget_s=60.0, families=("gated_mlp",))
    model = nn.Sequential(OfWeights(), nn.Linear(K, 8)).eval()
    result = fl.optimize_(model, torch.randn(2, 20, K), config=config)
    (found,) = [f for f in result.findings if f.code == "gated_mlp"]
    assert found.fqn == "0"
    assert "decides by a tensor" in found.message
    assert "never call" not in found.message
    assert "container" not in found.message
    wanted = "fl.gated_mlp on model[0].g.weight, model[0].u.weight, model[0].d.weight"
    assert found.details["advice"] == wanted


def test_what_was_tried_is_told_though_no_time_is_left(
    clock: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({**FAST, "after": 200.0})
    gains = chains._gains

    def spent(work: Any, *args: Any) -> bool:
        work.budget.seconds = 0.0
        return gains(work, *args)

    monkeypatch.setattr(chains, "_gains", spent)
    found = told(Model(lambda _: None).eval())
    assert "100.0 us a call, 200.0 us by gated_mlp" in found.message, found.message
    assert "Not measured" not in found.message
    assert "one call is 0.50x" in found.message
