"""A signal at any instant leaves the process as it was; what must not be cut in two is not."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import fastlinear as fl
from fastlinear.core import interrupts
from fastlinear.core.interrupts import hold, restored, whole
from fastlinear.core.timing import interleave
from fastlinear.dispatch import cache
from fastlinear.dispatch.tune import tune
from fastlinear.families.linear.problem import problem
from fastlinear.profile.graph import Observed, trace
from fastlinear.profile.state import preserved
from tests.core.interrupting import SIGNAL, Instants, Stopped, fingerprint, stop

pytestmark = pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals reach it alone"
)


@pytest.fixture(autouse=True)
def _handler() -> Iterator[None]:
    before = signal.signal(SIGNAL, stop)
    yield
    signal.signal(SIGNAL, before)
    assert not interrupts._replaced
    assert not interrupts._open
    assert not interrupts._waiting


def send() -> None:
    signal.raise_signal(SIGNAL)


# --------------------------------------------------------------------------------------------
# The parts


def test_what_is_held_ends_first() -> None:
    done = []

    @restored
    def work() -> None:
        with hold(), hold():
            send()
            done.append(1)
        done.append(2)

    with pytest.raises(Stopped):
        work()
    assert done == [1]

    def alone() -> None:
        with hold():
            send()
            done.append(3)

    with pytest.raises(Stopped):
        alone()
    assert done == [1, 3]


def test_a_signal_that_was_caught_inside_hides_no_later_one() -> None:
    """A finalizer swallows what a handler raises in it, and a model may catch it."""
    grad = torch.is_grad_enabled()

    @restored
    def work() -> str:
        torch.set_grad_enabled(not grad)
        with contextlib.suppress(Stopped):
            send()
        send()
        return "done"

    with pytest.raises(Stopped):
        work()
    assert torch.is_grad_enabled() == grad

    @restored
    def goes_on() -> str:
        with contextlib.suppress(Stopped):
            send()
        return "done"

    assert goes_on() == "done"
    assert not interrupts._interrupted


def test_what_is_put_back_is_not_interrupted_again() -> None:
    done = []

    @restored
    def work() -> None:
        try:
            send()
        finally:
            send()
            done.append(1)

    with pytest.raises(Stopped):
        work()
    assert done == [1]


def test_a_hold_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupts, "LONGEST_S", 0.0)
    done = []

    def work() -> None:
        with hold():
            time.sleep(0.001)
            send()
            done.append(1)

    with pytest.raises(Stopped):
        work()
    assert not done


def test_handlers_of_others_are_called_as_before() -> None:
    seen: list[int] = []
    signal.signal(SIGNAL, lambda number, _: seen.append(number))

    @restored
    def work() -> int:
        send()
        with hold():
            send()
            assert len(seen) == 1
        signal.signal(SIGNAL, stop)
        return 7

    assert work() == 7
    assert seen == [SIGNAL] * 2
    assert signal.getsignal(SIGNAL) is stop, "one that the function sets stays"


def test_a_signal_as_the_function_ends_undoes_it() -> None:
    """Its result would be lost, and with it the way back."""
    model = nn.Linear(2, 2)

    @restored
    def work(model: nn.Module) -> None:
        model.extra = 1
        interrupts._waiting.append(SIGNAL)  # as if it came in the last step

    with pytest.raises(Stopped):
        work(model)
    assert not hasattr(model, "extra")


@whole
def _changed() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def test_everything_is_put_back_after_an_error_too() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    (weight, _) = model.parameters()
    weight.grad = grad = torch.ones(2, 2)
    torch.use_deterministic_algorithms(False)  # imports what adds filters of warnings
    before = fingerprint(model)

    @restored
    def work(model: nn.Module) -> None:
        model.eval()
        model.register_forward_hook(lambda *_: None, always_call=True, with_kwargs=True)
        weight.grad = None
        weight.requires_grad_(False)
        torch.manual_seed(3)
        random.seed(3)
        gc.disable()
        os.environ["FASTLINEAR_SOMETHING"] = "1"
        torch._C._set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.set_default_dtype(torch.float64)
        torch.autocast("cpu").__enter__()
        torch.device("meta").__enter__()
        warnings.catch_warnings().__enter__()
        raise ValueError

    with pytest.raises(ValueError):
        work(model)
    assert fingerprint(model) == before
    assert weight.grad is grad


def test_other_threads_are_put_back_as_well() -> None:
    model, found = nn.Linear(2, 2), []

    @restored
    def work(model: nn.Module) -> None:
        with hold():
            model.extra = 1
        raise ValueError

    def run() -> None:
        with pytest.raises(ValueError):
            work(model)
        found.append(hasattr(model, "extra"))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [False]


# --------------------------------------------------------------------------------------------
# Every instant


class Block(nn.Module):
    """Two layers whose parent is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 4)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.drop(torch.relu(self.first(x))))


MODEL, X = nn.Sequential(Block()), torch.ones(4, 8)


@restored
def _pieces(model: nn.Module) -> None:
    """What changes state, a millisecond each."""
    with preserved(model, "train"), cache.in_memory(), _changed(), torch.no_grad():
        torch.manual_seed(1)
        model(X)
        with torch.autocast("cpu"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trace(model[0], Observed.of((X,), {}))  # type: ignore[index]


def _timing() -> None:
    interleave({name: lambda: time.sleep(1e-3) for name in "ab"}, rounds=5)


def _tune() -> None:
    p = problem("forward", 4, 8, 8, dtype="float32", device="cpu", activation="relu")
    tune(p, rounds=5)


def _profile() -> None:
    fl.profile(MODEL, X, mode="train", steps=1)


CONFIG = fl.Config(time_budget_s=0.05, draws=1, optimizer_steps=1, mode="train")


def _optimize() -> None:
    fl.optimize_(MODEL, X, config=CONFIG).revert()


def _apply(path: Path) -> None:
    fl.apply_(MODEL, path).revert()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.parametrize(
    ("what", "least", "most", "seconds"),
    [
        pytest.param("pieces", 30, 400, 5.0, id="pieces"),
        pytest.param("timing", 10, 60, 3.0, id="timing"),
        pytest.param("tune", 5, 30, 2.0, id="tune"),
        pytest.param("profile", 3, 30, 4.0, id="profile"),
        pytest.param("optimize", 3, 30, 5.0, id="optimize"),
        pytest.param("apply", 3, 20, 3.0, id="apply"),
    ],
)
def test_at_random_instants(
    what: str, least: int, most: int, seconds: float, tmp_path: Path
) -> None:
    work: Callable[[], object] = {
        "pieces": lambda: _pieces(MODEL),
        "timing": _timing,
        "tune": _tune,
        "profile": _profile,
        "optimize": _optimize,
        "apply": lambda: _apply(tmp_path / "plan.json"),
    }[what]
    if what == "apply":
        result = fl.optimize_(MODEL, X, config=CONFIG)
        result.save(tmp_path / "plan.json")
        result.revert()
    opcodes = what in ("pieces", "timing")
    work()  # what is imported and compiled once
    dry = Instants(opcodes=opcodes)
    assert not dry.run(work)
    draw = random.Random(what)
    stopped, until = 0, time.monotonic() + seconds
    for i in range(most):
        if i >= least and time.monotonic() > until:
            break
        before = fingerprint(MODEL)
        instants = Instants(draw.randrange(1, dry.seen), opcodes)
        if instants.run(work):
            stopped += 1
            after = fingerprint(MODEL)
            differs = [name for name in before if before[name] != after[name]]
            assert not differs, f"{differs} after a signal at {instants.where}"
    assert stopped >= least // 2
