"""The rewriter on a CUDA device: real backends, real clock."""

from __future__ import annotations

import pytest
import torch
from rewrite_models import Functional, mlp, run
from torch import nn

from fastlinear.core.settings import Config
from fastlinear.rewrite import apply_, optimize_

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]


def wide() -> nn.Sequential:
    """A transformer's feed-forward block, wide enough to be worth a kernel."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(approximate="tanh"), nn.Linear(4096, 1024))


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_optimize_apply_revert(mode: str, dtype: torch.dtype) -> None:
    model = wide().to("cuda", dtype)
    x = torch.randn(2048, 1024, device="cuda", dtype=dtype)
    before, expected = snapshot_cuda(model), run(model, x)
    config = Config(mode=mode, time_budget_s=15, optimizer_steps=2)
    result = optimize_(model, x, config=config)
    print(result, [s.reason for s in result.sites])
    assert all(v.passed for v in result.verdicts)
    assert sum(result.summary().values()) == 2
    assert result.kept == 0 or result.speedup.low > 1.0
    plan = result.plan.to_json()
    result.revert()
    assert snapshot_cuda(model) == before
    assert torch.equal(run(model, x), expected)
    apply_(model, plan, x).revert()
    assert snapshot_cuda(model) == before


@pytest.mark.parametrize("make", [mlp, Functional])
def test_small_models(make: type[nn.Module]) -> None:
    model = make().to("cuda")
    result = optimize_(model, torch.randn(8, 16, device="cuda"), config=Config(time_budget_s=5))
    assert all(v.passed for v in result.verdicts)


def snapshot_cuda(model: nn.Module) -> list[tuple[object, ...]]:
    """What revert must give back: classes, attribute keys, storage and values."""
    keys = [(name, type(m), tuple(vars(m)), m.training) for name, m in model.named_modules()]
    where = [(n, t.data_ptr()) for n, t in model.state_dict().items()]
    values = [p.detach().float().cpu().numpy().tobytes() for p in model.parameters()]
    return [*keys, *where, *((v,) for v in values)]
