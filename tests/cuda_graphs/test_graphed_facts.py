"""Numbers and functions that a graphed callable reads from Python: changes are noticed."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from fastlinear.cuda_graphs import facts
from fastlinear.cuda_graphs.graphed import graphed
from fastlinear.cuda_graphs.watch import Watch

GAIN = 2.0


def shifted(x: Tensor) -> Tensor:
    return x + 1


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.scale, self.n, self.unread = 2.0, 1, 0
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.n):
            x = self._scaled(x)
        return shifted(self.fc(x)) * GAIN

    def _scaled(self, x: Tensor) -> Tensor:
        return x * self.scale


class Decorated(Scaled):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.scale


class Counting(Scaled):
    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (self.calls > 0)


def other(self: Scaled, x: Tensor) -> Tensor:
    return self.fc(x) - 3


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(0.1), nn.Dropout(0.9), nn.LayerNorm(4))


def set_(path: str, value: Any) -> Callable[[nn.Module], None]:
    def change(model: nn.Module) -> None:
        owner, _, name = path.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


CHANGES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], None]]] = {
    "scale": (Scaled, set_("scale", 5)),
    "scale in a decorated forward": (Decorated, set_("scale", 5)),
    "scale of a class that inherits": (Counting, set_("scale", 5)),
    "loop": (Scaled, set_("n", 3)),
    "forward": (Scaled, lambda m: setattr(m, "forward", types.MethodType(other, m))),
    "forward, a function": (Scaled, lambda m: setattr(m, "forward", lambda x: m.fc(x) - 4)),
    "a method of the instance": (Scaled, lambda m: setattr(m, "_scaled", lambda x: x - 5)),
    "slope": (net, set_("1.negative_slope", 0.7)),
    "eps": (net, set_("3.eps", 3.0)),
    "forward of a layer": (net, lambda m: setattr(m[1], "forward", torch.tanh)),
}


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_a_change_of_python_state_is_noticed(device: str, change: str) -> None:
    make, alter = CHANGES[change]
    torch.manual_seed(0)
    model = make().to(device).eval()
    g = graphed(model)
    x = torch.randn(3, 4, device=device)
    for _ in range(3):
        before = g(x).clone()
    assert_close(before, model(x))
    alter(model)
    for _ in range(3):
        y = g(x).clone()
        assert_close(y, model(x))
    assert not torch.allclose(y, before)
    assert g.counts.recorded == 2


@torch.no_grad()
def test_back_to_a_state_is_back_to_its_graph(device: str) -> None:
    model = Scaled().to(device)
    g = graphed(model)
    x = torch.randn(3, 4, device=device)
    for scale in (2.0, 3.0, 2.0, 3.0, 2.0):
        model.scale = scale
        assert_close(g(x), model(x))
    assert g.counts.recorded == 2


def test_dropout_p(device: str) -> None:
    drop = nn.Dropout(0.9)
    g = graphed(drop)
    x = torch.ones(64, 64, device=device)
    g(x)
    drop.p = 0.0
    assert torch.equal(g(x), x)


@torch.no_grad()
def test_numbers_and_functions_of_closures_and_globals(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, inner, weight = 2.0, torch.sin, torch.randn(4, device=device)

    def f(x: Tensor) -> Tensor:
        return shifted(inner(x) * number * weight) * GAIN

    g = graphed(f)
    x = torch.randn(3, 4, device=device)
    recorded = 0

    def check() -> None:
        nonlocal recorded
        recorded += 1
        for _ in range(3):
            assert_close(g(x), f(x))
        assert g.counts.recorded == recorded

    check()
    number = 3.0
    check()
    inner = torch.cos
    check()
    monkeypatch.setitem(globals(), "GAIN", 7.0)
    check()
    monkeypatch.setitem(globals(), "shifted", lambda x: x - 1)
    check()
    number = 6.0 / 2.0  # equal, but another object
    for _ in range(2):
        assert_close(g(x), f(x))
    assert g.counts.recorded == recorded


@torch.no_grad()
def test_globals_that_a_modules_forward_reads(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Scaled().to(device)
    g = graphed(model)
    x = torch.randn(3, 4, device=device)
    g(x)
    monkeypatch.setitem(globals(), "GAIN", 7.0)
    assert_close(g(x), model(x))
    monkeypatch.setitem(globals(), "shifted", lambda x: x - 1)
    assert_close(g(x), model(x))


@torch.no_grad()
def test_objects_bound_methods_and_partials(device: str) -> None:
    class Gain:
        def __init__(self) -> None:
            self.by = 2.0

        def __call__(self, x: Tensor) -> Tensor:
            return x * self.by

        def also(self, x: Tensor) -> Tensor:
            return x - self.by

    gain = Gain()
    x = torch.randn(3, 4, device=device)
    scaled = functools.partial(torch.add, alpha=2)
    for target in (gain, gain.also):
        g = graphed(target)
        g(x)
        gain.by += 1
        assert_close(g(x), target(x))
    g = graphed(scaled)
    g(x, x)
    scaled.keywords["alpha"] = 3
    assert_close(g(x, x), scaled(x, x))


@torch.no_grad()
def test_what_is_not_read_or_is_the_callables_own_records_nothing_anew(device: str) -> None:
    model = Counting().to(device)
    g = graphed(model)
    x = torch.randn(3, 4, device=device)
    for step in range(5):
        model.unread = step
        g(x)
    assert g.counts.recorded == 1
    model.scale = 7.0
    assert_close(g(x), model(x))
    assert g.counts.recorded == 2


def test_zero_and_its_negative_and_types_differ() -> None:
    model = Scaled()
    watch = Watch(model)
    for value in (0.0, -0.0, 1, 1.0, True, float("nan")):
        model.scale = value
        assert not watch.unchanged(True)
        watch.renew()
        model.scale = type(value)(value)
        assert watch.unchanged(True)


def test_where_dicts_have_no_versions_values_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(facts, "_version", lambda _: object())
    model = Scaled()
    watch = Watch(model)
    assert watch.unchanged(True)
    model.scale = 3.0
    assert not watch.unchanged(True)
    watch.renew()
    assert watch.unchanged(True)
