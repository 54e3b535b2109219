"""fl.nn.GroupedLinear: its state, its start, and its conversions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fastlinear as fl
from fastlinear.core.errors import InputError


@pytest.mark.parametrize("bias", [True, False])
def test_from_linears_and_back(bias: bool) -> None:
    linears = nn.ModuleList(nn.Linear(5, 4, bias) for _ in range(3)).eval()
    for linear in linears:
        linear.eval()
    layer = fl.nn.GroupedLinear.from_linears(linears, "relu")
    x = torch.randn(7, 15)
    expected = torch.cat([F.relu(f(p)) for f, p in zip(linears, x.chunk(3, -1), strict=True)], -1)
    torch.testing.assert_close(layer(x), expected)
    assert not layer.training
    assert layer.weight.data_ptr() != linears[0].weight.data_ptr()
    back = layer.to_linears()
    assert list(back.state_dict()) == list(linears.state_dict())
    for name, value in linears.state_dict().items():
        assert torch.equal(back.state_dict()[name], value)


def test_the_documented_mapping_of_states() -> None:
    linears = nn.ModuleList(nn.Linear(5, 4) for _ in range(3))
    conv = nn.Conv1d(15, 12, 1, groups=3)
    state, conv_state = linears.state_dict(), conv.state_dict()
    stacked = {n: torch.stack([state[f"{g}.{n}"] for g in range(3)]) for n in ("weight", "bias")}
    viewed = {
        "weight": conv_state["weight"].view(3, 4, 5),
        "bias": conv_state["bias"].view(3, 4),
    }
    for mapped, made in (
        (stacked, fl.nn.GroupedLinear.from_linears(linears)),
        (viewed, fl.nn.GroupedLinear.from_conv1d(conv)),
    ):
        layer = fl.nn.GroupedLinear(3, 5, 4)
        layer.load_state_dict(mapped, strict=True)
        assert all(
            torch.equal(layer.state_dict()[n], made.state_dict()[n]) for n in ("weight", "bias")
        )


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_from_conv1d_and_back(groups: int, bias: bool) -> None:
    conv = nn.Conv1d(5 * groups, 4 * groups, 1, groups=groups, bias=bias)
    layer = fl.nn.GroupedLinear.from_conv1d(conv, "gelu")
    for shape in ((2, 5 * groups, 6), (2, 5 * groups, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), F.gelu(conv(x)))
    back = layer.to_conv1d()
    torch.testing.assert_close(back(x), conv(x))
    assert back.groups == groups


@pytest.mark.parametrize(
    "conv",
    [
        nn.Conv1d(6, 6, 3),
        nn.Conv1d(6, 6, 1, stride=2),
        nn.Conv1d(6, 6, 1, padding=1),
        nn.Conv2d(6, 6, 1),
        nn.Linear(6, 6),
    ],
    ids=repr,
)
def test_from_conv1d_refuses_what_mixes_positions(conv: nn.Module) -> None:
    with pytest.raises(InputError, match="from_conv1d"):
        fl.nn.GroupedLinear.from_conv1d(conv)


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([], "at least one layer"),
        ([nn.Linear(2, 3), nn.ReLU()], "layer 1 to be an nn.Linear that .* received a ReLU"),
        ([nn.Linear(2, 3), nn.Linear(3, 3)], "layer 1: 3 → 3"),
        ([nn.Linear(2, 3), nn.Linear(2, 3, bias=False)], "no bias"),
        ([nn.Linear(2, 3), nn.Linear(2, 3).double()], "float64"),
    ],
)
def test_from_linears_refuses_unequal_layers(layers: list[nn.Module], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fl.nn.GroupedLinear.from_linears(layers)


@pytest.mark.parametrize(
    "arguments",
    [
        {"groups": 0},
        {"in_features": -1},
        {"activation": "swish"},
        {"layout": "k g"},
    ],
)
def test_bad_arguments_are_refused(arguments: dict[str, Any]) -> None:
    given = {"groups": 2, "in_features": 3, "out_features": 4} | arguments
    with pytest.raises(InputError):
        fl.nn.GroupedLinear(**given)


def test_starts_as_linear_layers_do() -> None:
    torch.manual_seed(0)
    layer = fl.nn.GroupedLinear(64, 25, 40)
    bound = 25**-0.5
    for parameter in (layer.weight, layer.bias):
        assert parameter is not None
        values = parameter.detach()
        assert 0.95 * bound < values.abs().max() <= bound
        assert abs(float(values.std()) - bound / 3**0.5) < 0.05 * bound
    fl.nn.GroupedLinear(2, 0, 3)


def test_trains_copies_and_prints() -> None:
    layer = fl.nn.GroupedLinear(3, 5, 4, activation="tanh", layout="g ... k")
    other = copy.deepcopy(layer)
    x, target = torch.randn(3, 16, 5), torch.randn(3, 16, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = F.mse_loss(layer(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert not torch.equal(layer.weight, other.weight)
    assert "groups=3, in_features=5, out_features=4, bias=True, activation='tanh'" in repr(layer)


def test_half_precision_and_meta() -> None:
    layer = fl.nn.GroupedLinear(2, 3, 4, dtype=torch.bfloat16)
    assert layer(torch.randn(5, 6, dtype=torch.bfloat16)).dtype is torch.bfloat16
    empty = fl.nn.GroupedLinear(2, 3, 4, device="meta")
    assert empty(torch.empty(5, 6, device="meta")).shape == (5, 8)


def test_layers_that_do_more_are_refused() -> None:
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    layers[1].register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="hooks"):
        fl.nn.GroupedLinear.from_linears(layers)
    activated = [fl.nn.Linear(4, 4, activation="relu") for _ in range(2)]
    with pytest.raises(InputError, match="forward of its own"):
        fl.nn.GroupedLinear.from_linears(activated)
    conv = nn.Conv1d(4, 4, 1)
    conv.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(InputError, match="hooks"):
        fl.nn.GroupedLinear.from_conv1d(conv)
    with pytest.raises(InputError, match="'fastest'"):
        fl.nn.GroupedLinear(2, 4, 4, backend="fastest")


def test_a_backend_is_one_of_what_serves_the_layout() -> None:
    x = torch.randn(3, 4)
    layer = fl.nn.GroupedLinear(2, 4, 5, layout="... k", backend="eager")
    assert layer(x).shape == (3, 2, 5)
    fl.nn.GroupedLinear(2, 4, 5, layout="... k", backend="onednn")
    with pytest.raises(InputError, match="'loop'"):
        fl.nn.GroupedLinear(2, 4, 5, layout="... k", backend="loop")
    with pytest.raises(InputError, match="'onednn'"):
        fl.nn.GroupedLinear(2, 4, 5, backend="onednn")


def test_groups_of_shared_features_are_no_convolution() -> None:
    with pytest.raises(InputError, match="groups with features of their own"):
        fl.nn.GroupedLinear(2, 4, 5, layout="... k").to_conv1d()


@pytest.mark.parametrize("sizes", [(2.0, 4, 5), ("2", 4, 5), (2, 4, None), (True, 4, 5)])
def test_sizes_are_whole_numbers(sizes: Any) -> None:
    with pytest.raises(InputError, match="to be a whole number"):
        fl.nn.GroupedLinear(*sizes)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("groups", [1, 3])
def test_from_conv2d_and_back(groups: int, bias: bool) -> None:
    conv = nn.Conv2d(5 * groups, 4 * groups, 1, groups=groups, bias=bias)
    layer = fl.nn.GroupedLinear.from_conv2d(conv, "gelu")
    for shape in ((2, 5 * groups, 6, 3), (2, 5 * groups, 1, 1)):
        x = torch.randn(shape)
        torch.testing.assert_close(layer(x), F.gelu(conv(x)))
    back = layer.to_conv2d()
    torch.testing.assert_close(back(x), conv(x))
    for other in (nn.Conv1d(6, 6, 1), nn.Conv2d(6, 6, 1, padding=1), nn.Conv2d(6, 6, (1, 3))):
        with pytest.raises(InputError, match="from_conv2d"):
            fl.nn.GroupedLinear.from_conv2d(other)


@pytest.mark.parametrize("length", [1, 6, 15])
def test_a_convolutions_input_without_a_batch(length: int) -> None:
    """15 positions of 15 channels: only the number of dimensions tells what is what."""
    one, two = nn.Conv1d(15, 12, 1, groups=3), nn.Conv2d(15, 12, 1, groups=3)
    x, z = torch.randn(15, length), torch.randn(15, length, 2)
    layer = fl.nn.GroupedLinear.from_conv1d(one)
    torch.testing.assert_close(layer(x), one(x))
    torch.testing.assert_close(copy.deepcopy(layer)(x), one(x))
    torch.testing.assert_close(fl.nn.GroupedLinear.from_conv2d(two)(z), two(z))
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), one(x))


def test_tied_and_partly_frozen_layers_are_refused() -> None:
    """One stacked parameter could be neither."""
    make = fl.nn.GroupedLinear.from_linears
    linear = nn.Linear(2, 3)
    with pytest.raises(InputError, match="layers 0 and 2, which share their weight"):
        make([linear, nn.Linear(2, 3), linear])
    tied = nn.Linear(2, 3)
    tied.bias = linear.bias
    with pytest.raises(InputError, match="share their bias"):
        make([linear, tied])
    layers = [nn.Linear(2, 3) for _ in range(3)]
    layers[1].bias.requires_grad_(False)
    with pytest.raises(InputError, match="a frozen bias of layer 1 among trained ones"):
        make(layers)
    for layer in layers:
        layer.bias.requires_grad_(False)
    made = make(layers)
    assert (made.weight.requires_grad, made.bias.requires_grad) == (True, False)
