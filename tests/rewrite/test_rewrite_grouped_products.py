"""Products with a weight per group amid other work: seen, measured and told."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.rules.grouped import products

G, K, N = 3, 5, 4


class Amid(nn.Module):
    """A weight per group beside a norm, a scale and a linear."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(K), nn.Linear(N, 2)
        self.w = nn.Parameter(torch.randn(G, K, N) if turned else torch.randn(G, N, K))
        self.b = nn.Parameter(torch.randn(G, 1, N))


class Bmm(Amid):
    def forward(self, x: Tensor) -> Tensor:  # (G, M, K)
        return self.out(torch.bmm(self.norm(x), self.w))


class Mirrored(Amid):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x).bmm(self.w.mT))


class Baddbmm(Amid):
    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.baddbmm(self.b, self.norm(x), self.w))


class Einsum(Amid):
    def forward(self, x: Tensor) -> Tensor:  # (M, G, K)
        return self.out(torch.einsum("bgk,gnk->bgn", self.norm(x), self.w))


class Deep(Amid):
    def forward(self, x: Tensor) -> Tensor:  # (G, A, B, K)
        return self.out(torch.einsum("g a b i, g i o -> g a b o", [self.norm(x), self.w]))


CASES: dict[str, tuple[Any, bool, tuple[int, ...], str]] = {
    "bmm": (Bmm, True, (G, 7, K), "g ... k"),
    "mirrored": (Mirrored, False, (G, 7, K), "g ... k"),
    "baddbmm": (Baddbmm, True, (G, 7, K), "g ... k"),
    "einsum": (Einsum, False, (7, G, K), "... g k"),
    "deep": (Deep, True, (G, 2, 7, K), "g ... k"),
}


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", CASES)
def test_they_are_findings_with_the_reason(name: str, mode: str, clock: Any) -> None:
    clock({"after": 40.0})
    make, turned, shape, layout = CASES[name]
    model, x = nn.Sequential(make(turned)), torch.randn(shape)
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, families=("grouped_linear",))
    result = fl.optimize_(model, x, config=config)
    (told,) = [f for f in result.findings if f.code == "grouped_linear"]
    assert told.fqn == "0"
    assert told.measured_us > told.predicted_gain_us > 0
    assert "'0.w' amid other work" in told.message
    assert f"layout={layout!r}" in told.message
    assert ("transpose" in told.message) == turned
    assert f"leaves it alone: {products.WHY}" in told.message


@pytest.mark.parametrize("name", CASES)
def test_what_is_measured_is_the_same_product(name: str) -> None:
    make, turned, shape, _ = CASES[name]
    model, x = make(turned), torch.randn(shape)
    with products.Products(model) as seen, torch.no_grad():
        model(x)
        model(x)
    (product,) = seen.found.values()
    assert product.calls == 2
    session = SimpleNamespace(model=model, train=False)
    fusion = products.of_product(session, product)
    assert fusion is not None
    torch.testing.assert_close(fusion.after(product.x), fusion.before(product.x))


class Others(Amid):
    """Products that are none of groups: of parts, in another order, with a copy."""

    def forward(self, x: Tensor) -> Tensor:  # (M, G, K)
        y = torch.einsum("bgk,gnk->gbn", x, self.w).transpose(0, 1)
        y = y + torch.einsum("bgk,hnk->bgn", x, self.w)
        return self.out(y + torch.einsum("bgk,gnk->bgn", x, self.w * 1.0))


def test_other_products_are_passed_over() -> None:
    model = Others(False)
    with products.Products(model) as seen:
        model(torch.randn(7, G, K))
    assert not seen.found
