"""Loops over linears that must not become one call, and what is told of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from tests.rewrite.grouped_models import FAST, optimized
from tests.rewrite.list_models import (
    FAMILY,
    TOGETHER,
    Layers,
    Listed,
    Shared,
    Split,
    kept,
    own,
)

pytestmark = pytest.mark.skipif(not TOGETHER, reason="unequal_linear has no kernels here")


class Waiting(Layers):
    """Each reads what the one before gave."""

    def __init__(self) -> None:
        super().__init__(((8, 8),) * 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Written(Shared):
    """Their input is written to between them."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        y = self.layers[0](x)
        x.mul_(2.0)
        return torch.cat([y, self.layers[1](x)], -1)


class Drawing(Shared):
    """What the second reads is drawn behind the first."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers[0](x)
        return torch.cat([y, self.layers[1](F.dropout(x, 0.5, True))], -1)


class Appending(Layers):
    """Lengthens the list of its caller."""

    def forward(self, xs: list[Tensor]) -> Any:
        xs.append(xs[0])
        return [layer(x) for layer, x in zip(self.layers, xs, strict=False)]


class Returning(Listed):
    """Hands the list of its caller back."""

    def forward(self, xs: list[Tensor]) -> Any:
        return [layer(x) for layer, x in zip(self.layers, xs, strict=True)], xs


class Counting(Listed):
    """Keeps what it counts in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = [0]

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        self.counts.append(len(xs))
        return [layer(x) for layer, x in zip(self.layers, xs, strict=True)]


class Handing(Listed):
    """A child may do anything to the list."""

    def __init__(self) -> None:
        super().__init__()
        self.child = Lengthening()

    def forward(self, xs: list[Tensor]) -> list[Tensor]:
        self.child(xs)
        return [layer(x) for layer, x in zip(self.layers, xs, strict=False)]


class Lengthening(nn.Module):
    def forward(self, xs: list[Tensor]) -> None:
        xs.append(xs[0])


@pytest.mark.parametrize("make", [Waiting, Written, Drawing])
def test_linears_that_must_not_be_moved_are_left_alone(make: Any, clock: Any) -> None:
    clock(FAST)
    model = make().train()
    result = optimized(model, torch.randn(9, 8), families=FAMILY)
    assert result.kept == 0
    assert "forward" not in vars(model)


@pytest.mark.parametrize("make", [Appending, Returning, Counting, Handing])
def test_lists_that_a_forward_changes_or_keeps_stay_the_callers(make: Any, clock: Any) -> None:
    clock(FAST)
    model = make().eval()
    xs = own()
    assert optimized(model, (list(xs),), families=FAMILY).kept == 0
    assert "forward" not in vars(model)
    counts = list(getattr(model, "counts", ()))
    mine = list(xs)
    y = model(mine)
    if make in (Appending, Handing):
        assert len(mine) == 6
    if make is Returning:
        assert y[1] is mine
    if make is Counting:
        assert model.counts == [*counts, 5]


def test_what_is_not_rewritten_is_told_with_its_reason(clock: Any) -> None:
    """Inputs that the caller gave, or parts of one tensor, were there before the first call."""
    clock({"after": 40.0})
    for make, x, why in (
        (Appending, (own(),), "changes a list that others hold"),
        (Branching, (torch.randn(9, 36),), "decides by a tensor's values"),
    ):
        result = optimized(make().eval(), x, families=FAMILY)
        (told,) = [f for f in result.findings if f.code == "grouped_linear"]
        assert "linears of different sizes on inputs of their own run one after" in told.message
        assert told.advice == (
            "fl.unequal_linear(xs, [m.weight for m in model.layers], "
            "[m.bias for m in model.layers])"
        )
        assert why in told.message
    unsure = optimized(Doubting().eval(), (torch.randn(9, 8),), families=FAMILY)
    assert not [f for f in unsure.findings if f.code == "grouped_linear"]


class Branching(Split):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if x.sum() < 1e9 else -x)


class Doubting(Waiting):
    """Each reads what the one before gave, and no trace can say so."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() < 1e9 else x


def test_a_filter_and_the_settings_leave_them_alone(clock: Any) -> None:
    clock(FAST)
    config = fl.Config(draws=1, tune=False, families=FAMILY)
    left = lambda _, fqn: fqn != "layers.2"  # noqa: E731
    result = fl.optimize_(Listed(), (own(),), config=config, filter_fn=left)
    assert result.kept == 0
    (told,) = [f.message for f in result.findings if f.code == "grouped_linear"]
    assert "'layers.2' is left alone itself" in told
    other = fl.Config(draws=1, tune=False, families=("linear_act",))
    result = fl.optimize_(Listed(), (own(),), config=other)
    assert not kept(result)
    assert not [f for f in result.findings if f.code == "grouped_linear"]


def test_lists_of_numbers_are_compared_with_the_types_of_their_items() -> None:
    from fastlinear.rewrite.swap.traceable import as_it_is, same, watchable

    sizes = [8, 5, 12]
    kept = as_it_is(sizes)
    assert watchable(sizes)
    assert same(sizes, kept)
    sizes[1] = 6
    assert not same(sizes, kept)
    assert not same([1, 0], [True, False])
    assert not same([1], [1.0])
    assert not same((1, 2), [1, 2])
    assert same((1, "a", None), (1, "a", None))
    tensors = [torch.ones(2)]
    assert not watchable(tensors)
    assert not same(tensors, [torch.ones(2)])
