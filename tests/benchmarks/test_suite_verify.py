"""What the suite says of a rewritten model's results: outputs, gradients, parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from benchmarks.suite import verify
from benchmarks.suite.work import case_of, make_work
from fastlinear.core.settings import Config
from fastlinear.rewrite import optimize_
from tests.benchmarks.suite_families import CPU, SMALL, set_ceilings


@pytest.fixture
def known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    set_ceilings(monkeypatch)


@pytest.mark.usefixtures("known_ceilings")
@pytest.mark.parametrize("harm", ["output", "weights"])
def test_wrong_results_are_seen(harm: str) -> None:
    work = make_work(SMALL, case_of(SMALL, "cpu", "float32", "train", 0), CPU, 0.5)
    known = verify.before(work, CPU)
    model = copy.deepcopy(work.model)
    result = optimize_(model, work.given(), config=Config(mode="train", time_budget_s=0.5))

    def wrong() -> list[str]:
        verdicts = verify.rewritten(known, model, result, 1.0)
        return [v.name for v in verdicts if not v.passed]

    assert wrong() == []
    if harm == "weights":
        with torch.no_grad():
            next(model.parameters())[0, 0].add_(1e-3)
        assert "parameters and buffers" in wrong()
        return
    layer = model[2]
    swaps = result._swaps
    calls: list[str] = []
    plain, switched = layer.forward, {"on": swaps.on, "off": swaps.off}

    def on() -> None:
        calls.append("on")
        switched["on"]()
        layer.forward = lambda x: plain(x) * 1.0001

    def off() -> None:
        calls.append("off")
        layer.__dict__.pop("forward", None)
        switched["off"]()

    swaps.on, swaps.off = on, off  # type: ignore[method-assign]
    assert any(name.startswith("output") for name in wrong())
    assert (calls[0], calls[-1]) == ("off", "on")  # the model as it was, and at last as it is kept
    assert [v.passed for v in verify.outputs(known, work.model, work.model)] == [True]
    off_by = [v.passed for v in verify.outputs(known, work.model, lambda x: work.model(x) * 1.0001)]
    assert off_by == [False]


def test_what_fails_by_chance_is_judged_over_several_draws() -> None:
    work = make_work(SMALL, case_of(SMALL, "cpu", "float32", "inference", 0), CPU, 0.5)
    known = verify.before(work, CPU)

    def unlucky(x: Tensor) -> Tensor:
        y = work.model(x)
        return y * (1.0 + 5e-7) if torch.equal(x, work.args[0]) else y

    (once,) = verify._outputs(known, unlucky, known.call, known.ran.results).values()
    (pooled,) = verify.outputs(known, work.model, unlucky)
    assert once.error > once.limit > pooled.error * 0.99
    assert pooled.error < once.error
