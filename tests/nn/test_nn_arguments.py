"""What layers may be made of, alike for every layer."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fastlinear as fl

# name of the class → how one is made of a size, and of a dtype, and what the size is called
LAYERS: dict[str, tuple[Callable[..., nn.Module], tuple[str, ...]]] = {
    "DiagonalLinear": (lambda n, **k: fl.nn.DiagonalLinear(n, **k), ("features",)),
    "Linear": (lambda n, **k: fl.nn.Linear(n, 3, **k), ("in_features",)),
    "Linear out": (lambda n, **k: fl.nn.Linear(3, n, **k), ("out_features",)),
    "MLP": (lambda n, **k: fl.nn.MLP([3, n, 2], **k), ("sizes[1]",)),
    "GroupedLinear": (lambda n, **k: fl.nn.GroupedLinear(2, n, 3, **k), ("in_features",)),
    "GroupedLinear out": (lambda n, **k: fl.nn.GroupedLinear(2, 3, n, **k), ("out_features",)),
    "GroupedLinear groups": (lambda n, **k: fl.nn.GroupedLinear(n, 3, 3, **k), ("groups",)),
    "Experts": (lambda n, **k: fl.nn.Experts(2, n, 3, **k), ("features",)),
    "Experts hidden": (lambda n, **k: fl.nn.Experts(2, 3, n, **k), ("hidden_features",)),
    "GatedMLP": (lambda n, **k: fl.nn.GatedMLP(n, 4, **k), ("in_features",)),
    "GatedMLP hidden": (lambda n, **k: fl.nn.GatedMLP(3, n, **k), ("hidden_features",)),
    "GatedMLP out": (lambda n, **k: fl.nn.GatedMLP(3, 4, n, **k), ("out_features",)),
}


@pytest.mark.parametrize("size", [-1, 2.0, True, "8", [8], torch.tensor(8)])
@pytest.mark.parametrize("layer", LAYERS)
def test_sizes_are_whole_numbers(layer: str, size: Any) -> None:
    make, (name,) = LAYERS[layer]
    with pytest.raises(fl.InputError) as told:
        make(size)
    assert told.value.function == f"fastlinear.nn.{layer.split()[0]}"
    assert told.value.expected == f"{name} to be a whole number, 0 or more"
    assert told.value.received == f"{name}={size!r}"
    assert f"{name}=64" in told.value.remedy


def test_none_is_no_size() -> None:
    for layer, (make, _) in LAYERS.items():
        if layer != "GatedMLP out":  # there it is in_features
            with pytest.raises(fl.InputError, match="whole number"):
                make(None)


@pytest.mark.parametrize("layer", LAYERS)
def test_whole_numbers_of_other_kinds_are_sizes(layer: str) -> None:
    numpy = pytest.importorskip("numpy")
    make, _ = LAYERS[layer]
    assert [p.shape for p in make(numpy.int64(4)).parameters()] == [
        p.shape for p in make(4).parameters()
    ]


@pytest.mark.parametrize("layer", [name for name in LAYERS if name != "GroupedLinear groups"])
def test_no_features_are_allowed_as_in_pytorch(layer: str) -> None:
    make, _ = LAYERS[layer]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # PyTorch's, of nothing to initialise
        assert any(p.numel() == 0 for p in make(0).parameters())
    if layer == "DiagonalLinear":
        assert fl.nn.DiagonalLinear(0)(torch.ones(2, 0)).shape == (2, 0)


def test_a_layer_of_no_groups_is_none() -> None:
    with pytest.raises(fl.InputError, match="at least one group"):
        fl.nn.GroupedLinear(0, 3, 3)


@pytest.mark.parametrize("dtype", [torch.int32, torch.complex64, "float32", float])
@pytest.mark.parametrize("layer", LAYERS)
def test_dtypes_are_those_the_ops_serve(layer: str, dtype: Any) -> None:
    make, _ = LAYERS[layer]
    with pytest.raises(fl.InputError, match=r"dtype in torch\.float64") as told:
        make(4, dtype=dtype)
    assert told.value.function == f"fastlinear.nn.{layer.split()[0]}"
    assert told.value.received == repr(dtype)
    for good in (torch.float64, torch.bfloat16):
        assert all(p.dtype is good for p in make(4, dtype=good).parameters())


@pytest.mark.parametrize("activation", ["rely", None, 3, torch.relu, nn.ReLU()])
@pytest.mark.parametrize("layer", LAYERS)
def test_activations_are_names(layer: str, activation: Any) -> None:
    make, _ = LAYERS[layer]
    with pytest.raises(fl.InputError, match="activation"):
        make(4, activation=activation)
