"""A model that raises in a later run: the error is ours, says where, and the model is as it was."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fastlinear as fl
from fastlinear.core.compare import Verdict
from fastlinear.core.errors import FastlinearError, InputError
from fastlinear.core.settings import Config
from fastlinear.rewrite import apply_, optimize_
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify.oracle import Oracle
from tests.rewrite.rewrite_models import snapshot

pytestmark = [
    pytest.mark.usefixtures("fast"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
X = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
TRAIN = Config(mode="train", draws=2, optimizer_steps=2)
LATER = "expected Counted to run on the same inputs as often as it is called; received Full: 1 GB, "


class Full(RuntimeError):
    """What the model raises."""


class Counter:
    """Raises at its nth call; a module's attribute would be put back between runs."""

    def __init__(self, last: int = 1 << 30) -> None:
        self.calls, self.last = 0, last

    def __call__(self) -> None:
        self.calls += 1
        if self.calls >= self.last:
            raise Full("1\nGB")


class Counted(nn.Module):
    def __init__(self, counter: Any = lambda: None) -> None:
        super().__init__()
        self.fc, self.act, self.head = nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)
        self.counter = counter

    def forward(self, x: Tensor) -> Tensor:
        self.counter()
        return self.head(self.act(self.fc(x)))


class CountedGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counter: Counter) -> Tensor:
        ctx.counter = counter
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.counter()
        return grads[0], None


def errors(run: Any) -> Iterator[FastlinearError]:
    """What ``run(model)`` raises as the model raises at its first call, its second, and so on."""
    for last in range(1, 100):
        counter = Counter(last)
        model = Counted(counter)
        before = snapshot(model)
        raised: FastlinearError | None = None
        try:
            run(model)
        except FastlinearError as error:
            raised = error
        if raised is None:
            if counter.calls < last:
                return
            continue  # a rewrite that raises is an outcome
        assert isinstance(raised.__cause__, Full)
        assert snapshot(model) == before
        yield raised
    raise AssertionError("it runs without end")


def stages(found: list[FastlinearError]) -> set[str]:
    """What the later runs were for."""
    texts = [str(e) for e in found if LATER in str(e)]
    return {re.split(re.escape(LATER), text)[1].split(". ")[0] for text in texts}


def test_every_run_of_optimize_may_raise() -> None:
    found = list(errors(lambda model: optimize_(model, X, config=Config(draws=2))))
    assert {type(e) for e in found} == {InputError}
    assert all(LATER in str(e) for e in found[2:])
    assert stages(found) == {
        "in the run that shows which layers are called",
        "while a step was timed",
        "under the profiler",
        "in the run that shows what its layers are given",
        "where the model itself ran to be compared with",
        "while it was timed",
        "while it was timed rewritten",
    }
    assert "put back as it was: look for what it keeps from run to run" in str(found[-1])


def test_every_run_of_apply_may_raise() -> None:
    result = optimize_(Counted(Counter()), X, config=Config(draws=2))
    plan = result.plan.to_json()
    found = list(errors(lambda model: apply_(model, plan, X)))
    ours = [str(e) for e in found if not str(e).startswith("fastlinear.profile: ")]
    assert all(text.startswith("apply_: ") for text in ours)
    assert {"while it was timed", "while it was timed rewritten"} <= stages(found)


def test_every_run_of_profile_may_raise() -> None:
    found = list(errors(lambda model: fl.profile(model, X)))
    assert "inputs on which it raises Full: 1." in str(found[0])
    assert all(LATER in str(e) for e in found[1:])


@pytest.mark.parametrize("last", [2, 3, 10, 12])
@pytest.mark.parametrize("way", ["loss", "backward"])
def test_a_loss_and_a_backward_may_raise(way: str, last: int) -> None:
    counter = Counter(last)

    def loss(y: Tensor) -> Tensor:
        if way == "backward":
            return CountedGradient.apply(y, counter).square().sum()
        counter()
        return y.square().sum()

    model = Counted()
    before = snapshot(model)
    with pytest.raises(InputError) as caught:
        optimize_(model, X, config=TRAIN, loss_fn=loss)
    assert isinstance(caught.value.__cause__, Full)
    wanted = {"loss": "a loss_fn that takes the output", "backward": "that can be differentiated"}
    assert (wanted[way] if last == 2 else LATER) in str(caught.value)
    assert snapshot(model) == before


def test_the_oracle_may_raise_when_it_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run_like = Oracle.run_like

    def second(self: Oracle, *args: Any, **kwargs: Any) -> Any:
        if len(args) > 4:  # on the rewritten model's own side of the kinks
            raise Full("1 GB")
        return run_like(self, *args, **kwargs)

    failed = {"output[0]": Verdict("output[0]", 1.0, 0.0, 0.5)}
    monkeypatch.setattr(Oracle, "run_like", second)
    monkeypatch.setattr(verify, "compare_all", lambda *_, **__: failed)
    with pytest.raises(InputError, match="where the float64 model ran again"):
        optimize_(Counted(), X, config=TRAIN)


def test_memory_that_runs_out_says_so_itself() -> None:
    class Hungry(Counter):
        def __call__(self) -> None:
            try:
                super().__call__()
            except Full:
                raise torch.OutOfMemoryError("CUDA out of memory") from None

    for last in (2, 5):  # what has to run of the model as it is; trials end with a note
        model = Counted(Hungry(last))
        before = snapshot(model)
        with pytest.raises(torch.OutOfMemoryError):
            optimize_(model, X)
        assert snapshot(model) == before
