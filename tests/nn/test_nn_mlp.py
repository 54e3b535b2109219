"""fl.nn.MLP: a drop-in for an nn.Sequential, parameters shared, keys the same."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import fastlinear as fl
from fastlinear.activations.reference import ACTIVATIONS, NAMES
from fastlinear.core.errors import InputError
from fastlinear.nn import MLP
from fastlinear.nn.mlp_layer import Layer


def sequential(act: type[nn.Module] = nn.ReLU, last: bool = False) -> nn.Sequential:
    modules: list[nn.Module] = [nn.Linear(8, 16), act(), nn.Linear(16, 12), act(), nn.Linear(12, 3)]
    return nn.Sequential(*modules, *([act()] if last else []))


@pytest.mark.parametrize("act", [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.LeakyReLU])
@pytest.mark.parametrize("last", [False, True])
def test_round_trip(act: type[nn.Module], last: bool) -> None:
    seq = sequential(act, last)
    net = MLP.from_sequential(seq)
    x = torch.randn(5, 8)
    assert torch.allclose(net(x), seq(x), atol=1e-5)
    assert list(net.state_dict()) == list(seq.state_dict())
    assert all(a is b for a, b in zip(net.parameters(), seq.parameters(), strict=True))
    back = net.to_sequential()
    assert str(back) == str(seq)
    assert all(a is b for a, b in zip(back.parameters(), seq.parameters(), strict=True))
    assert net.sizes == (8, 16, 12, 3)


def test_state_dicts_load_both_ways() -> None:
    seq, net = sequential(), MLP([8, 16, 12, 3])
    x = torch.randn(5, 8)
    net(x)
    net.load_state_dict(seq.state_dict())
    assert torch.allclose(net(x), seq(x), atol=1e-5)
    other = sequential()
    other.load_state_dict(MLP([8, 16, 12, 3]).state_dict())
    net.load_state_dict(other.state_dict(), assign=True)
    assert torch.allclose(net(x), other(x), atol=1e-5)


@pytest.mark.parametrize("activation", NAMES)
def test_every_activation(activation: str) -> None:
    net = MLP([6, 10, 4], activation, activation, bias=False)
    x = torch.randn(3, 6)
    weights = [net.get_parameter("0.weight"), net.get_parameter("2.weight")]
    expected = fl.mlp(x, weights, activation=activation, final_activation=activation)
    assert torch.equal(net(x), expected)
    assert list(net.state_dict()) == ["0.weight", "2.weight"]
    if activation != "none" and ACTIVATIONS[activation].module is None:
        with pytest.raises(InputError, match="to_sequential"):
            net.to_sequential()
    else:
        assert torch.allclose(net.to_sequential()(x), net(x), atol=1e-5)


def test_training_follows_the_sequential() -> None:
    seq = sequential()
    net = MLP.from_sequential(copy.deepcopy(seq))
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.01) for m in (seq, net)]
    for _ in range(5):
        x = torch.randn(16, 8)
        for module, optimizer in zip((seq, net), optimizers, strict=True):
            optimizer.zero_grad()
            module(x).square().mean().backward()
            optimizer.step()
    for ours, theirs in zip(net.parameters(), seq.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        assert torch.allclose(net(x), seq(x), rtol=1e-3, atol=1e-4)


def test_moves_copies_and_pickles() -> None:
    net = MLP([8, 16, 3], "gelu", dtype=torch.float64)
    x = torch.randn(5, 8)
    assert net(x.double()).dtype is torch.float64
    net.float()
    expected = net(x)
    clone = copy.deepcopy(net)
    with torch.no_grad():
        net.get_parameter("0.weight").zero_()
    assert torch.equal(clone(x), expected)
    assert not torch.equal(net(x), expected)
    file = io.BytesIO()
    torch.save(clone, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), expected)
    assert net.bfloat16()(x.bfloat16()).dtype is torch.bfloat16
    assert MLP([4, 2], device="meta").get_parameter("0.weight").is_meta


def test_layers_may_be_replaced_and_parametrized() -> None:
    net = MLP([8, 8, 8])
    x = torch.randn(2, 8)
    net(x)
    net._modules["2"] = nn.Linear(8, 4)
    assert net(x).shape == (2, 4)
    torch.nn.utils.parametrizations.weight_norm(net.get_submodule("0"))
    y = net(x)
    net.get_submodule("0").parametrizations.weight.original1.data.mul_(2)  # type: ignore[union-attr]
    y.sum().backward()
    expected = net.get_submodule("2")(torch.relu(net.get_submodule("0")(x)))
    assert torch.allclose(net(x), expected, atol=1e-5)


def test_hooks() -> None:
    net = MLP([8, 8, 8])
    seen: list[Any] = []
    net.register_forward_hook(lambda *_: seen.append(1))
    net(torch.randn(2, 8))
    assert seen == [1]


def test_hooks_on_layers() -> None:
    """A layer with a hook is called; the others' numbers, and later calls', stay the same."""
    net = MLP([8, 16, 8], activation="gelu", final_activation="relu")
    seq = net.to_sequential()
    x = torch.randn(2, 8, requires_grad=True)
    seen: list[Any] = []
    for name in ("register_forward_hook", "register_full_backward_hook"):
        handles = [getattr(net.get_submodule(i), name)(lambda m, *_: seen.append(m)) for i in "02"]
        for module in (net, copy.deepcopy(net)):
            y = module(x)
            assert torch.allclose(y, seq(x), atol=1e-6)
            y.sum().backward()
            assert seen == list(module.children())[:: 1 if "forward" in name else -1]
            seen.clear()
        with pytest.raises(InputError, match="layer 0 with hooks"):
            net.to_sequential()
        net.backend = "layerwise"
        with pytest.raises(fl.UnsupportedError, match="hooks on a layer"):
            net(x)
        net.backend = None
        for handle in handles:
            handle.remove()
        assert torch.allclose(net(x), seq(x), atol=1e-6)
        assert {type(m) for m in net.children()} == {Layer}
    net.get_submodule("0").register_forward_pre_hook(lambda _, args: (2 * args[0],))
    assert torch.allclose(net(x), seq(2 * x), atol=1e-6)
    assert [type(m).__name__ for m in net.children()] == ["CalledLayer", "Layer"]


def test_shared_layers() -> None:
    linear = nn.Linear(6, 6)
    seq = nn.Sequential(linear, nn.ReLU(), linear, nn.ReLU(), linear)
    net = MLP.from_sequential(seq)
    x = torch.randn(3, 6)
    assert torch.allclose(net(x), seq(x), atol=1e-5)
    assert len(list(net.parameters())) == 2
    net(x).sum().backward()
    assert linear.weight.grad is not None


def test_chains_without_activations_and_single_layers() -> None:
    for seq in (
        nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6)),
        nn.Sequential(nn.Linear(4, 5, bias=False)),
        nn.Sequential(nn.Linear(4, 5), nn.Tanh()),
    ):
        net = MLP.from_sequential(seq.eval())
        x = torch.randn(3, 4)
        assert torch.allclose(net(x), seq(x), atol=1e-5)
        assert not net.training
        assert str(net.to_sequential()) == str(seq)


class Odd(nn.Linear):
    pass


def hooked() -> nn.Sequential:
    seq = sequential()
    seq[1].register_forward_hook(lambda *_: None)
    return seq


def parametrized() -> nn.Sequential:
    seq = sequential()
    torch.nn.utils.parametrizations.weight_norm(seq[0])
    return seq


@pytest.mark.parametrize(
    ("seq", "message"),
    [
        (nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1), nn.Linear(4, 4)), "Dropout"),
        (nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), "LayerNorm"),
        (nn.Sequential(nn.ReLU(), nn.Linear(4, 4)), "each activation after a Linear"),
        (nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU()), "each activation after a Linear"),
        (nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.3), nn.Linear(4, 4)), "LeakyReLU"),
        (nn.Sequential(Odd(4, 4)), "subclass"),
        (nn.Sequential(nn.ReLU()), "each activation after"),
        (nn.Sequential(), "at least one nn.Linear"),
        (nn.Linear(4, 4), "an nn.Sequential"),
        (hooked(), "without hooks"),
        (parametrized(), "only"),
        (nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(4, 4)), "take the 5 features"),
    ],
)
def test_refusals(seq: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        MLP.from_sequential(seq)


@pytest.mark.parametrize("sizes", [[4], [], [4, 2.5], 3, [3, True], [3, -1], "34"])
def test_bad_sizes(sizes: Any) -> None:
    with pytest.raises(InputError, match=r"at least two sizes|whole number"):
        MLP(sizes)
    with pytest.raises(InputError, match="activation in"):
        MLP([4, 4], "swish")


def test_compile_fullgraph() -> None:
    net = MLP([8, 16, 3], "gelu")
    x = torch.randn(5, 8)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), net(x), atol=1e-5)
    compiled(x).sum().backward()
    assert net.get_parameter("0.weight").grad is not None
    with torch.no_grad():
        net.get_parameter("0.weight").mul_(2)
    assert torch.allclose(compiled(x), net(x), atol=1e-5)


@pytest.mark.parametrize("given", [{"dtype": torch.int64}, {"dtype": "float32"}, {"backend": "zz"}])
def test_bad_options(given: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"fastlinear.nn.MLP: expected"):
        MLP([4, 2], **given)


class Adapted(nn.Module):
    """A wrapper that looks like a layer, as adapters do."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner, self.weight, self.bias = inner, inner.weight, inner.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 1


class Doubled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class WithNorm(MLP):
    def __init__(self) -> None:
        super().__init__([4, 4, 4])
        self.norm = nn.LayerNorm(4)


def changed(layer: nn.Module | None, name: str = "0") -> MLP:
    net = MLP([4, 4, 4])
    net._modules[name] = layer
    return net


def with_own_forward() -> MLP:
    linear = nn.Linear(4, 4)
    linear.forward = lambda x: x + 1  # type: ignore[method-assign]
    return changed(linear)


def with_hook() -> MLP:
    linear = nn.Linear(4, 4)
    linear.register_forward_hook(lambda *_: None)
    return changed(linear)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: changed(Adapted(nn.Linear(4, 4))), "a Adapted as '0'"),
        (lambda: changed(Doubled(4, 4)), "Doubled, a subclass with a forward of its own as '0'"),
        (lambda: changed(fl.nn.Linear(4, 4, activation="relu")), "forward of its own"),
        (lambda: changed(nn.Dropout(), "drop"), "a Dropout as 'drop'"),
        (lambda: changed(nn.ReLU(), "4"), "a ReLU as '4'"),
        (lambda: changed(nn.Linear(4, 4), "head"), "one more linear layer as 'head'"),
        (lambda: changed(None), "a NoneType as '0'"),
        (lambda: changed(nn.LazyLinear(4)), "sizes are not known"),
        (WithNorm, "a LayerNorm as 'norm'"),
        (with_own_forward, "forward was replaced"),
        (with_hook, "with hooks"),
    ],
)
def test_children_that_do_more_are_refused(make: Any, message: str) -> None:
    net = make()
    with pytest.raises(InputError, match=message):
        net(torch.randn(2, 4))
    with pytest.raises(InputError, match=message):
        net.to_sequential()
    with pytest.raises(InputError, match=message):
        _ = net.sizes


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        torch.nn.utils.weight_norm,
        torch.nn.utils.spectral_norm,
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: setattr(layer, "lora", nn.Parameter(torch.ones(1))),
    ],
)
def test_what_adds_parameters_to_a_layer_leaves_it_as_it_was(change: Any) -> None:
    net = MLP([4, 4, 4])
    x = torch.randn(2, 4)
    before, keys = net(x), list(net.state_dict())
    with pytest.raises(InputError, match=r"a parameter '.*' for a layer"):
        change(net.get_submodule("0"))
    assert torch.equal(net(x), before)
    assert list(net.state_dict()) == keys
    assert all(isinstance(layer.weight, nn.Parameter) for layer in net.layers())
    assert torch.allclose(net.to_sequential()(x), before, atol=1e-6)


def test_another_forward_for_a_layer_is_refused() -> None:
    with pytest.raises(InputError, match="another forward for a layer"):
        MLP([4, 4]).get_submodule("0").forward = lambda x: x  # type: ignore[method-assign]


def test_to_sequential_refuses_parametrized_layers() -> None:
    net = MLP([4, 4])
    torch.nn.utils.parametrizations.weight_norm(net.get_submodule("0"))
    with pytest.raises(InputError, match="layer 0 with a weight that is no parameter"):
        net.to_sequential()


def test_a_layer_of_ours_without_an_activation_is_a_linear_layer() -> None:
    net = fl.nn.MLP([3, 8, 2])
    x = torch.randn(4, 3)
    plain, relu = fl.nn.Linear(3, 8), fl.nn.Linear(3, 8, activation="relu")
    net._modules["0"] = plain
    expected = torch.nn.functional.linear(
        torch.relu(plain(x)), *net.get_submodule("2").parameters()
    )
    torch.testing.assert_close(net(x), expected)
    net._modules["0"] = relu
    with pytest.raises(fl.InputError, match="forward of its own"):
        net(x)
