"""What changes behind a graphed callable is noticed at its next call."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.cuda_graphs.graphed import graphed
from fastlinear.cuda_graphs.search import Search
from tests.cuda_graphs.cases import mlp


@torch.no_grad()
def test_weights_edited_in_place_replaced_or_loaded_are_seen(device: str) -> None:
    model = mlp(device)
    g = graphed(model, batch_dim=0)
    x = torch.randn(4, 4, device=device)
    g(x)
    model[0].weight.mul_(2)
    assert_close(g(x), model(x))
    model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()})
    assert_close(g(x), model(x))
    assert g.counts.recorded == 1
    model[0].weight = nn.Parameter(torch.randn(8, 4, device=device))
    assert_close(g(x), model(x))
    model[2].weight.data = torch.randn(3, 8, device=device)
    assert_close(g(x), model(x))
    model[1] = nn.GELU()
    assert_close(g(x), model(x))
    assert g.counts.recorded == 4


@torch.no_grad()
def test_a_view_of_the_same_memory_is_another_weight(device: str) -> None:
    layer = nn.Linear(4, 4, bias=False, device=device)
    g = graphed(layer)
    x = torch.randn(2, 4, device=device)
    g(x)
    layer.weight.data = layer.weight.data.t()
    assert_close(g(x), layer(x))


def test_an_equal_parameter_is_another_one(device: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(1))

        def forward(self, x: Tensor) -> Tensor:
            return x * self.scale

    module = Scaled().to(device)
    g = graphed(module)
    x = torch.randn(2, 4, device=device)
    g(x).sum().backward()
    module.scale = nn.Parameter(torch.ones(1, device=device))
    g(x).sum().backward()
    assert module.scale.grad is not None
    assert_close(module.scale.grad[0], x.sum())


@torch.no_grad()
def test_a_closures_tensors_are_watched(device: str) -> None:
    weight = torch.randn(4, 4, device=device)
    held = [torch.randn(4, device=device)]

    def f(x: Tensor) -> Tensor:
        return x @ weight + held[0]

    g = graphed(f)
    x = torch.randn(2, 4, device=device)
    assert_close(g(x), f(x))
    weight = torch.randn(4, 4, device=device)
    assert_close(g(x), f(x))
    held[0] = torch.randn(4, device=device)
    assert_close(g(x), f(x))
    weight.add_(1)
    assert_close(g(x), f(x))
    assert g.counts.recorded == 3


class Holder:
    __slots__ = ("inner",)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner


@torch.no_grad()
def test_a_tensor_from_nowhere_is_refused_unless_named(device: str) -> None:
    holder = Holder(torch.randn(4, device=device))
    x = torch.randn(2, 4, device=device)

    def f(x: Tensor) -> Tensor:
        return x + holder.inner

    with pytest.raises(UnsupportedError, match=r"test_graphed_watch.py:\d+: `return x \+ holder"):
        graphed(f)(x)
    g = graphed(f, watch=[holder.inner])
    assert_close(g(x), f(x))


def test_hooks_and_wrappers_are_refused(device: str) -> None:
    model = mlp(device)
    g = graphed(model)
    x = torch.randn(2, 4, device=device)
    g(x)
    handle = model[1].register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedError, match="hooks on ReLU"):
        g(x)
    handle.remove()
    g(x)
    assert g.counts.recorded == 1
    handle = model[0].weight.register_hook(lambda grad: grad)
    with pytest.raises(UnsupportedError, match="a gradient hook"):
        graphed(model)(x)
    handle.remove()
    with pytest.raises(UnsupportedError, match="DataParallel"):
        graphed(nn.DataParallel(model))(x)
    with pytest.raises(InputError, match="copy or pickle"):
        copy.deepcopy(g)
    with pytest.raises(InputError, match="copy or pickle"):
        pickle.dumps(g)


def test_a_global_with_the_name_of_an_attribute_is_not_watched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = torch.ones(3)
    monkeypatch.setitem(globals(), "weight", other)
    layer = nn.Linear(2, 2)

    def scaled(x: Tensor) -> Tensor:
        return x * layer.weight

    found = Search()
    found.visit(scaled)
    assert any(t is layer.weight for t in found.tensors)
    assert not any(t is other for t in found.tensors)
