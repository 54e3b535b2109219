"""A model that optimize_ gave packed weights answers with its weights of now."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from rewrite_models import Clock
from torch import nn

from fastlinear.ops.common import weight_hash
from fastlinear.ops.linear_act import mkl, onednn
from fastlinear.ops.linear_act.problem import problem
from fastlinear.rewrite import optimize_

P = problem("forward", 128, 96, 384, dtype="float32", device="cpu")
REASONS = {"onednn_packed": onednn.reason_not_packed(P), "mkl_packed": mkl.reason_not(P)}


def rows_of_data(model: nn.Module) -> None:
    model[0].weight.data[100:140] = 0  # type: ignore[index]


def element_of_data(model: nn.Module) -> None:
    model[0].weight.data[17, 5] = 30.0  # type: ignore[index]


def element_of_numpy(model: nn.Module) -> None:
    model[0].weight.detach().numpy()[9, 9] = 30.0  # type: ignore[index]


def rows_turned(model: nn.Module) -> None:
    weight = model[0].weight  # type: ignore[index]
    weight.data.copy_(weight.data.flip(0))


def ema(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.mul_(0.5)


def load(model: nn.Module) -> None:
    model.load_state_dict({k: torch.randn_like(v) for k, v in model.state_dict().items()})


def optimizer_step(model: nn.Module) -> None:
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    torch.optim.SGD(model.parameters(), lr=0.1).step()


CHANGES = [rows_of_data, element_of_data, element_of_numpy, rows_turned, ema, load, optimizer_step]


def follow(backend: str, change: Callable[[nn.Module], None], clock: Clock) -> None:
    if REASONS[backend] is not None:
        pytest.skip(str(REASONS[backend]))
    clock({backend: 20.0, "after": 50.0})
    x = torch.randn(128, 96)
    model = nn.Sequential(nn.Linear(96, 384), nn.GELU("tanh")).eval()
    plain = copy.deepcopy(model)
    result = optimize_(model, x)
    assert [s.backends["forward"] for s in result.sites] == [backend]
    with torch.no_grad():
        for _ in range(3):
            torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-4)
        for _ in range(2):
            torch.manual_seed(3)
            change(model)
            torch.manual_seed(3)
            change(plain)
            for _ in range(2):
                torch.testing.assert_close(model(x), plain(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("backend", REASONS)
def test_follows(backend: str, change: Callable[[nn.Module], None], clock: Clock) -> None:
    follow(backend, change, clock)


@pytest.mark.skipif(weight_hash.why_not_loaded() is not None, reason="no C++ compiler")
@pytest.mark.parametrize("backend", REASONS)
def test_these_tests_see_a_stale_copy(
    backend: str, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_hash, "digest", lambda weight: (0, 0, 0))
    with pytest.raises(AssertionError, match="not close"):
        follow(backend, rows_of_data, clock)
