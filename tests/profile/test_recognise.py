"""Activations are recognised by what they compute."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fastlinear.activations.reference import ACTIVATIONS
from fastlinear.profile.recognise import recognise, recognise_module


@pytest.mark.parametrize("name", [n for n in ACTIVATIONS if n != "none"])
def test_every_known_activation(name):
    found = recognise(ACTIVATIONS[name].value)
    assert found is not None
    assert (found.name, found.inplace) == (name, False)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        (nn.ReLU(), "relu"),
        (nn.GELU(), "gelu"),
        (nn.GELU(approximate="tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"),
        (nn.Tanh(), "tanh"),
        (nn.Sigmoid(), "sigmoid"),
        (nn.LeakyReLU(), "leaky_relu"),
        (nn.LeakyReLU(0.2), None),
        (nn.Softplus(), "softplus"),
        (nn.Softplus(beta=2.0), None),
        (nn.Softplus(threshold=19.0), None),
        (nn.Mish(), "mish"),
        (nn.ReLU6(), None),
        (nn.Hardtanh(-100, 100), None),
        (nn.PReLU(), None),
        (nn.RReLU(), None),
        (nn.Dropout(0.5), None),
        (nn.Identity(), None),
        (nn.Softmax(-1), None),
        (nn.Linear(490, 490), None),
        (nn.Sequential(nn.Identity(), nn.ReLU()), "relu"),
    ],
)
def test_modules(module, name):
    found = recognise_module(module)
    assert (found.name if found else None) == name
    assert module.training


def test_transformers_activations():
    activations = pytest.importorskip("transformers.activations")
    expected = {
        "gelu": "gelu",
        "gelu_python": "gelu",
        "gelu_new": "gelu_tanh",
        "gelu_fast": "gelu_tanh",
        "gelu_accurate": "gelu_tanh",
        "gelu_pytorch_tanh": "gelu_tanh",
        "quick_gelu": "quick_gelu",
        "relu2": "relu2",
        "silu": "silu",
        "gelu_10": None,
        "mish": "mish",
        "linear": None,
    }
    for key, name in expected.items():
        found = recognise_module(activations.ACT2FN[key])
        assert (found.name if found else None) == name, key


def test_functions():
    assert recognise(torch.sin).name == "sine"
    assert recognise(lambda t: torch.log1p(torch.exp(t))) is None  # infinite where torch's is not
    assert recognise(lambda t: F.softplus(t, threshold=19)) is None
    assert recognise(lambda t: t * torch.tanh(F.softplus(t))).name == "mish"


def test_inplace_is_told():
    assert recognise_module(nn.ReLU(inplace=True)).inplace
    assert recognise(lambda t: F.relu_(t)).inplace


def test_state_and_training_dependence_disqualify():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return F.relu(x)

    class OnlyInEval(nn.Module):
        def forward(self, x):
            return x if self.training else F.relu(x)

    assert recognise_module(Counts()) is None
    assert recognise_module(OnlyInEval()) is None


def test_another_derivative_disqualifies():
    class StraightThrough(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return F.relu(x)

        @staticmethod
        def backward(ctx, g):
            return g

    assert recognise(StraightThrough.apply) is None


def test_a_nearly_right_function_is_not_taken():
    assert recognise(lambda t: F.gelu(t) + 1e-6) is None
    assert recognise(lambda t: t * torch.sigmoid(1.7 * t)) is None
    assert recognise(lambda t: F.relu(t).clamp(max=60)) is None


@pytest.mark.parametrize(
    "call",
    [
        lambda t: F.relu(t).nan_to_num(),
        lambda t: torch.where(t > 0, t, torch.zeros_like(t)),
        lambda t: F.silu(t.clamp(-65504, 65504)),
        lambda t: F.gelu(t).masked_fill(t.isnan(), 0.0),
    ],
)
def test_what_is_not_finite_stays_so(call):
    assert recognise(call) is None
