"""Tracing leaves no symbols in the user's objects, whatever a forward writes to."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import fastlinear as fl
from fastlinear.profile.effects import why_not_run
from fastlinear.profile.graph import Observed, Untraceable, trace

LOG: list[Any] = []
SEEN = SimpleNamespace(last=None)
X = torch.randn(2, 4)


class Base(nn.Module):
    class_log: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.log: list[Any] = []
        self.holder = SimpleNamespace(last=None)
        self.child = nn.Sequential()
        self.child.log = []


class OwnList(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        self.log.append(y)
        return y


class OwnObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        setter = self.holder.__dict__
        setter.update(last=y)
        return y


class ChildsList(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        self.child.log.append(y)
        return y


class Attribute(Base):
    def forward(self, x: Tensor) -> Tensor:
        self.last = y = F.relu(self.fc(x))
        return y


class GlobalList(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        LOG.append(y)
        return y


class GlobalObject(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        SEEN.last = y
        return y


class GlobalName(Base):
    def forward(self, x: Tensor) -> Tensor:
        global LAST
        y = F.relu(self.fc(x))
        LAST = y
        return y


class ClassList(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        self.class_log.append(y)
        return y


class ClassAttribute(Base):
    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        type(self).last = y
        return y


def note(y: Tensor) -> None:
    LOG.append(y)


class ByHelper(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        note(y)
        return y


class InModule(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        sys.modules[__name__].LOG.append(y)
        return y


class Prints(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.fc(x))
        print(y)
        return y


def enclosed() -> nn.Module:
    kept: list[Any] = []

    class Enclosed(Base):
        def forward(self, x: Tensor) -> Tensor:
            y = F.relu(self.fc(x))
            kept.append(y)
            return y

    model = Enclosed()
    model.kept = kept
    return model


KINDS = [OwnList, OwnObject, ChildsList, Attribute, GlobalList, GlobalObject, GlobalName]
KINDS += [ClassList, ClassAttribute, ByHelper, InModule, Prints, enclosed]


@pytest.mark.parametrize("make", KINDS)
def test_no_symbol_stays_behind(make: Any, capsys: pytest.CaptureFixture[str]) -> None:
    model = make().eval()
    LOG.clear()
    fl.profile(model, X)
    reached = [*LOG, SEEN.last, globals().get("LAST"), *Base.class_log]
    reached += [*model.log, model.holder.last, *model.child.log, getattr(type(model), "last", None)]
    reached += [getattr(model, "last", None), *getattr(model, "kept", ())]
    assert not any(isinstance(v, fx.Proxy) for v in reached)
    assert "Proxy" not in capsys.readouterr().out


@pytest.mark.parametrize("make", [OwnList, ChildsList, Attribute, OwnObject])
def test_what_only_touches_the_model_is_traced_on_a_copy(make: Any) -> None:
    model = make()
    graph = trace(model, Observed.of((X,), {}))
    assert any(n.target == "fc" for n in graph.nodes)
    assert model.log == []
    assert model.child.log == []


@pytest.mark.parametrize("make", KINDS[4:])
def test_what_reaches_further_is_refused_before_it_runs(make: Any) -> None:
    model = make()
    LOG.clear()
    assert why_not_run(model) is not None
    with pytest.raises(Untraceable):
        trace(model, Observed.of((X,), {}))
    assert LOG == []


def test_arguments_are_copied_too() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Any) -> Tensor:
            y = F.relu(self.fc(x))
            cache.values.append(y)
            return y

    cache = SimpleNamespace(values=[])
    fl.profile(Cached(), (X, cache))
    assert cache.values
    assert not any(isinstance(v, fx.Proxy) for v in cache.values)


def test_a_module_that_cannot_be_copied_is_not_traced() -> None:
    model = OwnList()
    model.thread = (i for i in range(3))  # a generator
    with pytest.raises(Untraceable, match="cannot be copied"):
        trace(model, Observed.of((X,), {}))


def test_globals_with_names_of_attributes_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "log", LOG)
    monkeypatch.setitem(globals(), "fc", Base())
    assert why_not_run(OwnList()) is None


class Sevenfold(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy * 7


class OwnBackward(Base):
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = F.relu(self.fc(Sevenfold.apply(x)))  # type: ignore[no-untyped-call]
        return y


class WithoutGradients(Base):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = x * 2
        y: Tensor = F.relu(self.fc(x))
        return y


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("kind", [OwnBackward, WithoutGradients])
def test_what_gradients_do_not_pass_is_not_traced(kind: Any, grad: bool) -> None:
    with torch.set_grad_enabled(grad), pytest.raises(Untraceable, match="without gradients"):
        trace(kind(), Observed.of((X,), {}))
    with torch.inference_mode(), pytest.raises(Untraceable, match="without gradients"):
        trace(kind(), Observed.of((X,), {}))
