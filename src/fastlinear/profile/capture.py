"""Profile a model: run it, watch it, time it, attribute the time, diagnose."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as module_hooks

from fastlinear.core.environment import environment
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.inputs import normalize_inputs
from fastlinear.core.interrupts import restored
from fastlinear.core.precision import float32_precision
from fastlinear.core.progress import Progress, silent
from fastlinear.core.settings import MODES
from fastlinear.profile import clock, own_calls, unfollowed
from fastlinear.profile import diagnose as diagnosis
from fastlinear.profile.events import module_ranges
from fastlinear.profile.observe import Observation, observe
from fastlinear.profile.products import products_of
from fastlinear.profile.profiled import profiled, records_of
from fastlinear.profile.report import ProfileReport
from fastlinear.profile.servable import without_collectives
from fastlinear.profile.sites import find_sites
from fastlinear.profile.state import preserved
from fastlinear.profile.step import (
    FUNCTION,
    LossFn,
    Step,
    check_model,
    device_of,
    eager_modules,
    loss_of,
    private_copy,
    watched_modules,
)

__all__ = ["capture", "loss_of", "profile"]

_STAGES = 5


@restored
def profile(
    model: nn.Module,
    inputs: Any,
    mode: str = "inference",
    *,
    loss_fn: LossFn | None = None,
    steps: int = 3,
    progress: Progress = silent,
) -> ProfileReport:
    """What the profiler shows of a model: records, sites, and the findings made of these alone.

    ``fl.profile`` is this with the findings that take measuring of their own, and says what is
    raised; arguments and result are the same.
    """
    check_arguments(mode, steps)
    return capture(
        model, inputs, mode, loss_fn=loss_fn, steps=steps, progress=progress, samples=False
    )[0]


def check_arguments(mode: str, steps: int) -> None:
    """Raise InputError for a mode or a number of steps that there is none of."""
    if mode not in MODES:
        raise InputError(
            "fastlinear.profile",
            f"mode in {', '.join(MODES)}",
            repr(mode),
            "inference times the forward, train a step with its backward.",
        )
    if steps < 1:
        raise InputError(
            "fastlinear.profile",
            "steps of at least 1",
            f"{steps}",
            "Leave it out for the default.",
        )


def capture(
    model: nn.Module,
    inputs: Any,
    mode: str,
    *,
    loss_fn: LossFn | None,
    steps: int,
    progress: Progress,
    samples: bool,
) -> tuple[ProfileReport, Observation]:
    """``profile``, together with what it saw; ``samples`` keeps copies of the sites' inputs."""
    check_model(model)
    if torch.autograd._profiler_enabled():
        raise UnsupportedError(
            "fastlinear.profile",
            "no other profiler on this thread",
            "a running torch profiler",
            "Leave its context first.",
        )
    call = normalize_inputs(inputs, FUNCTION)
    device = device_of(model, call)
    with preserved(model, mode):
        step = Step(model, private_copy(call), mode, loss_fn)
        eager = eager_modules(model)
        names = {m: name for name, m in model.named_modules()}
        names = {m: names[m] for m in watched_modules(model)}
        mixed = len(eager) < sum(1 for _ in model.modules())
        progress("first run", 0, _STAGES)
        with without_collectives(FUNCTION):
            calls = _first_run(step, names, mixed)
        progress("watch", 1, _STAGES)
        step.doing = "in the run that shows which layers are called"
        seen = observe(model, step.forward, samples=samples)
        found = find_sites(model, seen, calls)
        products = products_of(model, step.forward, list(names), mixed)
        left = unfollowed.not_followed(model, products, found.sites)
        sites = unfollowed.told(model, found.sites, left)
        progress("time", 2, _STAGES)
        step.doing = "while a step was timed"
        step_us = clock.step_us(step, device)
        progress("attribute", 3, _STAGES)
        step.doing = "under the profiler"
        slow = step_us > clock.SLOW_STEP_US
        ranges = partial(module_ranges, names, on_instances=mixed)
        attribution = profiled(step, device, 1 if slow else steps, ranges, warm=not slow)
        step.drop_grads()
    records, rest = records_of(model, attribution, step_us, device.type)
    busy_us = attribution.busy_ns() / 1e3 if device.type == "cuda" else step_us
    progress("diagnose", 4, _STAGES)
    findings = diagnosis.diagnose(
        diagnosis.Step(
            mode=mode,
            device=device.type,
            step_us=step_us,
            busy_us=busy_us,
            precision=float32_precision(),
            op_us=clock.smallest_op_us() if device.type == "cpu" else 0.0,
        ),
        records,
        sites,
        found.shares,
        lambda dtype, precision: clock.ceilings(device, dtype, precision),
    )
    findings += tuple(own_calls.findings(model, seen.module_calls))
    findings += tuple(unfollowed.findings(left))
    progress("diagnose", _STAGES, _STAGES)
    report = ProfileReport(
        model_class=type(model).__name__,
        mode=mode,
        device=str(device),
        step_us=step_us,
        device_busy_us=busy_us,
        records=records,
        sites=sites,
        findings=findings,
        attributed=attribution.fraction(device.type == "cuda"),
        unattributed=rest,
        environment=environment(device),
        not_followed=left,
        unwatched=products.failed,
    )
    return report, seen


def _first_run(step: Step, names: dict[nn.Module, str], mixed: bool) -> Counter[nn.Module]:
    """One whole step, so that bad inputs are told apart from bad measurements.

    Returns how often each named module ran.
    """
    calls: Counter[nn.Module] = Counter()

    def count(module: nn.Module, args: Any) -> None:
        if module in names:
            calls[module] += 1

    handles: list[Any] = []
    try:
        if mixed:
            handles += [m.register_forward_pre_hook(count, prepend=True) for m in names]
        else:
            handles.append(module_hooks.register_module_forward_pre_hook(count))
        output = step.forward()
    finally:
        for handle in handles:
            handle.remove()
    if step.train:
        step.backward(step.loss(output))
    return calls
