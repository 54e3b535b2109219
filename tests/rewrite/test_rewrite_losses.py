"""A loss is one number: PyTorch's own error in it may be 0 by luck, and says little then."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fastlinear.core.compare import unit_rounding
from fastlinear.rewrite.verify.verdicts import LOSSES, compare_all, loss_floor


def passes(name: str, off: float, dtype: torch.dtype, **others: Any) -> bool:
    """Whether a result ``off`` the exact 1 passes, where PyTorch has the exact one."""
    one = torch.ones((), dtype=torch.float64)
    more = {n: t.to(torch.float64) for n, t in others.items()}
    found = compare_all(
        {name: (one + off).to(dtype), **others},
        {name: one.to(dtype), **others},
        {name: one, **more},
    )
    assert found[name].torch_error == 0.0
    return found[name].passed


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_loss_may_be_off_by_roundings_of_its_dtype(name: str, dtype: torch.dtype) -> None:
    step = 2 * unit_rounding(dtype)  # between numbers above 1
    assert all(passes(name, k * step, dtype) for k in range(5))
    assert not passes(name, 5 * step, dtype)
    assert not passes(name, float("nan"), dtype)


@pytest.mark.parametrize("name", ["output[0]", "grad.0.weight", "optimizer steps: 0.weight"])
def test_nothing_else_may(name: str) -> None:
    step = 2 * unit_rounding(torch.float32)
    assert passes(name, step, torch.float32)
    assert not passes(name, 2 * step, torch.float32)


def test_numbers_of_a_narrower_dtype_go_into_it() -> None:
    weight: Tensor = torch.ones(8, dtype=torch.bfloat16)
    narrow = unit_rounding(torch.bfloat16)
    for off, expected in ((narrow, True), (1.01 * narrow, False)):
        assert passes("loss", off, torch.float32, **{"grad.w": weight}) is expected
        assert not passes("loss", off, torch.float32)
    assert loss_floor(torch.bfloat16, narrow) == 8 * narrow


def test_an_error_of_torchs_own_counts_as_before() -> None:
    exact = {"loss": torch.ones((), dtype=torch.float64)}
    theirs = {"loss": torch.tensor(1.001)}
    for ours, expected in ((1.0019, True), (1.0021, False)):
        verdict = compare_all({"loss": torch.tensor(ours)}, theirs, exact)["loss"]
        assert verdict.passed is expected


def test_a_missing_loss_fails() -> None:
    exact = {"loss": torch.ones((), dtype=torch.float64)}
    assert not compare_all({}, {"loss": torch.ones(())}, exact)["loss"].passed
