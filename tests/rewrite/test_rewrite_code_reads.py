"""What the code of a traced forward reads and writes: edits to it hold, or it is not rewritten."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import fastlinear as fl
from fastlinear.core.compare import relative_error
from tests.rewrite.rewrite_models import Clock
from tests.rewrite.route_models import CLOCK, Conv1D, X, swapped


class Fused(nn.Module):
    """act(fc(x)), fused, and then what a subclass makes of it."""

    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(16, 16), nn.LeakyReLU()
        for name, child in children.items():
            self.add_module(name, child)


class Helper(Fused):
    def helped(self, x: Tensor) -> Tensor:
        return x * 2

    def forward(self, x: Tensor) -> Tensor:
        return self.helped(self.act(self.fc(x)))


class Base(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


class Derived(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Inner(nn.Module):
    factor = 3.0

    def __init__(self) -> None:
        super().__init__()
        self.deep = nn.Sequential(nn.Dropout(0.1))
        self.deep.factor = 4.0  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x

    @property
    def doubled(self) -> float:
        return 2 * self.factor

    def tripled(self) -> float:
        return 3 * self.factor


class ReadsClass(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * self.inner.factor


class ReadsProperty(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * self.inner.doubled


class ReadsMethod(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * self.inner.tripled()


class ReadsDeep(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * self.inner.deep.factor * self.inner.deep[0].p


class ReadsBias(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * (1.0 if self.fc.bias is None else 2.0)


class Settings:
    class inner:
        scale = 2.0

    scale = 3.0

    @classmethod
    def get(cls) -> float:
        return cls.scale


class ReadsGlobalClass(Fused):
    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * Settings.inner.scale * Settings.get()


class Computed(Fused):
    scale_now = 2.0

    def __getattr__(self, name: str) -> Any:
        return type(self).scale_now if name == "scale" else super().__getattr__(name)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * self.scale


class Deterministic(Fused):
    def forward(self, x: Tensor) -> Tensor:
        factor = 2.0 if torch.are_deterministic_algorithms_enabled() else 1.0
        return self.act(self.fc(x)) * factor


class OfDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({k: nn.Linear(16, 16) for k in "abc"})
        self.act = nn.LeakyReLU()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = self.act(layer(x))
        return x * 2


class OfConv1D(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = Conv1D(16, 16), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x)) * 2


class Early(nn.Sequential):
    """A Sequential that may stop before its end."""

    depth: int | None = None

    def __iter__(self) -> Iterator[nn.Module]:
        return itertools.islice(iter(self._modules.values()), self.depth)


def sequential(kind: type[nn.Sequential] = nn.Sequential) -> nn.Sequential:
    return kind(*(nn.Linear(16, 16), nn.LeakyReLU(), nn.LayerNorm(16)), *pair(), nn.Linear(16, 16))


def pair() -> tuple[nn.Module, nn.Module]:
    return nn.Linear(16, 16), nn.ReLU()


def _scaled(function: Callable[..., Tensor]) -> Callable[..., Any]:
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs) * 3

    return scaled


class Scaling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is F.linear else result


Patch = pytest.MonkeyPatch
Edit = Callable[[Any, Patch], Any]


def _reordered(model: Any, _: Patch) -> None:
    first = model.layers.pop("a")
    model.layers["a"] = first


def _renamed(model: Any, _: Patch) -> None:
    model.layers["z"] = model.layers.pop("a")


def _shortened(model: Any, _: Patch) -> None:
    model.depth = 4


def _of_another_class(model: Any, _: Patch) -> None:
    model.__class__ = Early
    model.depth = 4


def _shadowed(model: Any, _: Patch) -> None:
    model[0].__dict__["weight"] = torch.ones(16, 16)


CASES: dict[str, tuple[Callable[[], nn.Module], Edit]] = {
    "method of the instance": (Helper, lambda m, p: setattr(m, "helped", lambda x: x * 5)),
    "method of the class": (
        Helper,
        lambda m, p: p.setattr(Helper, "helped", lambda self, x: x * 7),
    ),
    "forward of a base class": (
        Derived,
        lambda m, p: p.setattr(Base, "forward", _scaled(Base.forward)),
    ),
    "child's class attribute, on the instance": (
        lambda: ReadsClass(inner=Inner()),
        lambda m, p: setattr(m.inner, "factor", 9.0),
    ),
    "child's class attribute": (
        lambda: ReadsClass(inner=Inner()),
        lambda m, p: p.setattr(Inner, "factor", 9.0),
    ),
    "what a child's property reads": (
        lambda: ReadsProperty(inner=Inner()),
        lambda m, p: p.setattr(Inner, "factor", 9.0),
    ),
    "what a child's method reads": (
        lambda: ReadsMethod(inner=Inner()),
        lambda m, p: setattr(m.inner, "factor", 9.0),
    ),
    "attribute of a grandchild": (
        lambda: ReadsDeep(inner=Inner()),
        lambda m, p: setattr(m.inner.deep, "factor", 9.0),
    ),
    "setting of a child's child": (
        lambda: ReadsDeep(inner=Inner()),
        lambda m, p: setattr(m.inner.deep[0], "p", 0.9),
    ),
    "a bias that goes": (ReadsBias, lambda m, p: setattr(m.fc, "bias", None)),
    "class inside a global class": (
        ReadsGlobalClass,
        lambda m, p: p.setattr(Settings.inner, "scale", 9.0),
    ),
    "what a classmethod reads": (
        ReadsGlobalClass,
        lambda m, p: p.setattr(Settings, "scale", 9.0),
    ),
    "what __getattr__ computes": (Computed, lambda m, p: p.setattr(Computed, "scale_now", 9.0)),
    "a setting of torch's": (Deterministic, lambda m, p: torch.use_deterministic_algorithms(True)),
    "order of a ModuleDict": (OfDict, _reordered),
    "key of a ModuleDict": (OfDict, _renamed),
    "forward of Conv1D": (
        OfConv1D,
        lambda m, p: p.setattr(Conv1D, "forward", _scaled(Conv1D.forward)),
    ),
    "a Sequential's own order": (lambda: sequential(Early), _shortened),
    "a Sequential of another class": (sequential, _of_another_class),
    "every Sequential's order": (
        sequential,
        lambda m, p: p.setattr(
            nn.Sequential, "__iter__", lambda self: iter(list(self._modules.values())[:4])
        ),
    ),
    "every module's call": (
        sequential,
        lambda m, p: p.setattr(nn.Module, "__call__", _scaled(nn.Module.__call__)),
    ),
    "every linear's call": (
        sequential,
        lambda m, p: p.setattr(nn.Linear, "__call__", _scaled(nn.Linear.__call__)),
    ),
    "F.linear": (sequential, lambda m, p: p.setattr(F, "linear", _scaled(F.linear))),
    "a function mode": (sequential, lambda m, p: Scaling()),
    "an instance's own call": (
        sequential,
        lambda m, p: setattr(m[3], "_call_impl", _scaled(m[3]._call_impl)),
    ),
    "an attribute before the weight": (sequential, _shadowed),
    "a bias of one number": (
        sequential,
        lambda m, p: setattr(m[0], "bias", nn.Parameter(torch.ones(1))),
    ),
    "a bias of two dimensions": (
        sequential,
        lambda m, p: setattr(m[0], "bias", nn.Parameter(torch.ones(6, 16))),
    ),
}


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("case", CASES)
def test_edits_hold(case: str, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(CLOCK)
    make, edit = CASES[case]
    torch.manual_seed(0)
    model = make().eval()
    plain = copy.deepcopy(model)
    fl.optimize_(model, X, config=fl.Config(draws=1, time_budget_s=600.0))
    if case not in ("what __getattr__ computes", "a setting of torch's"):
        assert swapped(model) in ([""], ["fc"]), "it was rewritten"
    before = plain(X)
    assert relative_error(model(X), before) < 1e-5
    modes = [edit(m, monkeypatch) for m in (plain, model)][:1]
    with modes[0] if isinstance(modes[0], TorchFunctionMode) else torch.enable_grad():
        expected, got = plain(X), model(X)
    monkeypatch.undo()
    assert relative_error(got, expected) < 1e-5
    changed = expected.shape != before.shape or relative_error(expected, before) > 1e-2
    assert changed or case == "key of a ModuleDict", "the edit counts"


OPERATORS = ("+=", "-=", "*=", "/=", "//=", "**=", "%=")


def _written(operator: str) -> type[nn.Module]:
    source = f"""
class Written(Fused):
    def forward(self, x, w):
        other = x
        x {operator} w
        n = x.shape[0]
        m = n
        m += 1
        view = self.count.T
        view += 1
        return self.act(self.fc(other)) * (m - n)
"""
    scope: dict[str, Any] = {"Fused": Fused, "__name__": __name__}
    exec(source, scope)
    found: type[nn.Module] = scope["Written"]
    return found


@pytest.mark.parametrize("operator", OPERATORS)
def test_operators_in_place_write(operator: str, clock: Clock) -> None:
    clock(CLOCK)
    torch.manual_seed(0)
    model = _written(operator)().eval()
    model.register_buffer("count", torch.zeros(2, 3))
    x = torch.rand(16, 16) + 1
    w = torch.rand(16, 16) + 1
    plain = copy.deepcopy(model)
    fl.optimize_(model, (x, w), config=fl.Config(draws=1, time_budget_s=600.0))
    assert swapped(model) == [""]
    for m in (plain, model):
        m.count.zero_()  # type: ignore[operator, union-attr]
    a, b = x.clone(), x.clone()
    expected, got = plain(a, w), model(b, w)
    assert torch.equal(a, b)
    assert not torch.equal(a, x)
    assert torch.equal(plain.count, model.count)  # type: ignore[arg-type]
    assert float(model.count.min()) == 1.0  # type: ignore[operator, union-attr]
    assert relative_error(got, expected) < 1e-5


def test_a_write_to_an_input_is_verified(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rewritten forward that leaves it out is rejected, whatever it returns."""

    class Adds(Fused):
        def forward(self, x: Tensor) -> Tensor:
            x += 0.5
            return self.act(self.fc(x))

    clock(CLOCK)
    from fastlinear.rewrite.match import parent

    monkeypatch.setattr(parent, "_as_call", lambda _: torch.add)
    result = fl.optimize_(Adds().eval(), X, config=fl.Config(draws=1, time_budget_s=600.0))
    assert [s.code for s in result.sites] == ["less_accurate"]
    assert "input[0]" in result.sites[0].reason
