"""Whether a rewritten model still computes what the model computed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.suite.work import SuiteWork
from fastlinear.core.compare import Verdict
from fastlinear.profile.state import preserved
from fastlinear.rewrite import Result
from fastlinear.rewrite.verify.inputs import Call, draw
from fastlinear.rewrite.verify.model import Judge
from fastlinear.rewrite.verify.oracle import Oracle, make_oracle
from fastlinear.rewrite.verify.running import (
    Ran,
    Runner,
    draws_random_numbers,
    run_once,
    tensors_of,
)
from fastlinear.rewrite.verify.verdicts import compare_all, pool

_OUTPUT = "output"
_DRAWS = 8


@dataclass(frozen=True)
class Before:
    """What the model gave before anything was done to it.

    Attributes:
        runner, call: how it is run, on what.
        ran: its results in its own dtype.
        oracle, exact: what both are judged against, and its results.
        random: whether a run draws random numbers.
        state: copies of its parameters and buffers.
    """

    runner: Runner
    call: Call
    ran: Ran
    oracle: Oracle
    exact: dict[str, Tensor]
    random: bool
    state: dict[str, Tensor]


def before(work: SuiteWork, device: torch.device) -> Before:
    """Run the model as it is. Raises whatever the model raises."""
    mode = "train" if work.train else "inference"
    runner = Runner(mode, None, device, work.case.seed, "bench models --suite")
    call = Call(work.args, dict(work.inputs))
    state = {name: t.detach().clone() for name, t in work.model.state_dict().items()}
    with preserved(work.model, mode):
        ran = run_once(work.model, call, runner)
        oracle, exact = make_oracle(work.model, runner, call, ran)
        if exact is None:
            exact = oracle.run_like(ran, work.model, call, runner.results)
        random = draws_random_numbers(ran, runner)
    return Before(runner, call, ran, oracle, exact, random, state)


def rewritten(known: Before, model: nn.Module, result: Result, seconds: float) -> list[Verdict]:
    """Verdicts on outputs and gradients of a rewritten model, and on its parameters and buffers,
    which a rewrite leaves as they were. The rewrite is on before and after.

    Args:
        known: what the model gave before.
        model: the rewritten copy.
        result: what ``optimize_`` gave for it.
        seconds: for further draws of inputs.
    """
    found = [_same(known.state, model.state_dict())]
    swaps = result._swaps
    swaps.off()
    try:
        with preserved(model, known.runner.mode):
            judge = Judge(
                model,
                known.runner,
                known.call,
                draws=2,
                oracle=known.oracle,
                seconds=seconds,
                ran=known.ran,
                exact=known.exact,
            )
            found += judge.verdicts(swaps)
    finally:
        swaps.on()
    return found


def outputs(known: Before, plain: nn.Module, model: Callable[..., Any]) -> list[Verdict]:
    """Verdicts on the outputs of a model that is compiled or replayed; none where a run draws
    random numbers, which it draws otherwise. What fails on the given inputs is judged over
    several draws of them, as one result.

    Args:
        known: what the model gave before.
        plain: the model itself.
        model: what is called in its place.
    """
    if known.random:
        return []
    found = {n: [v] for n, v in _outputs(known, model, known.call, known.ran.results).items()}
    if all(v.passed for (v,) in found.values()):
        return [v for (v,) in found.values()]
    for index in range(1, _DRAWS):
        call = draw(known.call, index, known.runner.seed)
        with preserved(plain, known.runner.mode):
            theirs = known.runner.results(plain, call)
            exact = known.oracle.run(plain, call, known.runner.results)
        for name, verdict in _outputs(known, model, call, theirs, exact).items():
            found[name].append(verdict)
    return [pool(name, each, False) for name, each in found.items()]


def _outputs(
    known: Before,
    model: Callable[..., Any],
    call: Call,
    theirs: Mapping[str, Tensor],
    exact: dict[str, Tensor] | None = None,
) -> dict[str, Verdict]:
    with torch.set_grad_enabled(known.runner.mode == "train"):
        y = model(*call.args, **call.kwargs)
    ours = {f"{_OUTPUT}[{i}]": t.clone() for i, t in enumerate(tensors_of(y))}
    theirs = {n: t for n, t in theirs.items() if n.startswith(_OUTPUT)}
    return compare_all(ours, theirs, known.exact if exact is None else exact)


def _same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> Verdict:
    """Whether parameters and buffers are bit for bit as they were."""
    same = first.keys() == second.keys()
    same = same and all(_alike(t, second[name]) for name, t in first.items())
    return Verdict("parameters and buffers", 0.0 if same else math.inf, 0.0, 0.0)


def _alike(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return bool(((a == b) | ((a != a) & (b != b))).all())
