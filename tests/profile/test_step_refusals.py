"""Models and inputs without values are refused before anything runs."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fastlinear as fl
from fastlinear.core.errors import InputError


@pytest.mark.parametrize("run", [fl.profile, fl.optimize_])
@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Linear(4, 4), torch.ones(2, 4, device="meta")),
        (nn.Linear(4, 4, device="meta"), torch.ones(2, 4)),
        (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, device="meta")), torch.ones(2, 4)),
    ],
)
def test_tensors_on_meta(run: object, model: nn.Module, x: torch.Tensor) -> None:
    with pytest.raises(InputError, match="a model and inputs with values"):
        run(model, x)  # type: ignore[operator]
