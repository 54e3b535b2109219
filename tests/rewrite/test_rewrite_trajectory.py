"""Optimizer steps: a failure that is chance is forgiven, one that is not is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.oracle import make_oracle
from fastlinear.rewrite.verify.running import Runner, run_once

TRAIN = Runner("train", None, torch.device("cpu"), 0)
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def judge(model: nn.Module) -> verify.Judge:
    call = Call((X,), {})
    ran = run_once(model, call, TRAIN)
    oracle, exact = make_oracle(model, TRAIN, call, ran)
    return verify.Judge(
        model, TRAIN, call, draws=2, oracle=oracle, seconds=30, ran=ran, exact=exact
    )


def scaled(factor: float) -> Any:
    """A forward whose results are off by a factor."""

    def forward(self: nn.Linear, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias) * factor

    return forward


def unlucky(monkeypatch: pytest.MonkeyPatch, times: int) -> list[int]:
    """The first ``times`` trajectories fail by a little more than what is allowed; → how many."""
    seen: list[int] = []
    compared = verify.Judge._compared

    def instead(self: verify.Judge, *args: Any) -> dict[str, verify.Verdict]:
        found = compared(self, *args)
        seen.append(len(seen))
        if len(seen) <= times:
            found = {n: replace(v, error=1.05 * v.limit) for n, v in found.items()}
        return found

    monkeypatch.setattr(verify.Judge, "_compared", instead)
    return seen


def test_chance_is_forgiven_and_more_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    swaps = SwapSet([Swap("0", model[0], scaled(1.0))])
    seen = unlucky(monkeypatch, 1)
    assert all(v.passed for v in judge(model).trajectory(swaps, 2))
    assert len(seen) == 1 + verify._MORE_DRAWS
    seen = unlucky(monkeypatch, 1 + verify._MORE_DRAWS)
    assert not any(v.passed for v in judge(model).trajectory(swaps, 2))


def test_what_passes_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    seen = unlucky(monkeypatch, 0)
    judged = judge(model)
    found = judged.trajectory(SwapSet([Swap("0", model[0], scaled(1.0))]), 2)
    assert len(found) == 1 + len(list(model.parameters()))
    assert all(v.passed for v in found)
    assert len(seen) == 1


def test_wrong_results_fail_on_every_draw() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    judged = judge(model)
    found = judged.trajectory(SwapSet([Swap("0", model[0], scaled(1.0 + 1e-4))]), 2)
    assert {v.name for v in found if not v.passed} >= {"optimizer steps: 0.weight"}
    assert judged.skipped == []


def test_inputs_that_the_model_refuses_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            if not torch.equal(x, X.to(x.dtype)):
                raise ValueError("other inputs")
            return self.fc(x)

    model = Picky()
    unlucky(monkeypatch, 1)
    judged = judge(model)
    found = judged.trajectory(SwapSet([Swap("fc", model.fc, scaled(1.0))]), 2)
    assert not any(v.passed for v in found)
    assert "optimizer steps of draw 1 (ValueError: other inputs)" in judged.skipped
