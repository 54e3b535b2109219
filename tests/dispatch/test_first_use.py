"""Tuning at first use: what is measured when, and what is left alone."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import fastlinear as fl
from fastlinear.core import settings
from fastlinear.core.errors import CacheWarning, InputError
from fastlinear.core.problem import Problem
from fastlinear.dispatch import cache, first_use
from fastlinear.dispatch.backend import Backend
from fastlinear.dispatch.steps import STEP
from fastlinear.families.linear.problem import BACKWARD_PIECES

tune_module = importlib.import_module("fastlinear.dispatch.tune")


@pytest.fixture
def tuned(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Problem]]:
    """The Problems that are tuned, one after the other; tuning is allowed and measures little."""
    found: list[Problem] = []

    def tune(p: Problem, **how: Any) -> Any:
        found.append(p)
        return tune_module.tune(p, **how | {"budget_s": 0.02})

    monkeypatch.setattr(first_use, "tune", tune)
    monkeypatch.setattr(settings, "_first_use_s", None)
    fl.tune_at_first_use(seconds=30.0)
    yield found
    fl.tune_at_first_use(False)


def layer(m: int = 16, k: int = 48, n: int = 24, *, grad: bool = False) -> tuple[torch.Tensor, ...]:
    x, w, b = torch.randn(m, k), torch.randn(n, k), torch.randn(n)
    return x, w.requires_grad_(grad), b


def test_nothing_is_measured_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_first_use_s", None)
    monkeypatch.setattr(first_use, "tune", lambda *_, **__: pytest.fail("it was not asked for"))
    fl.linear_act(*layer(17), activation="relu")
    fl.tune_at_first_use()
    fl.tune_at_first_use(False)
    fl.linear_act(*layer(17), activation="relu")


def test_the_first_call_measures_and_later_ones_take_what_was_found(tuned: list[Problem]) -> None:
    x, w, b = layer()
    expected = torch.relu(torch.nn.functional.linear(x, w, b))
    for _ in range(3):
        torch.testing.assert_close(fl.linear_act(x, w, b, activation="relu"), expected)
    (p,) = tuned
    assert (p.family, p.piece, p.dim("M")) == ("linear_act", "forward", 16)
    (choice,) = fl.explain(x, w, b, activation="relu").choices
    assert choice.source == "tuned" or "tuning took" in choice.reason


def test_what_is_in_the_cache_is_not_measured_again(tuned: list[Problem]) -> None:
    fl.linear_act(*layer(), activation="silu")
    fl.tune_at_first_use(seconds=30.0)  # as in another process
    fl.linear_act(*layer(), activation="silu")
    assert len(tuned) == 1


def test_a_training_call_measures_each_of_its_choices(tuned: list[Problem]) -> None:
    x, w, b = layer(grad=True)
    fl.linear_act(x, w, b, activation="tanh").sum().backward()
    assert [p.piece for p in tuned] == ["forward", *BACKWARD_PIECES, STEP]
    assert w.grad is not None


def test_numbers_of_random_generators_stay(tuned: list[Problem]) -> None:
    arguments = layer()
    torch.manual_seed(0)
    before = torch.random.get_rng_state()
    fl.linear_act(*arguments, activation="relu")
    assert tuned
    assert torch.equal(torch.random.get_rng_state(), before)


def test_forced_backends_empty_calls_and_compiled_code_are_left_alone(
    tuned: list[Problem],
) -> None:
    x, w, b = layer()
    fl.linear_act(x, w, b, activation="relu", backend="eager")
    fl.linear_act(x[:0], w, b, activation="relu")
    compiled = torch.compile(
        lambda t: fl.linear_act(t, w, b, activation="relu"), fullgraph=True, backend="eager"
    )
    compiled(x)
    assert tuned == []


def test_captured_calls_are_left_alone(tuned: list[Problem]) -> None:
    p = Problem("linear_act", "forward", (("M", 4),), "float32", "cuda", captured=True)
    first_use.measure(p)
    assert tuned == []


def test_what_takes_too_long_is_left_to_the_prediction(tuned: list[Problem]) -> None:
    fl.tune_at_first_use(seconds=1e-9)
    fl.linear_act(*layer(), activation="relu")
    assert tuned == []


def test_a_failure_warns_and_the_call_goes_on(
    tuned: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(first_use, "tune", full)
    x, w, b = layer()
    with pytest.warns(CacheWarning, match=r"could not be tuned .*no room.*prediction stands"):
        y = fl.linear_act(x, w, b, activation="relu")
    torch.testing.assert_close(y, torch.relu(torch.nn.functional.linear(x, w, b)))
    assert tuned == []


@pytest.mark.parametrize(("said", "seconds"), [("", 0.0), ("0", 0.0), ("1.5", 1.5)])
def test_the_environment_says_it_from_outside(
    said: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_first_use_s", None)
    monkeypatch.setenv("FASTLINEAR_TUNE_AT_FIRST_USE", said)
    assert settings.first_use_s() == seconds
    monkeypatch.setattr(settings, "_first_use_s", 0.25)  # the program comes first
    assert settings.first_use_s() == 0.25


@pytest.mark.parametrize("said", ["yes", "-1", "nan", "inf"])
def test_what_the_environment_cannot_mean(said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_first_use_s", None)
    monkeypatch.setenv("FASTLINEAR_TUNE_AT_FIRST_USE", said)
    with pytest.raises(InputError, match=r"FASTLINEAR_TUNE_AT_FIRST_USE.*a number of seconds"):
        settings.first_use_s()


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "0.5", None])
def test_seconds_are_above_0(seconds: Any) -> None:
    with pytest.raises(InputError, match=r"tune_at_first_use.*above 0"):
        fl.tune_at_first_use(seconds=seconds)


@pytest.mark.parametrize("enabled", [0.5, 2, "no", None])
def test_seconds_are_not_given_as_enabled(enabled: Any) -> None:
    with pytest.raises(InputError, match=r"True or False.*seconds="):
        fl.tune_at_first_use(enabled)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_counts_nothing_of_it(reentrant: bool, tuned: list[Problem]) -> None:
    layer = fl.nn.Linear(24, 24, activation="silu")
    x = torch.randn(8, 24, requires_grad=True)
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (packed.append(t), t)[1], lambda t: t):
        checkpoint(layer, x, use_reentrant=reentrant).sum().backward()
    assert tuned
    assert len(packed) < 20
    assert x.grad is not None


def test_clearing_the_cache_makes_a_first_use_again(tuned: list[Problem]) -> None:
    arguments = layer()
    fl.linear_act(*arguments, activation="relu")
    cache.clear("cpu")
    fl.linear_act(*arguments, activation="relu")
    assert len(tuned) == 2


def test_while_a_library_compiles_nothing_is_decided(
    tuned: list[Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backend, "why_not_ready", lambda b, _: b.name == "gemm_cpp" or None)
    fl.linear_act(*layer(), activation="relu")
    assert tuned == []


def test_other_devices_are_left_alone(tuned: list[Problem]) -> None:
    x, w, b = (t.to("meta") for t in layer())
    assert fl.linear_act(x, w, b, activation="relu").is_meta
    assert tuned == []
