"""Tuning goes on without a backend that breaks, and says why."""

from __future__ import annotations

import sys
import time
import types
from dataclasses import replace
from typing import Any

import pytest
import torch

from fastlinear.core.errors import NotYetError
from fastlinear.dispatch import backend as registry
from fastlinear.dispatch import tune as tuning
from fastlinear.dispatch.tune import tune
from fastlinear.families.linear import reference
from fastlinear.families.linear.problem import problem


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("broken", OSError("no such kernel")),
        ("eager", OSError("no such kernel")),
        ("broken", NotYetError()),  # without it, no decision is to stand
    ],
)
def test_a_backend_that_raises_is_rejected_with_its_words(
    name: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise error

    fake = types.ModuleType("fastlinear_broken")
    fake.forward = broken  # type: ignore[attr-defined]
    fake.reference = reference.forward  # type: ignore[attr-defined]
    own = f"fastlinear_{name}_{type(error).__name__}"  # what was loaded is remembered
    monkeypatch.setitem(sys.modules, own, fake)
    targets = {"broken": f"{own}:reference", "eager": f"{own}:reference"}
    targets[name] = f"{own}:forward"
    backends = tuple(
        registry.Backend("linear_act", "forward", n, t, lambda _: None) for n, t in targets.items()
    )
    fam = replace(registry.family("linear_act"), backends=backends)
    monkeypatch.setitem(registry._FAMILIES, "linear_act", fam)
    p = problem("forward", 4, 8, 8, dtype="float32", device="cpu", precision="highest")
    # without PyTorch's own path there is nothing to compare with
    if name == "eager" or isinstance(error, NotYetError):
        with pytest.raises(type(error)):
            tune(p, rounds=5, save=False)
        return
    tuned = tune(p, rounds=5, save=False)
    assert tuned.best == "eager"
    assert tuned.rejected == {"broken": "raised OSError: no such kernel"}


@pytest.mark.parametrize("always", [False, True])
def test_an_unlucky_draw_rejects_nothing(always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend over the limit on the first draw of inputs alone, or on all."""
    first_x: list[torch.Tensor] = []

    def rough(x: torch.Tensor, *rest: Any) -> Any:
        first_x.append(x)
        y, pre = reference.forward(x, *rest)
        return (y * (1 + 6e-7) if always or torch.equal(x, first_x[0]) else y), pre

    module = f"fastlinear_rough_{always}"  # what a backend loads is kept
    fake = types.ModuleType(module)
    fake.forward = rough  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module, fake)
    known = registry.family("linear_act")
    eager = next(b for b in known.backends if (b.piece, b.name) == ("forward", "eager"))
    mine = registry.Backend("linear_act", "forward", "rough", f"{module}:forward", _serves)
    fam = replace(known, backends=(eager, mine))
    monkeypatch.setitem(registry._FAMILIES, "linear_act", fam)
    p = problem("forward", 4, 8, 8, dtype="float32", device="cpu", precision="highest")
    tuned = tune(p, rounds=5, save=False)
    assert set(tuned.samples) == {"eager"} | (set() if always else {"rough"})
    assert set(tuned.rejected) == ({"rough"} if always else set())


def _serves(_: Any) -> None:
    return None


def test_a_family_says_what_its_callers_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """The function is verified; the way of the callers is what the clock sees."""
    timed: list[str] = []

    def way(backend: registry.Backend, _: Any) -> Any:
        if backend.name != "twin":
            return None

        def call(*inputs: Any) -> Any:
            timed.append(backend.name)
            time.sleep(0.002)
            return reference.forward(*inputs)

        return call

    target = "fastlinear.families.linear.reference:forward"
    backends = tuple(
        registry.Backend("linear_act", "forward", n, target, lambda _: None)
        for n in ("eager", "twin")
    )
    fam = replace(registry.family("linear_act"), backends=backends, timed=way)
    monkeypatch.setitem(registry._FAMILIES, "linear_act", fam)
    p = problem("forward", 4, 8, 8, dtype="float32", device="cpu", precision="highest")
    tuned = tune(p, rounds=5, save=False)
    assert timed
    assert tuned.best == "eager"
    assert tuned.samples["twin"].median_us > 2000 > tuned.samples["eager"].median_us


@pytest.mark.parametrize(("l2_bytes", "sets"), [(1 << 20, 13), (1 << 30, 64)])
def test_a_cold_family_is_measured_beyond_the_l2_cache(
    l2_bytes: int, sets: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirteen inputs of 160 KiB exceed 1 MiB twice; 64 sets are the most."""
    p = problem("forward", 64, 256, 256, dtype="bfloat16", device="cuda", bias=False)
    layers = registry.family("linear_act")
    inputs = layers.make_inputs(p, torch.device("cpu"), 0)
    facts = types.SimpleNamespace(l2_bytes=l2_bytes)
    monkeypatch.setattr(tuning, "device_facts", lambda _: facts)
    assert tuning.input_sets(p, inputs) == sets
    monkeypatch.setitem(registry._FAMILIES, "linear_act", replace(layers, cold=False))
    assert tuning.input_sets(p, inputs) == 1


def test_layers_are_cold_and_whole_small_models_are_warm() -> None:
    assert registry.family("linear_act").cold
    assert not registry.family("mlp").cold


def test_pieces_of_a_training_step_are_timed_on_the_device() -> None:
    """On a GPU, where a tape launches them: Python's part of a backend's function is not theirs."""
    for device, grad, piece, expected in (
        ("cuda", True, "backward", "device"),
        ("cuda", True, "forward", "device"),
        ("cuda", True, "step", "wall"),
        ("cuda", False, "forward", "wall"),
        ("cpu", True, "backward", "wall"),
    ):
        p = problem(piece, 8, 8, 8, dtype="float32", device=device, needs_grad=grad)
        assert tuning.metric_of(p) == expected, p
        assert tuning.metric_of(replace(p, captured=True)) == "device"
