"""What ``from_module`` and its kin take: what ``optimize_`` recognises, and nothing else."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.rewrite.rules.diagonal import modules as diagonal
from fastlinear.rewrite.rules.gated import modules as gated

K, H = 8, 12
Change = Callable[[Any, Tensor], Tensor]


class Stopped(torch.autograd.Function):
    """Arithmetic that a trace follows, with another derivative."""

    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        return a * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 7


def ungraded(a: Tensor) -> Tensor:
    with torch.no_grad():
        return a * 1.0


def hooked(a: Tensor) -> Tensor:
    a.register_hook(lambda dy: 3 * dy)
    return a


def hooked_in_training(a: Tensor) -> Tensor:
    if a.requires_grad:
        a.register_hook(lambda dy: 3 * dy)
    return a


HIDDEN: dict[str, Change] = {
    "detach": lambda _, a: a.detach(),
    "data": lambda _, a: a.data,
    "no_grad": lambda _, a: ungraded(a),
    "function": lambda _, a: Stopped.apply(a),  # type: ignore[no-untyped-call]
    "hook": lambda _, a: hooked(a),
    "hook_in_training": lambda _, a: hooked_in_training(a),
    "half_of_the_gradient": lambda _, a: 0.5 * a + 0.5 * a.detach(),
    "nan_to_num": lambda _, a: a.nan_to_num(),
    "where": lambda _, a: torch.where(a.isfinite(), a, torch.zeros_like(a)),
    "masked_fill": lambda _, a: a.masked_fill(a != a, 0.0),
    "bound": lambda _, a: a.clamp(-6e4, 6e4),
    "bound_by_minimum": lambda _, a: torch.minimum(a, a.new_full((), 6e4)),
    "rows": lambda _, a: a if a.shape[0] < 10_000 else -a,
    "rank": lambda _, a: a if a.dim() < 5 else -a,
    "first_rows": lambda _, a: a[:100_000],
    "numbers": lambda _, a: -a if a.isinf().any() else a,
    "training": lambda m, a: 2 * a if m.training else a,
    "noise": lambda m, a: a * torch.rand(a.shape).round() if m.training else a,
    "float64": lambda _, a: a.double().to(a.dtype),
    "memory": lambda m, a: m.seen.append(1) or a,
}


class GatedMLP(nn.Module):
    """A gated MLP with a change of what the gate lets through, of one half or of its input."""

    def __init__(self, place: str, change: Change) -> None:
        super().__init__()
        self.g, self.u, self.d = nn.Linear(K, H), nn.Linear(K, H), nn.Linear(H, K)
        self.place, self.change, self.seen = place, change, []  # type: ignore[var-annotated]

    def at(self, place: str, a: Tensor) -> Tensor:
        return self.change(self, a) if place == self.place else a

    def forward(self, x: Tensor) -> Tensor:
        x = self.at("input", x)
        up = self.at("half", self.u(x))
        y: Tensor = self.d(self.at("inside", F.silu(self.g(x)) * up))
        return y


class LayerScale(nn.Module):
    def __init__(self, place: str, change: Change) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.randn(K))
        self.place, self.change, self.seen = place, change, []  # type: ignore[var-annotated]

    def forward(self, x: Tensor) -> Tensor:
        if self.place == "inside":
            return self.change(self, x * self.gamma)
        return self.change(self, x) * self.gamma


def as_it_is(_: Any, a: Tensor) -> Tensor:
    return a


@pytest.mark.parametrize("place", ["input", "half", "inside"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_gated_mlp_that_does_more_is_refused(hidden: str, place: str) -> None:
    for training in (False, True):
        module = GatedMLP(place, HIDDEN[hidden]).train(training)
        with pytest.raises(fl.InputError, match="expected a module that computes"):
            fl.nn.GatedMLP.from_module(module)
        assert gated.match(module) == [], "optimize_ refuses it, too"


@pytest.mark.parametrize("place", ["input", "inside"])
@pytest.mark.parametrize("hidden", HIDDEN)
def test_a_layer_scale_that_does_more_is_refused(hidden: str, place: str) -> None:
    for training in (False, True):
        module = LayerScale(place, HIDDEN[hidden]).train(training)
        with pytest.raises(fl.InputError, match="multiplies by its parameter"):
            fl.nn.DiagonalLinear.from_layer_scale(module)
        assert diagonal.match(module) == [], "optimize_ refuses it, too"


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize(
    ("hidden", "place"),
    [
        ("no_grad", "half"),
        ("function", "inside"),
        ("data", "half"),
        ("hook_in_training", "inside"),
        ("numbers", "inside"),
        ("rows", "inside"),
        ("hook", "half"),
    ],
)
def test_what_one_call_would_not_do_is_not_advised(hidden: str, place: str, mode: str) -> None:
    """A run alone may show a gated MLP in such a forward."""
    if (hidden, mode) == ("hook", "inference"):
        pytest.skip("nothing can be hooked there")
    model = nn.Sequential(GatedMLP(place, HIDDEN[hidden])).train(mode == "train")
    for finding in fl.profile(model, torch.randn(4, K), mode=mode).findings:
        assert "from_module" not in finding.message
        whole = finding.code == "gated_mlp" and finding.advice is not None
        assert not whole or "].d" not in str(finding.advice), finding.message


def numbers() -> list[Tensor]:
    """Of several ranks, many rows, and not finite."""
    given = [torch.randn(*lead, K) for lead in ((3,), (), (2, 3), (1, 2, 2, 2), (3000,))]
    for far in ("nan", "inf", "-inf", "1e30"):
        x = torch.randn(4, K)
        x[1, 2] = float(far)
        given.append(x)
    return given


def results(module: nn.Module, x: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(0)
    y = module(leaf)
    held = [leaf, *module.parameters()]
    return [y.detach(), *torch.autograd.grad(y.square().sum(), held)]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(
    ("convert", "module"),
    [
        (fl.nn.GatedMLP.from_module, GatedMLP("", as_it_is)),
        (
            fl.nn.GatedMLP.from_module,
            GatedMLP("inside", lambda m, a: F.dropout(a, 0.5, m.training)),
        ),
        (fl.nn.DiagonalLinear.from_layer_scale, LayerScale("inside", as_it_is)),
    ],
)
def test_what_is_taken_computes_the_same(convert: Any, module: nn.Module, training: bool) -> None:
    converted = convert(module.train(not training)).train(training)
    module.train(training)
    for x in numbers():
        ours, theirs = results(converted, x), results(module, x)
        assert torch.equal(ours[0].isfinite(), theirs[0].isfinite())
        if x.isfinite().all() and x.abs().max() < 1e6:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        else:
            torch.testing.assert_close(ours[0], theirs[0], equal_nan=True, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_layer_scale_promotes_as_its_module_does(dtype: torch.dtype) -> None:
    module = LayerScale("inside", as_it_is)
    layer, x = fl.nn.DiagonalLinear.from_layer_scale(module), torch.randn(5, K).to(dtype)
    assert layer(x).dtype is module(x).dtype
    torch.testing.assert_close(layer(x), module(x))
    torch.testing.assert_close(layer(x, residual=x), x + module(x))


# ------------------------------------------------------------------- every converter there is


def diagonal_linear() -> nn.Linear:
    linear = nn.Linear(K, K)
    with torch.no_grad():
        linear.weight.copy_(torch.eye(K))
    return linear


def stacked_experts() -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    sizes = {"hidden_size": K, "intermediate_size": H, "num_local_experts": 2}
    return MixtralExperts(transformers.MixtralConfig(**sizes))


MADE: dict[str, tuple[Callable[[], Any], Callable[[Any], nn.Module]]] = {
    "DiagonalLinear.from_layer_scale": (lambda: LayerScale("", as_it_is), lambda m: m),
    "DiagonalLinear.from_linear": (diagonal_linear, lambda m: m),
    "Experts.from_module": (stacked_experts, lambda m: m),
    "GatedMLP.from_module": (lambda: GatedMLP("", as_it_is), lambda m: m.g),
    "GroupedLinear.from_conv1d": (lambda: nn.Conv1d(K, K, 1), lambda m: m),
    "GroupedLinear.from_conv2d": (lambda: nn.Conv2d(K, K, 1), lambda m: m),
    "GroupedLinear.from_linears": (
        lambda: nn.ModuleList(nn.Linear(K, H) for _ in range(3)),
        lambda m: m[1],
    ),
    "Linear.from_linear": (lambda: nn.Linear(K, H), lambda m: m),
    "MLP.from_sequential": (
        lambda: nn.Sequential(nn.Linear(K, H), nn.ReLU(), nn.Linear(H, K)),
        lambda m: m[0],
    ),
}
"""Converter → what makes a module for it, and the part of that which is changed."""


def other_class(part: nn.Module) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return super(type(self), self).forward(x.detach())  # type: ignore[no-any-return]

    part.__class__ = type("Other", (type(part),), {"forward": forward})


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "forward_hook": lambda m: m.register_forward_hook(lambda *_: None),
    "forward_pre_hook": lambda m: m.register_forward_pre_hook(lambda *_: None),
    "backward_hook": lambda m: m.register_full_backward_hook(lambda *_: None),
    "forward_of_its_own": lambda m: setattr(m, "forward", lambda x: x),
    "other_class": other_class,
}


def test_every_converter_is_looked_at() -> None:
    found = {
        f"{name}.{method}"
        for name in fl.nn.__all__
        for method, _ in inspect.getmembers(getattr(fl.nn, name), inspect.ismethod)
        if method.startswith("from_")
    }
    assert found == set(MADE)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("converter", MADE)
def test_parts_that_do_more_are_refused(converter: str, change: str) -> None:
    name, _, method = converter.partition(".")
    convert = getattr(getattr(fl.nn, name), method)
    make, part = MADE[converter]
    assert isinstance(convert(make()), getattr(fl.nn, name))
    module = make()
    CHANGES[change](part(module))
    with pytest.raises(fl.InputError):
        convert(module)


_FIRST = """
import torch, fastlinear as fl
class Scale(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.ones(4))
    def forward(self, x):
        return x * self.gamma
print(fl.nn.DiagonalLinear.from_layer_scale(Scale()).features)
"""


def test_a_converter_may_come_before_optimize() -> None:
    """The rules that recognise a module are loaded when they are needed."""
    done = subprocess.run(
        [sys.executable, "-c", _FIRST], capture_output=True, text=True, check=False
    )
    assert done.stdout.strip() == "4", done.stderr
