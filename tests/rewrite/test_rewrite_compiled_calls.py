"""Calls of compiled models: what cannot be compiled, who watches, what is returned.

Dynamo traces as it does for users; its graphs then run eagerly, which takes no C++ compiler.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fastlinear.rewrite import optimize_
from fastlinear.rewrite.evaluate import compiled
from fastlinear.rewrite.swap.compiled_forward import (
    REDUCE_OVERHEAD,
    CompiledForward,
    with_compiled,
)
from fastlinear.rewrite.swap.modules import SwapSet
from tests.rewrite.compiled_regions import COMPILE, X, region, torch_compile
from tests.rewrite.rewrite_models import Clock, mlp, run, snapshot

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("graphs_run_eagerly"),
]


class Watcher(torch.overrides.TorchFunctionMode):
    """Sees every function of torch."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return function(*args, **(kwargs or {}))


class Counting(nn.Module):
    """Dynamic: every call is another graph."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.calls = nn.Linear(16, 16), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.fc(x) + 0.0 * self.calls


class Breaking(nn.Module):
    """Which of two branches runs depends on values: dynamo breaks the graph, and goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h.relu() if h.detach().abs().sum() > 0 else h


def test_a_dynamic_model_is_refused(clock: Clock) -> None:
    clock({"after": 50.0})
    model = Counting().eval()
    result = optimize_(model, X, config=replace(COMPILE, families=()))
    assert (region(result).status, region(result).code) == ("refused", "dynamic")
    assert "forward" not in vars(model)


def test_graph_breaks_are_told(clock: Clock) -> None:
    clock({"after": 50.0})
    result = optimize_(Breaking().eval(), X, config=replace(COMPILE, families=()))
    assert region(result).status == "kept"
    assert "in 2 graphs (" in region(result).reason


def test_what_torch_cannot_compile_is_refused(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock({"after": 50.0})

    def fails(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no working C++ compiler\nwas found")

    monkeypatch.setattr(torch, "compile", fails)
    model = mlp().eval()
    before = snapshot(model)
    result = optimize_(model, X, config=replace(COMPILE, families=()))
    assert (region(result).status, region(result).code) == ("refused", "no_compile")
    assert "RuntimeError: no working C++ compiler was found" in region(result).reason
    assert snapshot(model) == before


def test_hooks_and_an_owners_compilation_are_respected() -> None:
    model = mlp()
    assert compiled.untouchable(model) is None
    handle = model.register_forward_hook(lambda *_: None)
    found = compiled.untouchable(model)
    assert found is not None
    assert found.status == "refused"
    handle.remove()
    whole = nn.Sequential(torch_compile(mlp(), backend="eager"))
    found = compiled.untouchable(whole)
    assert found is not None
    assert found.code == "already_compiled"


def test_copies_pickles_and_watchers(clock: Clock) -> None:
    clock({"after": 50.0})
    model = mlp().eval()
    plain = copy.deepcopy(model)
    optimize_(model, X, config=COMPILE)
    twin = copy.deepcopy(model)
    assert twin.__dict__["forward"].__self__ is twin
    with torch.no_grad():
        twin[0].weight.add_(1.0)
    assert not torch.equal(run(twin, X), run(model, X))
    torch.testing.assert_close(run(model, X), run(plain, X))
    loaded = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(run(loaded, X), run(plain, X))
    assert not isinstance(loaded.__dict__.get("forward"), CompiledForward)
    with Watcher():
        torch.testing.assert_close(run(model, X), run(plain, X))
    torch.testing.assert_close(torch_compile(model, backend="eager")(X), plain(X))


@pytest.mark.parametrize("everywhere", [False, True])
def test_a_default_device_is_no_watcher(
    clock: Clock, everywhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A default device is a function mode; what it compiles then, it runs later as well."""
    clock({"onednn": 50.0, "after": 50.0})
    model = mlp().eval()
    plain, graphs = copy.deepcopy(model), []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return lambda *given: [3 * y for y in graph(*given)]

    def optimized() -> Any:
        return optimize_(model, X, config=COMPILE)

    try:
        if everywhere:
            torch.set_default_device("cpu")
            result = optimized()
        else:
            with torch.device("cpu"):
                result = optimized()
        assert region(result).status == "kept", region(result)
        assert "in one graph" in region(result).reason
        monkeypatch.setattr(torch, "compile", lambda f, **_: torch_compile(f, backend=backend))
        model.__dict__["forward"].release()
        for _ in range(2):
            with torch.device("cpu"):
                torch.testing.assert_close(run(model, X), 3 * run(plain, X))
        assert len(graphs) == 1
        with Watcher():
            torch.testing.assert_close(run(model, X), run(plain, X))
        with torch.device("cpu"), Watcher(), torch.device("cpu"):
            torch.testing.assert_close(run(model, X), run(plain, X))
    finally:
        torch.set_default_device(None)


def times(k: int) -> Any:
    def hook(_: nn.Module, args: Any, y: Tensor) -> Tensor:
        return k * y

    return hook


@pytest.mark.parametrize("at", ["0", "1"])
def test_what_changes_inside_is_seen_by_what_was_compiled(
    at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dynamo's guards pass over hooks, and over the forward of a class."""

    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *given: [3 * y for y in graph(*given)]

    monkeypatch.setattr(torch, "compile", lambda f, **_: torch_compile(f, backend=backend))
    plain = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(), nn.Linear(16, 4))
    model = copy.deepcopy(plain)
    SwapSet(with_compiled([], model, "default")).on()

    def compiled_is(is_compiled: bool) -> None:
        torch.testing.assert_close(run(model, X), (3 if is_compiled else 1) * run(plain, X))

    compiled_is(True)
    handles = [m.get_submodule(at).register_forward_hook(times(2)) for m in (plain, model)]
    compiled_is(False)
    for handle in handles:
        handle.remove()
    compiled_is(True)
    hooked = copy.deepcopy(plain.get_submodule(at))
    hooked.register_forward_hook(times(2))
    before = [(m, m._modules[at]) for m in (plain, model)]
    for m, _ in before:
        m._modules[at] = hooked
    compiled_is(False)
    for m, layer in before:
        m._modules[at] = layer
    compiled_is(True)
    kind: Any = type(plain.get_submodule(at))
    own = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 2 * own(self, x))
    compiled_is(False)
    monkeypatch.setattr(kind, "forward", own)
    compiled_is(True)


def test_hooks_that_were_there_are_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        return lambda *given: [3 * y for y in graph(*given)]

    monkeypatch.setattr(torch, "compile", lambda f, **_: torch_compile(f, backend=backend))
    plain = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU())
    plain[0].register_forward_hook(times(2))
    model = copy.deepcopy(plain)
    SwapSet(with_compiled([], model, "default")).on()
    handles = [m[1].register_forward_hook(times(5)) for m in (plain, model)]
    torch.testing.assert_close(run(model, X), run(plain, X))
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(run(model, X), 3 * run(plain, X))
    for m in (plain, model):
        m[0]._forward_hooks.clear()
    torch.testing.assert_close(run(model, X), run(plain, X))


def test_what_a_replay_returns_is_the_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA graphs write over what they returned before: the next call must not change it."""
    held = torch.zeros(3)

    def replaying(method: Any, **options: Any) -> Any:
        assert options == {"dynamic": False, "mode": REDUCE_OVERHEAD}
        return lambda x: {"y": held.copy_(x), "n": 1}

    monkeypatch.setattr(torch, "compile", replaying)
    model = nn.Identity()
    swaps = SwapSet(with_compiled([], model, REDUCE_OVERHEAD))
    swaps.on()
    first = model(torch.ones(3))
    second = model(torch.full((3,), 2.0))
    assert first["n"] == 1
    assert first["y"].tolist() == [1.0, 1.0, 1.0]
    assert second["y"].tolist() == [2.0, 2.0, 2.0]
    swaps.off()


def test_dropout_draws_what_it_would_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's own random numbers are others than PyTorch's: nothing could be verified."""
    asked: list[dict[str, Any]] = []

    def compile_(method: Any, **options: Any) -> Any:
        asked.append(options)
        return method

    monkeypatch.setattr(torch, "compile", compile_)
    model = nn.Dropout(0.5)
    swaps = SwapSet(with_compiled([], model, "default"))
    swaps.on()
    model(torch.ones(4))
    assert asked == [{"dynamic": False, "options": {"fallback_random": True}}]
