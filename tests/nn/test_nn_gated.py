"""fl.nn.GatedMLP: its state, its conversions, and what is not taken for a gated MLP."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.activations.reference import NAMES as ACTIVATIONS
from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.errors import InputError
from fastlinear.nn.recognised import Gated
from fastlinear.rewrite.rules.gated.recognise import recognise

HAS_TRANSFORMERS = importlib.util.find_spec("transformers") is not None


class MLP(nn.Module):
    """A gated MLP as anyone may write it."""

    def __init__(
        self, activation: str = "silu", bias: bool = True, out: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.b, self.a, self.c = nn.Linear(4, 6, bias), nn.Linear(4, 6, bias), nn.Linear(6, out)
        self.drop = nn.Dropout(dropout)
        self.value = activation_of(activation).value

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.drop(self.b(x) * self.value(self.a(x))))


class Stack(nn.Module):
    """One layer for both halves, taken apart in some way."""

    def __init__(self, apart: Callable[[Tensor], Any], down: bool = True) -> None:
        super().__init__()
        self.both = nn.Linear(4, 12)
        self.down = nn.Linear(6, 4) if down else nn.Identity()
        self.apart = apart

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.apart(self.both(x))
        return self.down(F.gelu(gate) * up)


@pytest.mark.parametrize("stacked", [None, "gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("bias", [True, False])
def test_a_layer_of_our_own(bias: bool, stacked: str | None) -> None:
    layer = fl.nn.GatedMLP(4, 6, 5, bias, "gelu_tanh", stacked=stacked)
    x = torch.randn(2, 3, 4)
    names = ("gate_proj", "up_proj") if stacked is None else ("gate_up_proj",)
    keys = [f"{n}.{k}" for n in (*names, "down_proj") for k in ("weight", "bias")[: 1 + bias]]
    assert list(layer.state_dict()) == keys
    expected = fl.gated_mlp(
        x,
        *(layer.get_submodule(names[0]).weight, None if stacked else layer.up_proj.weight),
        layer.down_proj.weight,
        *(layer.get_submodule(names[0]).bias, None if stacked else layer.up_proj.bias),
        layer.down_proj.bias,
        activation="gelu_tanh",
        stacked=stacked,
    )
    assert torch.equal(layer(x), expected)
    again = fl.nn.GatedMLP(4, 6, 5, bias, "gelu_tanh", stacked=stacked)
    again.load_state_dict(layer.state_dict())
    assert torch.equal(again(x), expected)
    assert torch.equal(copy.deepcopy(layer)(x), expected)
    assert "gelu_tanh" in repr(layer)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_is_recognised(activation: str) -> None:
    for bias, out in ((True, 4), (False, 5)):
        module = MLP(activation, bias, out).eval()
        layer = fl.nn.GatedMLP.from_module(module)
        x = torch.randn(3, 4)
        torch.testing.assert_close(layer(x), module(x), rtol=2e-5, atol=2e-5)
        assert list(layer.state_dict()) == list(module.state_dict())
        assert layer.gated.activation == activation
        assert layer.a is module.a
        assert not layer.training


@pytest.mark.parametrize("down", [True, False])
def test_stacks_are_recognised(down: bool) -> None:
    takers: dict[str, Callable[[Tensor], Any]] = {
        "gate_up": lambda t: t.chunk(2, -1),
        "up_gate": lambda t: t.chunk(2, -1)[::-1],
        "interleaved": lambda t: (t[..., 0::2], t[..., 1::2]),
    }
    x = torch.randn(2, 3, 4)
    for order, apart in takers.items():
        module = Stack(apart, down)
        layer = fl.nn.GatedMLP.from_module(module)
        assert (layer.gated.order, layer.gated.activation) == (order, "gelu")
        torch.testing.assert_close(layer(x), module(x), rtol=2e-5, atol=2e-5)
        assert list(layer.state_dict()) == list(module.state_dict())


def test_dropout_is_kept() -> None:
    module = MLP(dropout=0.25)
    layer = fl.nn.GatedMLP.from_module(module)
    assert layer.gated.dropout == 0.25
    x = torch.randn(50, 4)
    torch.manual_seed(3)
    expected = module(x)
    torch.manual_seed(3)
    torch.testing.assert_close(layer(x), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(layer.eval()(x), module.eval()(x), rtol=2e-5, atol=2e-5)


def test_a_wider_down_projection_is_kept() -> None:
    """Some models keep it in float32 among 16-bit layers."""
    layer = fl.nn.GatedMLP(4, 6, dtype=torch.bfloat16)
    layer.down_proj.float()
    assert layer(torch.randn(3, 4).bfloat16()).dtype is torch.float32


class Other(MLP):
    """Nearly a gated MLP."""

    def __init__(self, kind: str) -> None:
        super().__init__(dropout=0.5 if kind == "dropout of x" else 0.0)
        self.kind = kind
        if kind == "a parameter of its own":
            self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.value(self.a(x)), self.b(x)
        if self.kind == "a sum":
            return self.c(a + b)
        if self.kind == "another input":
            return self.c(a * self.b(x + 1))
        if self.kind == "a residual":
            return x + self.c(a * b)
        if self.kind == "a clamp":
            return self.c(a * b.clamp(-1, 1))
        if self.kind == "a second result":
            return self.c(a * b), a  # type: ignore[return-value]
        if self.kind == "dropout of x":
            return self.c(self.value(self.a(self.drop(x))) * self.b(x))
        if self.kind == "in place":
            x += 1
        return self.c(a * b)


@pytest.mark.parametrize(
    "kind",
    [
        "a sum",
        "another input",
        "a residual",
        "a clamp",
        "a second result",
        "dropout of x",
        "in place",
        "a parameter of its own",
    ],
)
def test_other_modules_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match="from_module: expected a module that computes"):
        fl.nn.GatedMLP.from_module(Other(kind))


def test_hooks_parametrizations_and_shared_layers_are_refused() -> None:
    assert isinstance(recognise(MLP()), Gated)
    hooked = MLP()
    hooked.a.register_forward_hook(lambda *_: None)
    wrapped = MLP()
    torch.nn.utils.parametrizations.weight_norm(wrapped.b)
    shared = MLP()
    shared.b = shared.a
    for module in (hooked, wrapped, shared, nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 8))):
        assert isinstance(recognise(module), str)
    with pytest.raises(InputError, match="a module"):
        fl.nn.GatedMLP.from_module(3)  # type: ignore[arg-type]


class Adapted(nn.Module):
    """A low-rank adapter around a layer, in its place."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.low = nn.Linear(layer.in_features, 2, False)
        self.high = nn.Linear(2, layer.out_features, False)
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.high(self.low(x))


@pytest.mark.parametrize("stacked", [None, "gate_up", "up_gate", "interleaved"])
@pytest.mark.parametrize("which", ["first", "down_proj"])
def test_what_is_put_in_a_layers_place_is_called(which: str, stacked: str | None) -> None:
    layer = fl.nn.GatedMLP(4, 6, 5, True, "gelu", stacked=stacked, dropout=0.3)
    name = which if which != "first" else "gate_proj" if stacked is None else "gate_up_proj"
    x, plain = torch.randn(3, 4), copy.deepcopy(layer)
    adapter = Adapted(getattr(layer, name))
    setattr(layer, name, adapter)
    torch.manual_seed(1)
    y = layer(x)
    y.sum().backward()
    assert adapter.high.weight.grad is not None
    assert adapter.high.weight.grad.abs().sum() > 0
    merged = getattr(plain, name)
    with torch.no_grad():
        merged.weight += adapter.high.weight @ adapter.low.weight
    torch.manual_seed(1)
    torch.testing.assert_close(y, plain(x))


def test_hooks_on_layers_run_from_then_on() -> None:
    layer, x = fl.nn.GatedMLP(4, 6), torch.randn(3, 4)
    y, seen = layer(x), []
    handle = layer.up_proj.register_forward_hook(lambda _, __, out: seen.append(out) or 2 * out)
    torch.testing.assert_close(layer(x), 2 * y)
    assert len(seen) == 1
    handle.remove()
    assert torch.equal(layer(x), y)
    torch.nn.utils.parametrizations.weight_norm(layer.down_proj)
    torch.testing.assert_close(layer(x), y)
    assert len(seen) == 1


def test_hooks_of_the_module_are_not_lost() -> None:
    for register in (
        lambda m: m.register_forward_hook(lambda *_: None),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
        lambda m: m.register_full_backward_hook(lambda *_: None),
        lambda m: m.register_full_backward_pre_hook(lambda *_: None),
        lambda m: m._register_state_dict_hook(lambda *_: None),
        lambda m: m.register_state_dict_pre_hook(lambda *_: None),
        lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
    ):
        module = MLP()
        register(module)
        with pytest.raises(InputError, match="without hooks of its own"):
            fl.nn.GatedMLP.from_module(module)


class Branching(MLP):
    """Another formula for some inputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        other = x.dim() == 3 if self.kind == "dimensions" else x.shape[0] == 1
        return y + 1 if other else y


@pytest.mark.parametrize("kind", ["dimensions", "rows"])
def test_a_module_that_branches_is_refused(kind: str) -> None:
    assert "decides by a tensor's values or sizes" in str(recognise(Branching(kind)))


def test_recognising_leaves_everything_as_it_was() -> None:
    module = MLP(dropout=0.5)
    before = {n: p.clone() for n, p in module.state_dict().items()}
    torch.manual_seed(7)
    state = torch.get_rng_state()
    assert isinstance(recognise(module), Gated)
    assert module.training
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, before[n]) for n, p in module.state_dict().items())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"activation": "swish"}, "swish"),
        ({"stacked": "both"}, "stacked in"),
        ({"dropout": 1.0}, "dropout rate"),
        ({"activation": "swish"}, "multiply by the gate yourself"),
        ({"dropout": "half"}, "dropout rate"),
        ({"recompute": 7}, "recompute to be 0, 1 or None"),
        ({"names": ("a", "b")}, "three different names"),
        ({"names": ("a", "b", 3)}, "three different names"),
        ({"names": ("a", "b.c", "d")}, "three different names"),
        ({"names": ("a", "b", "b")}, "three different names"),
        ({"names": ("a", "gated", "c")}, "no attributes of the new module; received 'gated'"),
        ({"names": ("a", "recompute", "forward")}, "received 'recompute', 'forward'"),
        ({"names": ("a", "b", "training")}, "received 'training'"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        fl.nn.GatedMLP(4, 6, **change)


@pytest.mark.parametrize("taken", ["gated", "recompute", "backend", "from_module"])
def test_layers_under_names_of_our_own_are_refused(taken: str) -> None:
    """Such a layer would be lost, or hide what the module itself needs."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
            self.add_module(taken, nn.Linear(4, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.silu(self.gate(x)) * self.get_submodule(taken)(x))

    with pytest.raises(InputError, match=f"received '{taken}'"):
        fl.nn.GatedMLP.from_module(Named())


def mlp_of_transformers(path: str, config: str, sizes: dict[str, Any]) -> nn.Module:
    import transformers

    package, name = path.split(".")
    module = f"transformers.models.{package}.modeling_{package}"
    made = getattr(importlib.import_module(module), name)
    given = sizes or {"hidden_size": 64, "intermediate_size": 12, "pad_token_id": 0}
    mlp: nn.Module = made(getattr(transformers, config)(**given)).eval()
    return mlp


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
def test_an_mlp_that_decides_by_dtypes_is_refused() -> None:
    """As optimize_ refuses it: a trace does not show what it does for other ones."""
    sizes = {"d_model": 64, "d_ff": 12, "feed_forward_proj": "gated-gelu"}
    mlp = mlp_of_transformers("t5.T5DenseGatedActDense", "T5Config", sizes)
    with pytest.raises(InputError, match="its forward uses isinstance"):
        fl.nn.GatedMLP.from_module(mlp)


@pytest.mark.skipif(not HAS_TRANSFORMERS, reason="needs transformers")
@pytest.mark.parametrize(
    ("path", "config", "sizes"),
    [
        ("llama.LlamaMLP", "LlamaConfig", {}),
        ("mistral.MistralMLP", "MistralConfig", {}),
        ("qwen2.Qwen2MLP", "Qwen2Config", {}),
        ("qwen3.Qwen3MLP", "Qwen3Config", {}),
        ("gemma.GemmaMLP", "GemmaConfig", {}),
        ("gemma2.Gemma2MLP", "Gemma2Config", {}),
        ("phi3.Phi3MLP", "Phi3Config", {}),
    ],
)
def test_the_mlps_of_transformers(path: str, config: str, sizes: dict[str, Any]) -> None:
    mlp = mlp_of_transformers(path, config, sizes)
    layer = fl.nn.GatedMLP.from_module(mlp)
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(layer(x), mlp(x), rtol=2e-5, atol=2e-5)
    assert list(layer.state_dict()) == list(mlp.state_dict())
    layer.load_state_dict(mlp.state_dict(), strict=True)
    wanted = list(mlp.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(layer(x).sum(), wanted),
        torch.autograd.grad(mlp(x).sum(), wanted),
        rtol=2e-5,
        atol=2e-5,
    )


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(InputError, match="'fastest'"):
        fl.nn.GatedMLP(4, 8, backend="fastest")


@pytest.mark.parametrize(
    "how", [lambda m: delattr(m, "up_proj"), lambda m: setattr(m, "up_proj", None)]
)
def test_a_layer_that_was_taken_away_is_named(how: Any) -> None:
    layer = fl.nn.GatedMLP(4, 8)
    how(layer)
    with pytest.raises(fl.InputError, match=r"'up_proj'.*may be replaced"):
        layer(torch.ones(2, 4))


def test_a_tensor_in_the_place_of_a_parameter_is_read() -> None:
    """As weights that another network makes are."""
    layer = fl.nn.GatedMLP(5, 7)
    x, made = torch.randn(3, 5), torch.randn(7, 5)
    del layer.gate_proj.weight
    layer.gate_proj.weight = made
    up, down = layer.up_proj.weight, layer.down_proj.weight
    torch.testing.assert_close(layer(x), fl.gated_mlp(x, made, up, down, activation="silu"))
