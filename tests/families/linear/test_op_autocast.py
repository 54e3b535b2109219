"""linear_act under autocast: a parameter is cast once per block, as by torch's own linear."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch.profiler import ProfilerActivity, profile

import fastlinear as fl
from fastlinear.families.linear.cpu import onednn
from fastlinear.families.linear.problem import problem

BF16 = onednn.reason_not(problem("forward", 1, 1, 1, dtype="bfloat16", device="cpu")) is None
# a forced backend, so that the call is ours and not torch's linear
FORCED = "onednn" if BF16 else "cpp"
DTYPE = torch.bfloat16


def casts(run: Callable[[], object], *shape: int) -> int:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as recorded:
        run()
    events = [e for e in recorded.events() if e.name == "aten::_to_copy"]
    return sum(list(e.input_shapes[0]) == list(shape) for e in events)


@pytest.mark.skipif(not BF16, reason="no backend of ours serves bfloat16 here")
@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_one_cast_per_block(mode: Callable[[], AbstractContextManager[None]]) -> None:
    layer, x = fl.nn.Linear(40, 48, activation="gelu", backend=FORCED), torch.randn(8, 40)

    def run() -> None:
        with mode(), torch.autocast("cpu", dtype=DTYPE):
            for _ in range(3):
                assert layer(x).dtype is DTYPE

    run()  # what is looked at once is not counted
    assert casts(run, 48, 40) == 1
    assert casts(run, 48) == 1
    assert casts(run, 48, 40) == 1


@pytest.mark.skipif(not BF16, reason="no backend of ours serves bfloat16 here")
def test_gradients_reach_the_leaf_through_one_cast() -> None:
    layer, x = fl.nn.Linear(40, 48, activation="gelu", backend=FORCED), torch.randn(8, 40)
    grads = []
    for ours in (True, False):
        layer.zero_grad()
        with torch.autocast("cpu", dtype=DTYPE):
            y = sum(
                layer(x) if ours else F.gelu(F.linear(x, layer.weight, layer.bias))
                for _ in range(2)
            )
        y.float().square().sum().backward()
        assert layer.weight.grad.dtype is torch.float32
        grads.append((layer.weight.grad, layer.bias.grad))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=3e-2, atol=3e-1)


def test_compiled_under_autocast() -> None:
    layer, x = fl.nn.Linear(40, 48, activation="gelu"), torch.randn(8, 40)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=DTYPE):
        y = compiled(x)
        expected = F.gelu(F.linear(x, layer.weight, layer.bias))
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.float().sum().backward()
    assert layer.weight.grad is not None
