"""Results of hidden layers from what comes before their activations: interpreted, and on a GPU."""

from __future__ import annotations

import pytest
import torch

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.compare import judge
from fastlinear.families.mlp import layerwise
from tests.families.interpreted import (
    DEVICE,
    INTERPRETED,
    ON_GPU,
    compares,
    run_interpreted,
    starts_it,
)

if INTERPRETED or ON_GPU:
    from fastlinear.kernels.triton.elementwise import activated

_KEPT = [name for name, act in ACTIVATIONS.items() if act.saved == "pre"]


@starts_it
def test_under_the_interpreter() -> None:
    run_interpreted(__file__)


@compares
@pytest.mark.parametrize("name", _KEPT)
@pytest.mark.parametrize("shape", [(1, 1), (70, 33), (3, 2048), (0, 5)])
def test_numbers_are_the_activation_s(name: str, shape: tuple[int, int]) -> None:
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        pre = drawn.to(DEVICE, dtype)
        ours = activated(pre, name)
        assert ours.shape == pre.shape
        assert ours.dtype == dtype
        if pre.numel():
            act = activation_of(name).value
            verdict = judge(name, ours, act(pre), act(pre.double()))
            assert verdict.passed, str(verdict)


@pytest.mark.gpu
def test_a_backward_has_no_operation_of_pytorch_s() -> None:
    x = torch.randn(64, 48, device="cuda")
    weights = tuple(torch.randn(s, device="cuda") for s in ((32, 48), (40, 32), (8, 40)))
    y, saved = layerwise.forward(x, weights, (None,) * 3, "gelu", "none", True)
    needs = True, (True,) * 3, (False,) * 3
    given = torch.ones_like(y), x, weights, saved, "gelu", "none", needs
    layerwise.backward(*given)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        layerwise.backward(*given)
    assert "aten::gelu" not in {event.key for event in profile.key_averages()}
