"""Why a forward cannot be traced, in words that name the model's own code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.profile.capture import profile
from fastlinear.profile.graph import Observed, Untraceable, trace


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ls = nn.ModuleList(nn.Linear(8, 8 + i) for i in range(4))


class Unbound(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([F.relu(f(p)) for f, p in zip(self.ls, x.unbind(1), strict=True)], -1)


class Unpacked(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.ls[0](torch.stack([*x])))


class Decides(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.ls[0](x)) if x.sum() > 0 else x


class Length(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.ls[0](x)) * len(x)


class Counts(Layers):
    def forward(self, x: Tensor) -> Tensor:
        for _ in range(x.shape[0]):
            x = F.relu(self.ls[0](x))
        return x


class Number(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.ls[0](x)) * float(x.sum())


class Own(Layers):
    def forward(self, x: Tensor) -> Tensor:
        self.ls["gate"].weight  # noqa: B018
        return F.relu(self.ls[0](x))


class Odd(Layers):
    def forward(self, x: Tensor) -> Tensor:
        return torch.from_numpy(self.ls[0](x).detach().numpy() + x[x > 0].numpy().sum())


SAID = {
    Unbound: "it loops over a tensor or unpacks one (line {}, in Unbound.forward); take its parts "
    "by index instead, x[:, i]",
    Unpacked: "it loops over a tensor or unpacks one (line {}, in Unpacked.forward); take its "
    "parts by index instead, x[:, i]",
    Decides: "it decides by a tensor's values or sizes (line {}, in Decides.forward); decide by "
    "what the module keeps, or take torch.where",
    Length: "it asks for a tensor's length (line {}, in Length.forward); write x.shape[0], or "
    "keep the number in the module",
    Counts: "it makes a number of a tensor's values or sizes (line {}, in Counts.forward); keep "
    "the number in the module, or compute on tensors",
    Number: "it makes a number of a tensor's values or sizes (line {}, in Number.forward); keep "
    "the number in the module, or compute on tensors",
}


@pytest.mark.parametrize("make", SAID)
def test_the_reason_names_the_line_and_a_remedy(make: Any) -> None:
    line = make.forward.__code__.co_firstlineno + 1
    with pytest.raises(Untraceable) as raised:
        trace(make(), Observed.of((torch.randn(3, 4, 8),), {}), runnable=True)
    assert str(raised.value) == SAID[make].format(line)


def test_other_errors_are_told_with_their_own_words() -> None:
    with pytest.raises(Untraceable, match=r"a run's own values \(line \d+, in Own\.forward\) \(T"):
        trace(Own(), Observed.of((torch.randn(3, 8),), {}))


@pytest.mark.parametrize("make", [*SAID, Odd])
def test_no_word_of_the_tracer_reaches_the_reader(make: Any) -> None:
    with pytest.raises(Untraceable) as raised:
        trace(make(), Observed.of((torch.randn(3, 4, 8),), {}))
    assert len(str(raised.value)) < 200
    for word in ("Proxy", "torch.fx", "TraceError", "symbolic", "docs"):
        assert word not in str(raised.value)


def test_the_profile_says_it_as_well() -> None:
    sites = profile(Unbound(), torch.randn(5, 4, 8), steps=1).sites
    assert {s.code for s in sites} == {"untraceable"}
    line = Unbound.forward.__code__.co_firstlineno + 1
    assert all(s.reason.endswith(f"reads the output: {SAID[Unbound].format(line)}.") for s in sites)
