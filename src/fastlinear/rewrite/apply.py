"""apply_: a stored plan put onto the same model again, verified again."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from fastlinear.core.compare import Verdict
from fastlinear.core.errors import PlanError, UnsupportedError
from fastlinear.core.interrupts import restored
from fastlinear.core.progress import Progress, silent
from fastlinear.core.settings import Config
from fastlinear.profile.state import preserved
from fastlinear.profile.step import check_model, device_of
from fastlinear.rewrite import as_planned
from fastlinear.rewrite import plan as plans
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate.chains import facts, members
from fastlinear.rewrite.evaluate.compiled import choose_compiled
from fastlinear.rewrite.evaluate.findings import match as match_fusions
from fastlinear.rewrite.evaluate.graphs import choose_graph
from fastlinear.rewrite.evaluate.keep_accurate import keep_accurate
from fastlinear.rewrite.evaluate.out_of_memory import contained
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.finish import finish
from fastlinear.rewrite.fits import check_fits
from fastlinear.rewrite.match.candidate import OWN, Candidate
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.optimize import prepare, settle_left, watch
from fastlinear.rewrite.plan import Plan, Rewrite
from fastlinear.rewrite.remember import decisions_of, on_trial
from fastlinear.rewrite.result import Result
from fastlinear.rewrite.swap.modules import SwapSet
from fastlinear.rewrite.verify.inputs import from_specs
from fastlinear.rewrite.verify.running import LossFn
from fastlinear.rewrite.work import Work

_SEED = 0


@restored
def apply_(
    model: nn.Module,
    plan: str | Path | dict[str, Any],
    inputs: Any = None,
    *,
    loss_fn: LossFn | None = None,
    progress: Progress = silent,
    time_budget_s: float = 60.0,
) -> Result:
    """Put a stored plan onto the model it was made for, in place and reversibly.

    The plan is checked against model and machine, the rewritten model is verified as by
    ``optimize_``, and its speed is measured once; a rewrite that is less accurate, or slower
    beyond noise, is put back and reported as rejected. Where this machine takes another backend
    than the plan names (its own measurements say so, or the planned one cannot serve), the outcome
    and a note say which and why; what is measured is what is taken.

    Args:
        model: a model of the class and with the parameter shapes the plan names.
        plan: a path written by ``result.save``, or the parsed JSON.
        inputs: as for ``optimize_`` (a tensor, a tuple, a dict or a pair ``(args, kwargs)``); by
            default random ones as described in the plan.
        loss_fn: needed when the plan was made with one.
        progress: called as ``progress(stage, done, total)``.
        time_budget_s: as in ``fl.Config``.

    Raises:
        PlanError: the plan is corrupt, of another format, or made for another model, device or
            torch version, or describes more than 2³⁰ numbers of inputs and none are given.
        UnsupportedError: a backend that the plan forces cannot serve here. Whatever is raised, the
            model is left as it was.

    >>> import torch, fastlinear as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> result = fl.optimize_(model, torch.ones(2, 8))
    >>> stored = result.plan.to_json()
    >>> result.revert()
    >>> fl.apply_(model, stored).kept == result.kept
    True
    """
    check_model(model, "apply_")
    loaded = plans.load(plan)
    device = device_of(model, (), "apply_")
    check_fits(loaded, model, device)
    if inputs is None:
        call = from_specs(loaded.inputs, device, _SEED)
        inputs = (call.args, call.kwargs)
    forced = {r.family: r.backend for r in loaded.linears if r.backend is not None}
    config = Config(
        mode=loaded.mode,
        backends=forced,
        tune=False,
        graphs=bool(loaded.graphed),
        compile=bool(loaded.compiled),
        time_budget_s=time_budget_s,
    )
    work = prepare("apply_", model, inputs, config, loss_fn, progress)
    brought = decisions_of(loaded)
    with on_trial(brought, device.type):
        with preserved(model, config.mode):
            work.run_once()
        candidates, left = watch(work, inputs, None)
        with preserved(model, config.mode):
            kept = _planned(work, loaded, candidates, left)
            others = as_planned.others(kept, {r.fqn: r for r in loaded.linears})
            work.notes += as_planned.notes(others, len(kept))
            if work.unproven is not None:
                work.refuse_unproven(kept)
                kept = []
            run = partial(keep_accurate, work, kept)
            nothing: tuple[list[Candidate], tuple[Verdict, ...]] = [], ()
            kept, verdicts = contained(work, "verifying", run, nothing, kept)
            untimed: tuple[list[Candidate], measure.Pair | None] = [], None
            _, pair = untimed
            if kept:
                slower = partial(_unless_slower, work, kept, others)
                kept, pair = contained(work, "measuring", slower, untimed, kept)
            graphs = partial(choose_graph, work, kept, planned=loaded.graphed)
            graph = contained(work, "trying graphs", graphs, None)
            planned, mode = loaded.compiled, loaded.compile_mode
            compiling = partial(choose_compiled, work, kept, graph, planned=planned, mode=mode)
            graph = contained(work, "compiling", compiling, None) or graph
    if kept or graph:
        work.rows = loaded.rows
        for decision in brought:
            decision.store()
    return finish(work, kept, verdicts if kept else (), pair, graph)


def _planned(
    work: Work, plan: Plan, candidates: list[Candidate], left: dict[str, Refusal]
) -> list[Candidate]:
    """The candidates the plan names. Raises PlanError when a site is no longer what it was."""
    asked = {r.fqn: (r.rule, r.parent_fqn) for r in plan.linears if r.route in ("chain", "own")}
    known = [c for c in candidates if c.fqn in asked]
    chains = match_fusions(work, known, {rule for rule, _ in asked.values()}) if asked else []
    chains = [c for c in chains if all(asked.get(name) == (c.rule, c.fqn) for name in c.names)]
    chained = {c.fqn: c for chain in chains for c in members(chain)}
    own = [c for c in chained.values() if c.kind == OWN]
    candidates = [*(chained.get(c.fqn, c) for c in candidates), *own]
    work.every = [*(chained.get(c.fqn, c) for c in work.every), *own]
    by_fqn = {c.fqn: c for c in candidates}
    wanted = {r.fqn: r for r in plan.linears}
    for fqn, rewrite in wanted.items():
        found = by_fqn.get(fqn)
        if found is None:
            reason = work.left_alone.get(fqn, "It is not a linear.")
            _refuse(rewrite, left[fqn].reason if fqn in left else reason)
        elif (found.activation, found.route, found.activation_fqn, found.parent_fqn) != (
            rewrite.activation,
            rewrite.route,
            rewrite.activation_fqn,
            rewrite.parent_fqn,
        ):
            _refuse(rewrite, f"{found.activation} by route {found.route!r}")
    settle_left(work, left)
    for c in candidates:
        if c.fqn not in wanted:
            work.settle(c.fqn, "nothing_to_do", "not_in_plan", "The plan leaves it alone.")
            continue
        told: dict[str, Any]
        try:
            if c.chain is not None:
                told = facts(c.chain)
            else:
                told = {
                    "problem": c.problem.to_json(),
                    "route": c.route,
                    "calls": c.calls.calls,
                    "backends": measure.backends_of(c.problem, c.backend),
                }
        except UnsupportedError as error:
            raise UnsupportedError(
                "apply_",
                f"backend {wanted[c.fqn].backend!r}, which the plan forces, to serve "
                f"{c.fqn!r} here",
                error.received,
                "Make a new plan with optimize_ on this machine and these inputs.",
            ) from error
        why = "The rewrite it belongs to was given up."
        work.settle(c.fqn, "rejected", "group_dropped", why, activation=c.activation, **told)
    return [c for c in candidates if c.fqn in wanted]


def _unless_slower(
    work: Work, kept: list[Candidate], others: Mapping[str, str]
) -> tuple[list[Candidate], measure.Pair | None]:
    swaps = swaps_of(kept)
    pair = measure.model_pair(
        work.model,
        SwapSet(swaps),
        work.runner,
        work.own_call(),
        budget_s=work.budget.left_s / 4,
    )
    ratio = pair.speedup
    text = f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}] end to end"
    slower = ratio.high < 1.0
    for c in kept:
        other = others.get(c.fqn)
        if slower:
            told = "slower" if other is None else f"slower ({other})"
            work.settle(c.fqn, "rejected", "slower_model", f"{told}: {text}")
        elif other is None:
            work.settle(c.fqn, "kept", "in_plan", f"as planned; {text}")
        else:
            work.settle(c.fqn, "kept", "other_backend", f"planned, but {other}; {text}")
    return ([], None) if slower else (kept, pair)


def _refuse(rewrite: Rewrite, received: str) -> None:
    raise PlanError(
        "apply_",
        f"{rewrite.fqn!r} to be rewritten with {rewrite.activation} by route {rewrite.route!r}",
        received,
        "The model's code or inputs differ from the plan's, or it is rewritten already: "
        "revert that, or make a new plan.",
    )
