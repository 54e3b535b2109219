"""Profile a model: run it, watch it, time it, attribute the time, diagnose."""

from __future__ import annotations

import gc
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import profile as autograd_profiler
from torch.nn.modules import module as module_hooks

from fastlinear.core.cost import Ceilings, measure_ceilings
from fastlinear.core.environment import environment
from fastlinear.core.errors import FastlinearError, InputError, UnsupportedError
from fastlinear.core.precision import float32_precision
from fastlinear.core.progress import Progress, silent
from fastlinear.core.settings import MODES
from fastlinear.core.timing import first_call_us, interleave
from fastlinear.profile import diagnose as diagnosis
from fastlinear.profile.attribute import Attribution, attribute
from fastlinear.profile.events import (
    BACKWARD,
    LOSS,
    STEP,
    from_kineto,
    module_ranges,
    quiet_profiler,
    span,
)
from fastlinear.profile.observe import Observation, observe
from fastlinear.profile.records import ProfileReport, Record
from fastlinear.profile.sites import find_sites
from fastlinear.profile.state import preserved
from fastlinear.profile.step import (
    LossFn,
    Step,
    check_model,
    device_of,
    eager_modules,
    loss_of,
    normalize_inputs,
    private_copy,
)

__all__ = ["capture", "loss_of", "normalize_inputs", "profile"]

_TIMING_ROUNDS = 9
_TIMING_BUDGET_S = 1.0
_SLOW_STEP_US = 1e5  # above, fewer runs say enough: what disturbs one is small beside it
_STAGES = 5
Ranges = Callable[[], AbstractContextManager[None]]


def profile(
    model: nn.Module,
    inputs: Any,
    mode: str = "inference",
    *,
    loss_fn: LossFn | None = None,
    steps: int = 3,
    progress: Progress = silent,
) -> ProfileReport:
    """Where a model's time goes, by module name, and what of it is wasted on Linear-shaped work.

    Args:
        model: an eager ``nn.Module`` on a CPU or CUDA device. It is run about twenty times (a slow
            one six times) and left as it was: parameters, buffers, gradients, training
            flags, hooks, attributes and random state. Objects a module holds (a list it appends
            to, say) are not copied.
        inputs: a tensor, a tuple of positional arguments or a dict of keyword arguments. Tensors
            are copied first.
        mode: ``"inference"`` (forward under ``no_grad``) or ``"train"`` (forward, loss,
            backward; no optimizer).
        loss_fn: output → scalar loss, for train mode; by default ``output.loss`` or the mean
            square of the output.
        steps: how many steps the profiler watches; the least disturbed one is reported.
        progress: called as ``progress(stage, done, total)``.

    Returns:
        A ProfileReport. Step time is measured without the profiler; host times are the profiler's
        shares of it, so ops of a few µs look somewhat dearer than they are. Kernel times are the
        device's own.

    Raises:
        InputError: arguments that do not fit, or inputs the model's forward raises on.
        UnsupportedError: a compiled or scripted model, another device, or a profiler already on.

    Parts under ``torch.compile`` are charged to the module that calls them.

    >>> import torch, fastlinear as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU())
    >>> report = fl.profile(model, torch.ones(4, 8))
    >>> report.sites[0].fqn, report.sites[0].activation
    ('0', 'relu')
    """
    if mode not in MODES:
        raise InputError(
            "fastlinear.profile", expected=f"mode in {', '.join(MODES)}", received=repr(mode)
        )
    if steps < 1:
        raise InputError("fastlinear.profile", expected="steps of at least 1", received=f"{steps}")
    return capture(
        model, inputs, mode, loss_fn=loss_fn, steps=steps, progress=progress, samples=False
    )[0]


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
            expected="no other profiler on this thread",
            received="a running torch profiler",
            remedy="Leave its context first.",
        )
    call = normalize_inputs(inputs)
    device = device_of(model, call)
    with preserved(model, mode):
        step = Step(model, private_copy(call), mode, loss_fn)
        eager = eager_modules(model)
        names = {m: name for name, m in model.named_modules()}
        names = {m: names[m] for m in eager}
        mixed = len(eager) < sum(1 for _ in model.modules())
        progress("first run", 0, _STAGES)
        calls = _first_run(step, names, mixed)
        progress("watch", 1, _STAGES)
        seen = observe(model, step.forward, samples=samples)
        found = find_sites(model, seen, calls)
        progress("time", 2, _STAGES)
        step_us = _step_us(step, device)
        progress("attribute", 3, _STAGES)
        slow = step_us > _SLOW_STEP_US
        ranges = partial(module_ranges, names, on_instances=mixed)
        attribution = _profiled(step, device, 1 if slow else steps, ranges, warm=not slow)
        step.drop_grads()
    records, rest = _records(model, attribution, step_us, device.type)
    busy_us = attribution.busy_ns() / 1e3 if device.type == "cuda" else step_us
    progress("diagnose", 4, _STAGES)
    findings = diagnosis.diagnose(
        diagnosis.Step(
            mode=mode,
            device=device.type,
            step_us=step_us,
            busy_us=busy_us,
            precision=float32_precision(),
            op_us=_smallest_op_us() if device.type == "cpu" else 0.0,
        ),
        records,
        found.sites,
        found.shares,
        lambda dtype, precision: _ceilings(device, dtype, precision),
    )
    progress("diagnose", _STAGES, _STAGES)
    report = ProfileReport(
        model_class=type(model).__name__,
        mode=mode,
        device=str(device),
        step_us=step_us,
        device_busy_us=busy_us,
        records=records,
        sites=found.sites,
        findings=findings,
        attributed=attribution.fraction(device.type == "cuda"),
        unattributed=rest,
        environment=environment(device),
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
    except (torch.OutOfMemoryError, FastlinearError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise InputError(
            "fastlinear.profile",
            expected=f"inputs that {type(step.model).__name__}.forward accepts",
            received=f"inputs on which it raises {type(error).__name__}: {first}",
            remedy="Call the model on them directly to see the whole traceback.",
        ) from error
    finally:
        for handle in handles:
            handle.remove()
    if step.train:
        step.loss(output).backward()
    return calls


def _step_us(step: Step, device: torch.device) -> float:
    """Median wall time of a step that has run twice already."""
    once = first_call_us(step, device)
    if once > _SLOW_STEP_US:
        return median((once, first_call_us(step, device), first_call_us(step, device)))
    timed = interleave(
        {"step": step}, device=device, rounds=_TIMING_ROUNDS, budget_s=_TIMING_BUDGET_S
    )
    return timed["step"].median_us


def _profiled(
    step: Step, device: torch.device, steps: int, ranges: Ranges, warm: bool
) -> Attribution:
    """The least disturbed of ``steps`` profiled steps; ``warm``: after one for the profiler itself.

    That is the one with the least kernel time on CUDA, the least host time on a CPU: whatever
    else the machine does can only add to either.
    """
    # torch.profiler.profile, which wraps this class, first imports all of Inductor: seconds.
    cuda = device.type == "cuda"
    session = partial(autograd_profiler, use_kineto=True, use_device="cuda" if cuda else None)
    seen = []
    with quiet_profiler(), _no_garbage_collection():
        for _ in range(steps + warm):
            with session() as prof, ranges():
                _marked_step(step)
                if cuda:
                    torch.cuda.synchronize(device)
            assert prof.kineto_results is not None
            seen.append(attribute(from_kineto(prof.kineto_results.events())))
    return min(seen[int(warm) :], key=lambda a: a.total_ns(cuda))


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Python's collector pauses at random; its pause would be charged to some module."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _marked_step(step: Step) -> None:
    if step.train:
        step.drop_grads()
    with span(STEP):
        output = step.forward()
        if not step.train:
            return
        with span(LOSS):
            loss = step.loss(output)
        with span(BACKWARD):
            loss.backward()


def _records(
    model: nn.Module, found: Attribution, step_us: float, device: str
) -> tuple[tuple[Record, ...], tuple[tuple[str, float], ...]]:
    """(records, unattributed), both per step and largest first."""
    classes = {name: type(m).__name__ for name, m in model.named_modules()}
    profiled_us = found.step_ns / 1e3
    scale = step_us / profiled_us if profiled_us else 1.0
    records: list[Record] = []
    rest: dict[str, float] = defaultdict(float)
    for owner, times in found.times.items():
        cpu_us = times.cpu_ns / 1e3 * scale
        device_us = times.device_ns / 1e3
        if owner.fqn is None:
            rest[owner.op] += device_us if device == "cuda" else cpu_us
            continue
        records.append(
            Record(
                fqn=owner.fqn,
                module_class=classes[owner.fqn],
                op=owner.op,
                direction=owner.direction,
                calls=times.calls,
                cpu_us=cpu_us,
                device_us=device_us,
            )
        )
    records.sort(key=lambda r: (-r.device_us, -r.cpu_us, r.fqn, r.op))
    named = sorted(rest.items(), key=lambda item: -item[1])
    return tuple(records), tuple((name, us) for name, us in named if us > 0)


def _smallest_op_us() -> float:
    x = torch.zeros(1)
    with torch.no_grad():
        return interleave({"op": lambda: torch.relu(x)}, rounds=7)["op"].median_us


def _ceilings(device: torch.device, dtype: str, precision: str) -> Ceilings:
    if dtype != "float32":
        return measure_ceilings(str(device), dtype)
    with _matmul_precision(precision):
        return measure_ceilings(str(device), dtype, precision)


@contextmanager
def _matmul_precision(precision: str) -> Iterator[None]:
    if precision == float32_precision():
        yield
        return
    # The newer setting: the older one cannot be read, nor set, once a backend's own is in use.
    product: Any = torch.backends.cuda.matmul
    before = product.fp32_precision
    product.fp32_precision = "ieee" if precision == "highest" else "tf32"
    try:
        yield
    finally:
        product.fp32_precision = before
