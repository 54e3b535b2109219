"""An activation that cannot become part of its linear's call: told in the user's words, whatever
becomes of the linear."""

from __future__ import annotations

import re
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.swap.traceable import _UNTRACEABLE_OPS
from tests.rewrite.rewrite_models import Clock

X = torch.randn(8, 32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(32, 64)
        self.seen = 0


class WithBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        with nullcontext():
            return F.relu(self.fc(x))


class SetsAttribute(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        return F.relu(self.fc(x))


class SetsItem(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        kept = {}
        kept["y"] = y
        return kept["y"]


class Imports(Block):
    def forward(self, x: Tensor) -> Tensor:
        import math

        return F.relu(self.fc(x)) * math.pi


class AsksGradMode(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        return y if torch.is_grad_enabled() else y + 0


class HasLambda(Block):
    def forward(self, x: Tensor) -> Tensor:
        double = lambda y: 2 * y  # noqa: E731
        return double(F.relu(self.fc(x)))


class TwoReaders(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return F.relu(y) + y


LEFT = [
    (WithBlock, r"has a with block \(line \d+\), which a rewritten forward would leave out; move"),
    (SetsAttribute, r"sets the attribute seen \(line \d+\), which"),
    (SetsItem, r"writes to an item of a list, dict or tensor \(line \d+\)"),
    (Imports, r"imports math \(line \d+\), .*; import it at the top of the file"),
    (AsksGradMode, r"uses is_grad_enabled \(line \d+\), which a rewritten forward would keep as"),
    (HasLambda, r"defines a lambda inside \(line \d+\); define it outside forward"),
    (TwoReaders, r"Its output has 2 readers: relu, add"),
]


@pytest.mark.parametrize(("make", "words"), LEFT)
@pytest.mark.parametrize("after", [50.0, 100.0, 200.0])
def test_it_is_told_whatever_becomes_of_the_linear(
    make: type[Block], words: str, after: float, clock: Clock
) -> None:
    clock({"onednn": 50.0, "after": after})
    (found,) = fl.optimize_(make().eval(), X).sites
    assert found.status == ("kept" if after < 100.0 else "rejected")
    assert found.activation == "none"
    assert re.search(words, found.reason), found.reason
    assert found.reason.count("activation left alone: ") == 1
    assert not [name for name in _UNTRACEABLE_OPS if name in found.reason]
    assert ("nn.Sequential(linear, activation)" in found.reason) is (make is not TwoReaders)


@pytest.mark.parametrize("make", [WithBlock, TwoReaders])
def test_it_is_told_where_eager_is_best(make: type[Block], clock: Clock) -> None:
    clock({"onednn": 200.0})
    (found,) = fl.optimize_(make().eval(), X).sites
    assert found.status == ("refused" if make is WithBlock else "nothing_to_do")
    assert ("with block" if make is WithBlock else "activation left alone: ") in found.reason


def test_its_finding_says_so_too(clock: Clock) -> None:
    clock({})
    report = fl.profile(WithBlock().eval(), X)
    finding = next(f for f in report.findings if f.code == "linear_activation")
    assert "optimize_ leaves the activation alone: WithBlock.forward has a with" in finding.message
    assert "leaves the activation alone" in " ".join(report.table().split())


@pytest.mark.usefixtures("fast")
def test_an_activation_that_is_fused_is_not() -> None:
    class Plain(Block):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.fc(x))

    result = fl.optimize_(Plain().eval(), X)
    assert result.sites[0].activation == "relu"
    assert "left alone" not in result.table()
    assert not [f for f in result.findings if "left_alone" in f.details]


@pytest.mark.usefixtures("fast")
def test_a_sequential_in_its_place_is_fused() -> None:
    """What the text says is to be done."""

    class Inside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Sequential(nn.Linear(32, 64), nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y: Tensor = self.fc(x)
                return y

    (found,) = fl.optimize_(Inside().eval(), X).sites
    assert (found.status, found.activation) == ("kept", "relu")
