"""optimize_: profile, match, tune, verify, measure, and keep only what is measured faster."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from fastlinear.core.compare import Verdict
from fastlinear.core.errors import InputError
from fastlinear.core.inputs import normalize_inputs
from fastlinear.core.interrupts import restored
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress, silent
from fastlinear.core.settings import Config, batch_invariant
from fastlinear.dispatch.backend import check_backend, families
from fastlinear.profile.capture import capture
from fastlinear.profile.state import preserved
from fastlinear.profile.step import check_model, device_of
from fastlinear.profile.unfollowed import USED_BY_PARENT
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate.compiled import choose_compiled
from fastlinear.rewrite.evaluate.findings import find
from fastlinear.rewrite.evaluate.graphs import choose_graph
from fastlinear.rewrite.evaluate.keep_accurate import keep_accurate
from fastlinear.rewrite.evaluate.keep_fast import keep_fast
from fastlinear.rewrite.evaluate.out_of_memory import contained
from fastlinear.rewrite.evaluate.rows import tune_rows
from fastlinear.rewrite.evaluate.sites import choose, heaviest_first
from fastlinear.rewrite.finish import finish
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import Refusal, rewritten
from fastlinear.rewrite.match.sites import FilterFn
from fastlinear.rewrite.result import Result
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.running import LossFn, Runner
from fastlinear.rewrite.work import Work

_PROFILED_STEPS = 3
_NOTHING_CODES = ("already_fastlinear", "already_rewritten", "not_called", "empty_input")


@restored
def optimize_(
    model: nn.Module,
    inputs: Any,
    config: Config | None = None,
    *,
    filter_fn: FilterFn | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress = silent,
) -> Result:
    """Make a model's linear layers as fast as this machine allows, in place and reversibly.

    Profiles the model, finds linears (with the activation that follows), chains, gated MLPs and
    groups of them that another backend or one call computes faster, swaps ``forward`` on those
    instances, verifies outputs (in train mode also every gradient and a few optimizer steps)
    against a float64 oracle, measures the whole model before and after, and keeps only what is
    faster beyond noise. Parameters, buffers, ``state_dict`` keys, classes and hooks stay as they
    are.

    Args:
        model: any eager module on one device, with real values.
        inputs: a tensor, a tuple of positional arguments, a dict of keyword arguments or a pair of
            both, ``(args, kwargs)``; a list is refused.
        config: what may be done; see ``fl.Config``.
        filter_fn: ``filter_fn(module, fqn)`` for every linear, grouped convolution or module with
            a weight per group, and loop over linears; False leaves it alone. Of a linear that a
            forward writes on parameters, that forward's module and the weight's name.
        loss_fn: output → scalar loss for train mode; by default ``output.loss`` or a mean square.
        progress: called as ``progress(stage, done, total)``.

    Returns:
        A ``Result`` with an outcome for every linear of the model, those that a forward writes on
        parameters (``F.linear``) under their weights' names, and for grouped convolutions
        and modules with a weight per group that could be one call.

    Raises:
        InputError: the inputs do not fit the model (its exception is the cause), or an argument
            is of the wrong kind.
        UnsupportedError: a backend that ``config`` names can serve nothing of the model. Whatever
            is raised, the model is left as it was.

    Hooks, adapters and other layers put in later act as on the model before; what they touch is
    then no longer fused.

    >>> import torch, fastlinear as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> result = fl.optimize_(model, torch.ones(2, 8))
    >>> sum(result.summary().values())
    1
    >>> result.revert()
    """
    config = Config() if config is None else config
    if batch_invariant():
        raise InputError(
            "optimize_",
            "calls that take what is fastest",
            "batch_invariant() or FASTLINEAR_BATCH_INVARIANT=1",
            "Optimize first, then switch it on: what was kept follows it.",
        )
    if filter_fn is not None and not callable(filter_fn):
        raise InputError(
            "optimize_",
            "filter_fn to be a function of a module and its name, or None",
            f"filter_fn={filter_fn!r}",
            "For example filter_fn=lambda module, fqn: fqn.startswith('encoder.').",
        )
    work = prepare("optimize_", model, inputs, config, loss_fn, progress)
    with preserved(model, config.mode):
        work.run_once()
    note_rewritten(work)
    candidates, left = watch(work, inputs, filter_fn)
    with preserved(model, config.mode):
        settle_left(work, left)
        if work.unproven is not None:
            work.refuse_unproven(candidates)
        kept: list[Candidate] = []
        if work.unproven is None:
            run = partial(choose, work, candidates)
            kept = contained(work, "choosing", run, kept, candidates)
        kept, verdicts, pair = _proven(work, kept)
        graph = contained(work, "trying graphs", lambda: choose_graph(work, kept), None)
        compiled = contained(work, "compiling", lambda: choose_compiled(work, kept, graph), None)
        graph = compiled or graph
        inside = kept if graph is None else graph.kept
        contained(work, "tuning for more rows", lambda: tune_rows(work, inside), None)
        find(work)
    return finish(work, kept, verdicts if kept else (), pair if kept else None, graph)


def _proven(
    work: Work, chosen: list[Candidate]
) -> tuple[list[Candidate], tuple[Verdict, ...], measure.Pair | None]:
    """What of the rewrites chosen is accurate and fast in the whole model."""
    nothing: tuple[list[Candidate], tuple[Verdict, ...]] = [], ()
    slow: tuple[list[Candidate], measure.Pair | None] = [], None

    def accurate(given: list[Candidate]) -> tuple[list[Candidate], tuple[Verdict, ...]]:
        return contained(work, "verifying", partial(keep_accurate, work, given), nothing, given)

    def fast(given: list[Candidate]) -> tuple[list[Candidate], measure.Pair | None]:
        return contained(work, "measuring", partial(keep_fast, work, given), slow, given)

    verified, verdicts = accurate(chosen)
    kept, pair = fast(verified)
    while 0 < len(kept) < len(verified):  # fewer rewrites are other code: verified again
        verified, verdicts = accurate(kept)
        if len(verified) < len(kept):
            kept, pair = fast(verified)
    return kept, verdicts, pair


@restored
def problems(
    model: nn.Module,
    inputs: Any,
    *,
    config: Config | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress = silent,
) -> list[Problem]:
    """The distinct forward Problems of a model's linears, as ``optimize_`` would tune them.

    The model runs as under ``fl.profile`` and is left as it was. Raises as ``optimize_`` does.
    """
    work = prepare(
        "problems", model, inputs, Config() if config is None else config, loss_fn, progress
    )
    candidates, _ = watch(work, inputs, None)
    return heaviest_first(candidates)


def watch(
    work: Work, inputs: Any, filter_fn: FilterFn | None
) -> tuple[list[Candidate], dict[str, Refusal]]:
    """Profile the model, and match every linear against what was seen."""
    work.profile, seen = capture(
        work.model,
        inputs,
        work.config.mode,
        loss_fn=work.runner.loss_fn,
        steps=_PROFILED_STEPS,
        progress=work.progress,
        samples=True,
    )
    with preserved(work.model, work.config.mode):  # traces hold for the mode, and draw numbers
        return work.match(seen, filter_fn)


def note_rewritten(work: Work) -> None:
    """Say what fastlinear has rewritten before, if anything."""
    names = rewritten(work.model)
    if names:
        told = ", ".join(name or "the model itself" for name in names[:3])
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        work.notes.append(
            f"already rewritten by fastlinear, and left so: {told}{more}; revert() of that result "
            "first lets optimize_ begin anew"
        )


def settle_left(work: Work, left: dict[str, Refusal]) -> None:
    """Record the linears that are no candidates, and why."""
    bypassed = {s.fqn for s in work.profile.sites if USED_BY_PARENT in s.flags}
    for fqn, refusal in left.items():
        nothing = refusal.code in _NOTHING_CODES and fqn not in bypassed
        status = "nothing_to_do" if nothing else "refused"
        work.settle(fqn, status, refusal.code, refusal.reason)


def prepare(
    function: str,
    model: nn.Module,
    inputs: Any,
    config: Config,
    loss_fn: LossFn | None,
    progress: Progress,
) -> Work:
    """Check the arguments; nothing has run yet. Raises InputError."""
    if not isinstance(config, Config):
        raise InputError(
            function,
            "config to be a fl.Config",
            type(config).__name__,
            "For example config=fl.Config(mode='train').",
        )
    for name, given in (("loss_fn", loss_fn), ("progress", progress)):
        if given is not None and not callable(given):
            raise InputError(
                function,
                f"{name} to be a function",
                f"{name}={given!r}",
                "Give the function itself, or leave it out.",
            )
    check_model(model, function)
    check_backends(function, config)
    call = Call(*normalize_inputs(inputs, function))
    device = device_of(model, (call.args, call.kwargs), function)
    homes = {str(p.device) for p in model.parameters()}
    if len(homes) > 1:
        raise InputError(
            function,
            "a model on one device",
            f"parameters on {', '.join(sorted(homes))}",
            "Move the model to one device first.",
        )
    runner = Runner(config.mode, loss_fn, device, config.seed, function)
    return Work(model, call, runner, config, measure.Budget(config.time_budget_s), progress)


def check_backends(function: str, config: Config) -> None:
    """Raise InputError for a family or backend that does not exist."""
    known = families()
    named = (*config.backends, *(config.families or ()))
    for name in named:
        if name not in known:
            raise InputError(
                function,
                f"families in {', '.join(sorted(known))}",
                repr(name),
                "`fastlinear doctor` lists families and backends.",
            )
    for name, backend in config.backends.items():
        check_backend(backend, name, function)
