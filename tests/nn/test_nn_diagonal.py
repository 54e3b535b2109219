"""fl.nn.DiagonalLinear: parameters, conversions, and what they refuse."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.errors import InputError


class LayerScale(nn.Module):
    """As timm has it."""

    def __init__(self, features: int, value: float = 1e-5, inplace: bool = False) -> None:
        super().__init__()
        self.inplace = inplace
        self.gamma = nn.Parameter(value * torch.randn(features))

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(self.gamma) if self.inplace else x * self.gamma


class Shift(LayerScale):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.gamma


def test_starts_as_the_identity() -> None:
    layer = fl.nn.DiagonalLinear(5)
    x = torch.randn(3, 5)
    assert torch.equal(layer(x), x)
    assert sorted(layer.state_dict()) == ["bias", "weight"]
    assert sorted(fl.nn.DiagonalLinear(5, bias=False).state_dict()) == ["weight"]
    assert "activation='relu'" in repr(fl.nn.DiagonalLinear(5, activation="relu"))
    with pytest.raises(InputError, match="activation in"):
        fl.nn.DiagonalLinear(5, activation="swish")


def test_trains() -> None:
    layer = fl.nn.DiagonalLinear(6, activation="silu", dtype=torch.float64)
    x = torch.randn(4, 6, dtype=torch.float64)
    layer(x, residual=x).square().sum().backward()
    assert layer.weight.grad is not None
    assert layer.bias is not None
    assert layer.bias.grad is not None
    copied = copy.deepcopy(layer)
    assert torch.equal(copied(x), layer(x))


def test_from_layer_scale_shares_its_parameter() -> None:
    scale = LayerScale(7).eval()
    layer = fl.nn.DiagonalLinear.from_layer_scale(scale)
    assert layer.weight is scale.gamma
    assert layer.bias is None
    assert not layer.training
    x, stream = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    assert torch.equal(layer(x), scale(x.clone()))
    torch.testing.assert_close(layer(x, residual=stream), stream + scale(x.clone()))


def test_from_layer_scale_refuses_to_leave_an_input_as_it_was() -> None:
    """What reads that input afterwards would read other numbers."""
    with pytest.raises(InputError, match=r"writes over it\. .*inplace=False"):
        fl.nn.DiagonalLinear.from_layer_scale(LayerScale(7, inplace=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_layer_scale_is_not_cast_by_autocast(dtype: torch.dtype) -> None:
    """As what it stands for: a float32 scale gives float32, and nothing is rounded to 16 bits."""
    scale = LayerScale(7, value=1.0)
    layer = copy.deepcopy(fl.nn.DiagonalLinear.from_layer_scale(scale))
    x, stream = torch.randn(2, 3, 7).to(dtype), torch.randn(2, 3, 7)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype is scale(x).dtype is torch.float32
        torch.testing.assert_close(layer(x), scale(x))
        torch.testing.assert_close(layer(x, residual=stream), stream + scale(x))
        compiled = torch.compile(layer, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, residual=stream), stream + scale(x))
        assert fl.nn.DiagonalLinear(7)(x).dtype is torch.bfloat16  # as a linear layer's
        layer(x).sum().backward()
        scale(x).sum().backward()
    torch.testing.assert_close(layer.weight.grad, scale.gamma.grad)


def test_from_layer_scale_refuses_what_scales_nothing() -> None:
    for module in (Shift(4), nn.Linear(4, 4), nn.LayerNorm(4), nn.BatchNorm1d(4), nn.PReLU(4)):
        with pytest.raises(InputError, match="DiagonalLinear"):
            fl.nn.DiagonalLinear.from_layer_scale(module)
    with pytest.raises(InputError, match=r"nn\.Module"):
        fl.nn.DiagonalLinear.from_layer_scale("gamma")  # type: ignore[arg-type]


class Computes(nn.Module):
    """Any function of the module, x and its parameter."""

    def __init__(self, function: Callable[..., Tensor], gamma: Tensor) -> None:
        super().__init__()
        self.function = function
        self.gamma = nn.Parameter(gamma)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x, self.gamma)


@pytest.mark.parametrize("fresh", [0.0, 1.0])
@pytest.mark.parametrize(
    "function",
    [
        lambda _, x, g: x * g * 3,
        lambda _, x, g: x * (g.exp() - 1),
        lambda _, x, g: x * g**2,
        lambda _, x, g: x / g,
        lambda _, x, g: (x * g).clamp(-5, 5),
        lambda _, x, g: (x * g).clamp(-1e6, 1e6),
        lambda _, x, g: x * g.clamp(-100, 100),
        lambda _, x, g: x * g.detach(),
        lambda _, x, g: torch.relu(x * g),
        lambda m, x, g: x * g if m.training else x,
        lambda m, x, g: x if m.training else x * g,
    ],
)
def test_from_layer_scale_knows_a_scale_by_other_numbers(
    function: Callable[..., Tensor], fresh: float
) -> None:
    """Those of a fresh parameter do not tell these apart from x * gamma."""
    for training in (True, False):
        module = Computes(function, torch.full((6,), fresh)).train(training)
        with pytest.raises(InputError, match="multiplies by its parameter"):
            fl.nn.DiagonalLinear.from_layer_scale(module)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 0.0, 1e-30])
def test_from_layer_scale_takes_any_numbers(value: float) -> None:
    """The module is left as it is, and the caller's modes of grad are of no matter."""
    module = Computes(lambda _, x, g: g * x, torch.full((6,), value)).half()
    before, version = module.gamma.detach().clone(), module.gamma._version
    for mode in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with mode:
            layer = fl.nn.DiagonalLinear.from_layer_scale(module)
        assert layer.weight is module.gamma
    assert module.gamma._version == version
    assert torch.equal(module.gamma.detach().isnan(), before.isnan())
    assert module.gamma.grad is None


def test_from_layer_scale_takes_scales_of_three_dimensions() -> None:
    def tokens(_: nn.Module, x: Tensor, gamma: Tensor) -> Tensor:
        batch, length, features = x.shape
        return x.view(batch * length, features).mul(gamma).view(batch, length, features)

    module = Computes(tokens, torch.zeros(6))
    assert fl.nn.DiagonalLinear.from_layer_scale(module).weight is module.gamma


def test_from_layer_scale_refuses_what_would_be_lost() -> None:
    hooks: list[Callable[[nn.Module], object]] = [
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_state_dict_post_hook(lambda *_: None),
        lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
        lambda m: setattr(m, "forward", lambda x: x),
    ]
    for register in hooks:
        module = LayerScale(4)
        register(module)
        with pytest.raises(InputError, match=r"hooks.*register them on the result"):
            fl.nn.DiagonalLinear.from_layer_scale(module)
    with pytest.raises(InputError, match=r"meta device.*to_empty"):
        fl.nn.DiagonalLinear.from_layer_scale(LayerScale(4).to("meta"))


def test_from_transformers_layer_scale() -> None:
    dinov2 = pytest.importorskip("transformers.models.dinov2.modeling_dinov2")
    config = dinov2.Dinov2Config(hidden_size=12)
    scale = dinov2.Dinov2LayerScale(config)
    layer = fl.nn.DiagonalLinear.from_layer_scale(scale)
    x = torch.randn(2, 12)
    assert layer.weight is scale.lambda1
    assert torch.equal(layer(x), scale(x))


@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_and_back(bias: bool) -> None:
    linear = nn.Linear(5, 5, bias=bias)
    with torch.no_grad():
        linear.weight.copy_(torch.diag(torch.tensor([1.0, -2.0, 0.0, 4.0, 5.0])))
    layer = fl.nn.DiagonalLinear.from_linear(linear, "relu")
    x = torch.randn(3, 5)
    torch.testing.assert_close(layer(x), linear(x).relu())
    assert layer.bias is linear.bias
    back = layer.to_linear()
    assert torch.equal(back.weight, linear.weight)
    assert back.bias is linear.bias


def test_from_linear_takes_exact_diagonals_only() -> None:
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(3))
        linear.weight[0, 2] = 1e-30
    for module, words in ((linear, "1 other"), (nn.Linear(3, 4), "square"), (Shift(3), "Linear")):
        with pytest.raises(InputError, match=words):
            fl.nn.DiagonalLinear.from_linear(module)  # type: ignore[arg-type]
    with torch.no_grad():
        linear.weight[0, 2] = float("nan")
    with pytest.raises(InputError, match="1 other"):
        fl.nn.DiagonalLinear.from_linear(linear)


def test_layers_that_do_more_are_refused() -> None:
    linear = nn.Linear(3, 3)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(3))
    linear.register_forward_hook(lambda *_: None)
    with pytest.raises(InputError, match="hooks"):
        fl.nn.DiagonalLinear.from_linear(linear)
    with pytest.raises(InputError, match="'fastest'"):
        fl.nn.DiagonalLinear(3, backend="fastest")
