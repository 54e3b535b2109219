"""Modules whose class defines ``__call__``: told by name where nothing can see them run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.profile.graph import Observed, Untraceable, trace
from fastlinear.profile.own_calls import bypasses
from tests.rewrite.grouped_models import FAST, optimized


class MultichannelLinear(nn.Module):
    """The document's own class."""

    def __init__(self, channels: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight_pw = nn.Parameter(torch.empty(channels, out_features, in_features))
        bound = 1 / math.sqrt(in_features * channels)
        nn.init.uniform_(self.weight_pw, a=-bound, b=bound)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.matmul(x.transpose(2, 3), self.weight_pw.transpose(1, 2)).transpose(2, 3)


class Mean(nn.Module):
    """The document's use of it: (B, H, W) in four channels, and the mean over them."""

    def __init__(self) -> None:
        super().__init__()
        self.m = MultichannelLinear(4, 8, 8)

    def forward(self, b: Tensor) -> Tensor:
        b = b.unsqueeze(1).expand(b.shape[0], 4, *b.shape[1:])
        return torch.mean(self.m(b), dim=1)


class Counted(nn.Linear):
    """Its ``__call__`` goes on to nn.Module's, whose hooks see it."""

    def __call__(self, *args: Any) -> Any:
        return super().__call__(*args)


class Beside(nn.Module):
    """A linear and its activation, in a forward that calls the other class too."""

    def __init__(self) -> None:
        super().__init__()
        self.m = MultichannelLinear(4, 8, 8)
        self.held = nn.ModuleList([self.m])
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.fc(self.m(x)))


MODELS = {
    "alone": (lambda: MultichannelLinear(4, 8, 8), (2, 4, 8, 16), ""),
    "in a model": (Mean, (2, 8, 16), "m"),
    "in a Sequential": (
        lambda: nn.Sequential(MultichannelLinear(4, 8, 8), nn.Linear(16, 4)),
        (2, 4, 8, 16),
        "0",
    ),
}


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("name", MODELS)
def test_it_is_told_by_name_with_what_to_change(name: str, mode: str, clock: Any) -> None:
    clock(FAST)
    make, shape, fqn = MODELS[name]
    model, x = make().train(mode == "train"), torch.randn(shape)
    before = model(x)
    result = optimized(model, x, mode)
    (finding,) = [f for f in result.findings if f.code == "own_call"]
    assert finding.fqn == fqn
    assert "Rename MultichannelLinear.__call__ to forward" in result.table()
    assert ("defines __call__ and so cannot be seen" in result.table()) == (not result.sites)
    torch.testing.assert_close(model(x), before)
    result.to_json()
    report = fl.profile(model, x, mode, steps=1)
    assert [f.fqn for f in report.findings if f.code == "own_call"] == [fqn]
    assert "Rename MultichannelLinear.__call__ to forward" in report.table()


def test_renamed_as_told_it_is_rewritten(clock: Any) -> None:
    clock(FAST)

    class Renamed(MultichannelLinear):
        __call__ = nn.Module.__call__
        forward = MultichannelLinear.__call__

    model = Renamed(4, 8, 8).eval()
    result = optimized(model, torch.randn(2, 4, 8, 16))
    assert result.kept == 1
    assert not [f for f in result.findings if f.code == "own_call"]


def test_calls_that_go_on_to_torchs_are_seen() -> None:
    model, x = nn.Sequential(Counted(8, 8), nn.ReLU()), torch.randn(4, 8)
    assert not bypasses(model[0])
    report = fl.profile(model, x, steps=1)
    assert not [f for f in report.findings if f.code == "own_call"]
    assert {s.fqn: s.calls for s in report.sites} == {"0": 1}


@pytest.mark.parametrize("kind", ["child", "Sequential"])
def test_its_code_is_not_taken_for_its_parents(kind: str) -> None:
    """A trace would hold it as it is now, unread and unwatched."""
    model = Beside() if kind == "child" else nn.Sequential(MultichannelLinear(4, 8, 8))
    observed = Observed.of((torch.randn(2, 4, 8, 16),), {})
    with pytest.raises(Untraceable, match="MultichannelLinear, which defines __call__"):
        trace(model, observed, runnable=True)


def test_what_stands_beside_it_is_left_or_right(clock: Any) -> None:
    clock(FAST)
    model, x = Beside().eval(), torch.randn(2, 4, 8, 16)
    expected = model(x)
    result = optimized(model, x)
    torch.testing.assert_close(model(x), expected)
    assert {f.fqn for f in result.findings if f.code == "own_call"} == {"m"}
