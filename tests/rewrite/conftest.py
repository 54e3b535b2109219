"""Fixtures of the rewriter's tests: a clock that says what a test needs."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from fastlinear.core.cost import Ceilings
from fastlinear.core.timing import Ratio, Samples
from fastlinear.dispatch import cache, prices, tune
from fastlinear.profile import clock as profile_clock
from fastlinear.rewrite.evaluate import chains, findings, measure, site, try_graph
from fastlinear.rewrite.evaluate import graphs as choose_graph
from fastlinear.rewrite.evaluate import regions as choose_regions
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.session import Times
from tests.core.graph_tape import TapeRecorder
from tests.rewrite.compiled_regions import torch_compile
from tests.rewrite.rewrite_models import Clock, FindingTimes, on_cuda

_graphed = importlib.import_module("fastlinear.cuda_graphs.graphed")


@pytest.fixture(scope="module", autouse=True)
def _what_stays() -> None:
    """Each profile collects garbage: what the files before have loaded is passed by."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module")
def prices_of_one_processor() -> Iterator[None]:
    """Choices are those of a Zen 5 wherever the tests run."""
    own, known = prices.shipped, prices.of_device("amd-zen5")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prices, "shipped", lambda f: known if f.kind == "cpu" else own(f))
        cache.changed()
        yield
    cache.changed()


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring what the machine can do takes seconds and decides nothing here."""
    for module, name in ((profile_clock, "ceilings"), (findings, "measure_ceilings")):
        monkeypatch.setattr(module, name, lambda *_: Ceilings(1e11, 1e10))


@pytest.fixture
def times_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that a test gives to parts are told as they are, however short the step really is."""
    monkeypatch.setattr(findings, "of_the_step", lambda _, before, after, __: (before, after, ""))


@pytest.fixture
def finding_times(monkeypatch: pytest.MonkeyPatch) -> FindingTimes:
    """``finding_times(before, after)``: microseconds of a call that only a finding is measured
    for."""

    def set_times(before: Sequence[float], after: Sequence[float]) -> None:
        given = {"before": before, "after": after}
        samples = {n: Samples(n, tuple(us), "wall", 1, "clock") for n, us in given.items()}

        def measured(_: object, fusion: Fusion, __: int) -> Times:
            return findings.a_call(fusion, samples, fusion.calls.calls)

        monkeypatch.setattr(findings, "measured", measured)

    return set_times


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, times_as_given: None) -> Clock:
    """``clock({"after": 50.0})``: the named contenders take that many microseconds, others 100.
    ``"step"`` is the whole step with a chain, against 100 with its layers rewritten without it.

    Contenders still run, once each, so that whatever they raise is raised.
    """

    def set_times(times: dict[str, float]) -> None:
        def interleave(contenders: dict[str, Any], **_: Any) -> dict[str, Samples]:
            for run in contenders.values():
                run()
            return {
                n: Samples(n, (times.get(n, 100.0),) * 5, "wall", 1, "clock") for n in contenders
            }

        for module in (tune, measure, site, profile_clock):
            monkeypatch.setattr(module, "interleave", interleave)
        step = None if (us := times.get("step")) is None else Ratio(100.0 / us, *(100.0 / us,) * 2)
        monkeypatch.setattr(chains, "on_the_step", lambda *_: step)  # else a chain alone decides

    return set_times


@pytest.fixture
def fast(clock: Clock) -> None:
    """A machine on which oneDNN, and a step of its pieces, takes half of eager's time, at the site
    and end to end."""
    clock({"onednn": 50.0, "pieces": 50.0, "after": 50.0})


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs on a CPU, for models that count as launch-bound."""
    monkeypatch.setattr(_graphed, "CudaRecorder", TapeRecorder)
    why_not = choose_graph._why_not
    monkeypatch.setattr(choose_graph, "_why_not", lambda work, f, _: why_not(work, f, True))
    untouchable = try_graph.untouchable
    for module in (choose_graph, choose_regions):
        monkeypatch.setattr(
            module, "untouchable", lambda work, name: untouchable(on_cuda(work), name)
        )


@pytest.fixture
def graphs_run_eagerly(monkeypatch: pytest.MonkeyPatch) -> None:
    """``torch.compile`` traces as ever, and takes no C++ compiler."""
    torch._dynamo.reset()

    def instead(target: Any, *, dynamic: bool, **_: Any) -> Any:
        return torch_compile(target, dynamic=dynamic, backend="eager")

    monkeypatch.setattr(torch, "compile", instead)
