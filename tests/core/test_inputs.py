"""What example inputs may be, and that every function and command takes the same."""

from __future__ import annotations

import re
from collections import UserDict
from typing import Any

import pytest
import torch

import fastlinear as fl
from fastlinear.core.errors import InputError
from fastlinear.core.inputs import FORMS, normalize_inputs

X = torch.ones(2, 3)


class Two(torch.nn.Module):
    """A linear of a sum; the second input by position or by name."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(3, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """One call."""
        return torch.as_tensor(self.fc(x + y))


@pytest.mark.parametrize(
    ("inputs", "args", "kwargs"),
    [
        (X, (X,), {}),
        ((X, 1), (X, 1), {}),
        ({"x": X}, (), {"x": X}),
        (UserDict(x=X), (), {"x": X}),
        (((X,), {"y": X}), (X,), {"y": X}),
        (((), {"y": X}), (), {"y": X}),
        (((X,), {}), (X,), {}),
        ((((X,), {"y": X}), {}), ((X,), {"y": X}), {}),
        (((X,), {1: X}), ((X,), {1: X}), {}),
        ((X, {"y": X}), (X, {"y": X}), {}),
    ],
)
def test_forms(inputs: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    assert normalize_inputs(inputs, "f") == (args, kwargs)
    assert normalize_inputs((args, kwargs), "f") == (args, kwargs), "one form for all"


@pytest.mark.parametrize(
    ("inputs", "received"),
    [
        ([X], r"an object of type list. Write \(\[...\],\) for one argument that is a list"),
        (None, r"an object of type NoneType. Wrap it in a tuple: \(x,\)."),
        (3, "an object of type int"),
        ({1: X}, r"keys that are no names: \[1\]. Write \({...},\) for one"),
    ],
)
def test_what_is_refused(inputs: Any, received: str) -> None:
    expected = rf"f: expected inputs to be {re.escape(FORMS)}; received .*{received}"
    with pytest.raises(InputError, match=expected):
        normalize_inputs(inputs, "f")


@pytest.mark.parametrize("inputs", [(X, X), {"x": X, "y": X}, ((X,), {"y": X})])
def test_every_function_takes_every_form(inputs: Any) -> None:
    model = Two().eval()
    assert len(fl.profile(model, inputs, steps=1).sites) == 1
    result = fl.optimize_(model, inputs, config=fl.Config(tune=False, time_budget_s=0.5))
    plan = result.plan.to_json()
    result.revert()
    fl.apply_(model, plan, inputs).revert()
    fl.apply_(model, plan).revert()  # inputs drawn as the plan says


@pytest.mark.parametrize("function", [fl.profile, fl.optimize_])
def test_every_function_refuses_the_same(function: Any) -> None:
    with pytest.raises(InputError, match=re.escape(f"inputs to be {FORMS}; received")):
        function(Two().eval(), [X, X])
