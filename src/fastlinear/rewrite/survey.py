"""fl.profile: the profile with every finding that optimize_ has, and nothing rewritten."""

from __future__ import annotations

from typing import Any

from torch import nn

from fastlinear.core.interrupts import restored
from fastlinear.core.progress import Progress, silent
from fastlinear.core.settings import Config
from fastlinear.profile.capture import capture, check_arguments
from fastlinear.profile.report import ProfileReport
from fastlinear.profile.state import preserved
from fastlinear.rewrite.evaluate.findings import find, match, session_of
from fastlinear.rewrite.optimize import prepare
from fastlinear.rewrite.verify.running import LossFn

_BUDGET_S = 10.0  # of measuring, all findings together


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
    """Where a model's time goes, by module name, and what of it is wasted on Linear-shaped work.

    Args:
        model: an eager ``nn.Module`` on a CPU or CUDA device. It is run about twenty-five times (a
            slow one ten times) and left as it was: parameters, buffers, gradients, training
            flags, hooks, attributes and random state. Objects a module holds (a list it appends
            to, say) are not copied.
        inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments or a pair of
            both, ``(args, kwargs)``; a list is refused. Tensors are
            copied first.
        mode: ``"inference"`` (forward under ``no_grad``) or ``"train"`` (forward, loss,
            backward; no optimizer).
        loss_fn: output → scalar loss, for train mode; by default ``output.loss`` or the mean
            square of the output.
        steps: how many steps the profiler watches; the least disturbed one is reported.
        progress: called as ``progress(stage, done, total)``.

    Returns:
        A ProfileReport. Step time is measured without the profiler; host times are the profiler's
        shares of it, so ops of a few µs look somewhat dearer than they are. Kernel times are the
        device's own. Layers that could be one (gated MLPs, groups, lists and parallel MLPs) and
        diagonal layers are measured as they are and as one, for ten seconds at most.

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
    check_arguments(mode, steps)
    report, seen = capture(
        model, inputs, mode, loss_fn=loss_fn, steps=steps, progress=progress, samples=True
    )
    if len({p.device for p in model.parameters()}) > 1:
        return report  # what is measured alone is measured on one device
    config = Config(mode=mode, tune=False, time_budget_s=_BUDGET_S)
    work = prepare("fastlinear.profile", model, inputs, config, loss_fn, silent)
    work.profile = report
    with preserved(model, mode):
        candidates, _ = work.match(seen, None)
        found = match(work, candidates)
        session_of(work).offered = frozenset(name for fusion in found for name in fusion.names)
        find(work, progress)
    return work.profile
