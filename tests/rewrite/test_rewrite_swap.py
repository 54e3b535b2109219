"""Swapped forwards belong to one instance: replicas and copies compute with their own weights."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn

from fastlinear.core.settings import Config
from fastlinear.rewrite import optimize_
from tests.rewrite.rewrite_models import Functional, mlp, run, snapshot

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))


def replica_of(module: nn.Module) -> nn.Module:
    """What ``torch.nn.parallel.replicate`` makes of a model, all weights negated."""
    twin: Any = module._replicate_for_data_parallel()
    for name, p in module._parameters.items():
        if p is None:
            twin._parameters[name] = None
        else:
            setattr(twin, name, -p.detach())
    for name, child in module._modules.items():
        twin._modules[name] = None if child is None else replica_of(child)
    return twin


@pytest.mark.parametrize("make", [mlp, Functional])
@pytest.mark.parametrize("families", [("linear_act",), ("linear_act", "mlp")])
def test_replicas_compute_with_their_own_weights(make: Any, families: tuple[str, ...]) -> None:
    model = make().eval()
    plain = copy.deepcopy(model)
    before = snapshot(model)
    result = optimize_(model, X, config=Config(families=families))
    assert result.kept
    torch.testing.assert_close(run(replica_of(model), X), run(replica_of(plain), X))
    torch.testing.assert_close(run(model, X), run(plain, X))
    result.revert()
    assert snapshot(model) == before


def test_replicas_of_a_copy() -> None:
    model = mlp().eval()
    plain = copy.deepcopy(model)
    optimize_(model, X)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    torch.testing.assert_close(run(model, X), run(plain, X))
    torch.testing.assert_close(run(replica_of(other), X), run(replica_of(undone(other)), X))


def undone(model: nn.Module) -> nn.Module:
    """The same weights in a model that was never rewritten."""
    fresh = mlp().eval()
    fresh.load_state_dict(model.state_dict())
    return fresh


def test_a_forward_put_over_ours_is_left_to_its_author() -> None:
    model = mlp().eval()
    optimize_(model, X)
    patched = lambda x: x  # noqa: E731
    model[0].forward = patched
    assert replica_of(model)[0].forward is patched


def test_saving_a_rewritten_model_whole() -> None:
    model = mlp().eval()
    expected = run(model, X)
    optimize_(model, X)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    torch.testing.assert_close(run(torch.load(file, weights_only=False), X), expected)
