"""Models and tensors that others have taken over: refused by name, or left alone site by site."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fastlinear as fl
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.profile.state import preserved
from tests.rewrite.quantized_weights import (
    Gated,
    Int8,
    OnParameters,
    Projections,
    Towers,
    quantized,
)
from tests.rewrite.rewrite_models import mlp

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))
MODES = ("inference", "train")
Entry = Callable[[nn.Module, Any], Any]


def entries() -> dict[str, Entry]:
    """Every public function that runs a model."""
    found: dict[str, Entry] = {"apply_": lambda m, x: fl.apply_(m, {}, x)}
    for mode in MODES:
        config = fl.Config(mode=mode)
        found[f"optimize_ {mode}"] = lambda m, x, c=config: fl.optimize_(m, x, config=c)
        found[f"profile {mode}"] = lambda m, x, mode=mode: fl.profile(m, x, mode=mode)
    return found


class Counting(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.calls = inner, [0]

    def forward(self, x: Tensor) -> Tensor:
        self.calls[0] += 1
        return self.inner(x)


def named(*names: str) -> Callable[[nn.Module], nn.Module]:
    """Wraps a model in a class of the last name, derived from classes of the others."""

    def wrap(model: nn.Module) -> nn.Module:
        cls: type[nn.Module] = nn.Sequential
        for name in names:
            cls = type(name, (cls,), {})
        return cls(model)

    return wrap


def managed(model: nn.Module) -> nn.Module:
    model._is_fsdp_managed_module = True
    return model


def hooked(model: nn.Module) -> nn.Module:
    def hook(*_: Any) -> None: ...

    hook.__module__ = "torch.distributed.tensor._api"
    model.register_forward_pre_hook(hook)
    return model


def freed(model: nn.Module) -> nn.Module:
    next(model.parameters()).untyped_storage().resize_(0)
    return model


def fake(model: nn.Module) -> nn.Module:
    mode = FakeTensorMode()
    for module in model.modules():
        for name, p in module._parameters.items():
            module._parameters[name] = nn.Parameter(mode.from_tensor(p.detach()))
    return model


class Opaque(Tensor):
    """A subclass that does not say where its values lie."""

    @staticmethod
    def __new__(cls, like: Tensor) -> Opaque:
        return Tensor._make_wrapper_subclass(cls, like.shape, dtype=like.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0])
        raise NotImplementedError(str(func))


def opaque(model: nn.Module) -> nn.Module:
    model[0].weight = nn.Parameter(Opaque(model[0].weight), requires_grad=False)
    return model


REFUSED: dict[str, tuple[Callable[[Any], nn.Module], str]] = {
    "DDP": (named("DistributedDataParallel"), "DistributedDataParallel"),
    "FSDP1": (named("FullyShardedDataParallel"), "FSDP1"),
    "FSDP2": (named("FSDPModule", "FSDPSequential"), "FSDP2"),
    "inside FSDP": (managed, "FSDP manages"),
    "hooks of torch.distributed": (hooked, "a hook of torch.distributed"),
    "freed": (freed, "freed"),
    "fake": (fake, "FakeTensor"),
    "opaque": (opaque, "Opaque"),
    "meta": (lambda m: m.to("meta"), "meta device"),
}


def as_it_is(model: nn.Module) -> list[Any]:
    """Every object of every module, its class, and the versions of its tensors."""
    return [
        (type(m), {k: id(v) for k, v in vars(m).items()}, [(id(p), p._version) for p in held])
        for m in model.modules()
        for held in [[*m._parameters.values(), *m._buffers.values()]]
        if all(p is not None for p in held)
    ]


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_before_anything_runs(kind: str) -> None:
    take_over, said = REFUSED[kind]
    model = nn.Sequential(counting := Counting(take_over(mlp())))
    before, drawn = as_it_is(model), torch.get_rng_state()
    for entry in entries().values():
        with pytest.raises((UnsupportedError, InputError), match=said) as caught:
            entry(model, X)
        assert caught.value.remedy
    assert counting.calls == [0]
    assert as_it_is(model) == before
    assert torch.equal(torch.get_rng_state(), drawn)


@pytest.mark.parametrize("mode", [FakeTensorMode, lambda: FlopCounterMode(display=False)])
def test_refused_under_a_dispatch_mode(mode: Any) -> None:
    model = nn.Sequential(Counting(mlp()))
    with mode():
        for entry in entries().values():
            with pytest.raises(UnsupportedError, match="Mode"):
                entry(model, X)
    assert model[0].calls == [0]


@pytest.mark.parametrize("entry", ["optimize_ train", "profile inference"])
@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp"])
def test_refused_under_a_transform(transform: str, entry: str) -> None:
    model, run = mlp().eval(), entries()[entry]
    x = torch.randn(2, 4, 16)

    def called(t: Tensor) -> Tensor:
        run(model, t)
        return model(t).sum()

    ways: dict[str, Callable[[], Any]] = {
        "vmap": lambda: torch.func.vmap(called)(x),
        "grad": lambda: torch.func.grad(called)(x[0]),
        "jvp": lambda: torch.func.jvp(called, (x[0],), (x[0],)),
    }
    with pytest.raises(UnsupportedError, match=r"transform of torch\.func"):
        ways[transform]()


def test_inputs_without_values_are_refused() -> None:
    with FakeTensorMode(), torch.device("cpu"):
        x = torch.ones(4, 16)
    with pytest.raises(UnsupportedError, match="'input 0', a FakeTensor"):
        fl.optimize_(mlp(), x)


@pytest.mark.parametrize("mode", MODES)
def test_quantized_weights_are_left_alone_and_the_rest_is_not(mode: str, fast: None) -> None:
    inner = [Gated(), Projections(), Towers(), OnParameters(), mlp()]
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), *map(quantized, inner))
    model.train(mode == "train")
    weights = [p for p in model.parameters() if isinstance(p, Int8)]
    held = [(p.values_, p.scale, p.values_.clone()) for p in weights]
    y = model(X)
    backends = {"linear_act": "onednn"}
    config = fl.Config(mode=mode, draws=1, optimizer_steps=1, backends=backends, time_budget_s=5.0)
    result = fl.optimize_(model, X, config=config)
    codes = {s.fqn: (s.status, s.code) for s in result.sites}
    assert codes.pop("0")[0] == "kept"
    assert set(codes.values()) == {("refused", "weight_subclass")}
    assert any("Int8" in note for note in result.notes)
    torch.testing.assert_close(model(X), y)
    result.revert()
    assert torch.equal(model(X), y)
    for p, (values, scale, copy) in zip(weights, held, strict=True):
        assert p.values_ is values
        assert p.scale is scale
        assert torch.equal(values, copy)


def test_what_a_step_does_to_odd_memory_is_put_back() -> None:
    model = quantized(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    weight, bias = model[0].weight, model[0].bias
    values, scale = weight.values_, weight.scale
    before = [values.clone(), scale.clone(), bias.detach().clone()]
    with preserved(model, "inference"):
        values.add_(1)
        weight.scale = scale * 2
        bias.untyped_storage().resize_(0)
    assert weight.values_ is values
    assert weight.scale is scale
    now = [values, scale, bias.detach()]
    assert all(torch.equal(a, b) for a, b in zip(before, now, strict=True))


def test_graphed_refuses_odd_tensors() -> None:
    for model in (quantized(mlp()), opaque(mlp()), named("FSDPModule", "FSDPSequential")(mlp())):
        with pytest.raises(UnsupportedError, match=r"Int8|Opaque|FSDP2|argument on cpu"):
            fl.graphed(model)(X)
