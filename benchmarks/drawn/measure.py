"""Measuring drawn cases: every arm judged against the float64 oracle, then timed interleaved."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks import parallel
from fastlinear.calibration import measure as timed
from fastlinear.calibration import ways
from fastlinear.calibration.drawn import Drawn
from fastlinear.calibration.ways import COMPILE, EAGER, OURS, Arm
from fastlinear.core.compare import Verdict, judge, over_draws
from fastlinear.core.errors import FastlinearError
from fastlinear.core.settings import BATCH_INVARIANT
from fastlinear.core.timing import Samples, interleave
from fastlinear.dispatch.tune import input_sets, rotating, to_float64

Row = dict[str, Any]


def measure(
    drawn: Drawn,
    device: torch.device,
    *,
    env: Mapping[str, Any],
    skip: Sequence[str] = (),
    invariant: bool = False,
    rounds: int = 9,
    budget_s: float = 1.0,
) -> Row:
    """One case, as a row: each arm's times and what it took, and why the others have none.

    Args:
        device: where to run; of the case's type.
        env: what the row says about the machine.
        skip: peers to leave out, by name.
        invariant: whether to time the call whose rows do not depend on each other, too.
        rounds, budget_s: limits of the interleaved measurement.
    """
    p = drawn.problem
    train = p.needs_grad
    ways.wait()
    metric = "device" if p.captured else "wall"
    failed: dict[str, str] = {}
    with nullcontext() if train else torch.no_grad():
        arguments, dy = ways.inputs_of(drawn, device, 0)
        every = _arms(drawn, arguments, skip, invariant, failed)
        for arm in every:
            with suppress(Exception):  # told when it is judged
                ways.runner(arm, arguments, dy, train)()
        taking = _sound(drawn, device, arguments, dy, every, failed)
        more = range(1, input_sets(p, (*arguments[:3], dy)))
        sets = [(arguments, dy), *(ways.inputs_of(drawn, device, turn) for turn in more)]
        runs = {}
        for arm in taking:
            each = [(ways.runner(arm, *one, train),) for one in sets]
            for (run,) in each:
                run()
            runs[arm.name] = rotating(lambda run: run(), each)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        with timed.exclusive(), timed.undisturbed():
            samples = interleave(
                runs, device=device, metric=metric, rounds=rounds, budget_s=budget_s
            )
    asked = ways.posed(drawn, arguments)
    explained = ways.front_of(p.family).spec.choices(asked, None, (*arguments, None))
    return {
        "experiment": "drawn",
        "family": p.family,
        "seed": drawn.seed,
        "index": drawn.index,
        "problem": p.to_json(),
        "metric": metric,
        "input_sets": len(sets),
        "arms": {arm.name: _timed(arm, samples[arm.name]) for arm in taking},
        "failed": failed,
        "explain": [f"{c.problem.piece}: {c.backend.name} ({c.reason})" for c in explained],
        "env": dict(env),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _timed(arm: Arm, samples: Samples) -> dict[str, Any]:
    return {
        "took": dict(arm.took),
        "us": round(samples.median_us, 3),
        "samples_us": [round(us, 3) for us in samples.us],
    }


def _sound(
    drawn: Drawn,
    device: torch.device,
    arguments: Any,
    dy: Any,
    every: Sequence[Arm],
    failed: dict[str, str],
) -> list[Arm]:
    """The arms that run and are right; ``failed`` gets why the others take no part."""
    train = drawn.problem.needs_grad
    reference = Arm(EAGER, next(ways.peers(drawn, arguments, (COMPILE,))).call, {})
    expected = _expected(reference, arguments, dy, train)
    first: dict[str, list[Verdict]] = {}
    for arm in every:
        try:
            run = ways.runner(arm, arguments, dy, train)
            for _ in range(3):  # recorded at the second call of a kind
                found = _flat(run())
            first[arm.name] = _verdicts(found, expected)
        except Exception as error:
            if arm.name in (OURS, EAGER):
                raise
            failed[arm.name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    by_name = {arm.name: arm for arm in every}

    def again(draw: int, names: Sequence[str]) -> Mapping[str, list[Verdict]]:
        given = ways.inputs_of(drawn, device, draw)
        expected = _expected(reference, *given, train)
        found = {}
        for name in names:
            try:
                run = ways.runner(by_name[name], *given, train)
                found[name] = _verdicts(_flat(run()), expected)
            except Exception as error:
                if name in (OURS, EAGER):
                    raise
                failed[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        return found

    for name, verdicts in over_draws(first, again).items():
        if wrong := [v for v in verdicts if not v.passed and not v.unproven]:
            failed[name] = f"less accurate than allowed: {wrong[0]}"
    return [arm for arm in every if arm.name not in failed]


def _arms(
    drawn: Drawn, arguments: Any, skip: Sequence[str], invariant: bool, failed: dict[str, str]
) -> list[Arm]:
    every = [*ways.ours(drawn, arguments), *ways.peers(drawn, arguments, skip)]
    if invariant:
        try:
            every.append(ways.batch_invariant(drawn, arguments))
        except FastlinearError as error:
            failed[BATCH_INVARIANT] = f"{type(error).__name__}: {str(error).strip()[:200]}"
    return every


def _expected(reference: Arm, arguments: Any, dy: Any, train: bool) -> list[tuple[Tensor, Tensor]]:
    """PyTorch's results and the oracle's."""
    doubled = tuple(to_float64(a) for a in arguments), to_float64(dy)
    oracle = _flat(ways.runner(reference, *doubled, train)())
    theirs = _flat(ways.runner(reference, arguments, dy, train)())
    return list(zip(theirs, oracle, strict=True))


def _verdicts(found: list[Tensor], expected: list[tuple[Tensor, Tensor]]) -> list[Verdict]:
    each = enumerate(zip(found, expected, strict=True))
    return [judge(f"result {i}", mine, *pair) for i, (mine, pair) in each]


def _flat(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result.detach()]
    return [t for item in result if item is not None for t in _flat(item)]


def measured(
    cases: Sequence[Drawn],
    device: torch.device,
    *,
    most_seconds: float | None = None,
    jobs: int = 1,
    **how: Any,
) -> Iterator[tuple[Drawn, Row | None, str]]:
    """Each case, its row, or why it has none.

    Args:
        most_seconds: begin no case after this many; the others do not come.
        jobs: processes that prepare cases side by side, on all GPUs; then in no order.
        how: what ``measure`` takes besides.
    """
    if jobs > 1:
        end = float("inf") if most_seconds is None else time.time() + most_seconds
        one, tasks = partial(measure, **how), partial(iter, cases)
        yield from parallel.measured(one, tasks, device=device.type, jobs=jobs, end=end)
        return
    begin = time.monotonic()
    for drawn in cases:
        if most_seconds is not None and time.monotonic() - begin > most_seconds:
            return
        row, why = None, ""
        try:
            row = measure(drawn, device, **how)
        except Exception as error:  # noqa: BLE001 - the other cases go on
            why = f"{type(error).__name__}: {str(error).strip()[:300]}"
        yield drawn, row, why
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
