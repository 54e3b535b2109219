"""From what was kept to the Result: switched on, and written down as a plan."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from fastlinear.core.compare import Verdict
from fastlinear.core.environment import environment
from fastlinear.core.timing import Ratio
from fastlinear.profile.records import NotFollowed
from fastlinear.profile.state import preserved
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.evaluate.activations_left import told
from fastlinear.rewrite.evaluate.not_measured import note_disturbed, note_time
from fastlinear.rewrite.evaluate.rows import asked, note_rows
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.evaluate.try_compiled import RULE
from fastlinear.rewrite.evaluate.try_graph import KeptGraph
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import linear_modules
from fastlinear.rewrite.plan import Plan, Rewrite, model_facts
from fastlinear.rewrite.result import Result
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.swap.modules import SwapSet, is_rewritten
from fastlinear.rewrite.verify.inputs import input_specs
from fastlinear.rewrite.work import Work


def finish(
    work: Work,
    kept: list[Candidate],
    verdicts: tuple[Verdict, ...],
    pair: measure.Pair | None,
    graph: KeptGraph | None,
) -> Result:
    """Switch the kept rewrites on and write everything down."""
    facts = environment(work.runner.device)
    if graph is not None:
        kept = graph.kept
    rewrites = tuple(_rewrite(work, c) for c in kept)
    swaps = SwapSet(swaps_of(kept))
    if graph is not None:
        rewrites += tuple(
            Rewrite(name, graph.rule, "none", graph.route, backend=graph.backend)
            for name in graph.names
        )
        verdicts, pair, swaps = graph.verdicts, graph.pair, SwapSet(graph.swaps)
    known = linear_modules(work.model)
    sites = [work.outcomes[fqn] for fqn in known if fqn in work.outcomes]
    sites += [outcome for fqn, outcome in work.outcomes.items() if fqn not in known]
    sites = [replace(told(work, site), part_of=_part_of(work, site)) for site in sites]
    sites += work.graphs.values()
    sites += work.compiled.values()
    plan = Plan(
        model=model_facts(work.model),
        mode=work.config.mode,
        environment=facts,
        inputs=input_specs(work.call),
        rewrites=rewrites,
        fastlinear=sys.modules["fastlinear"].__version__,
        tuned=tuple(_tuned_choices(work, kept)),
        advice=tuple(
            {
                "code": f.code,
                "fqn": f.fqn,
                "advice": f.advice,
                "predicted_gain_us": f.predicted_gain_us,
            }
            for f in work.profile.findings
            if f.advice is not None
        ),
    )
    note_rows(work, plan.rows or work.rows)
    note_time(work)
    note_disturbed(work)
    step = work.profile.step_us
    result = Result(
        model_class=type(work.model).__qualname__,
        mode=work.config.mode,
        device=str(work.runner.device),
        sites=tuple(sites),
        verdicts=verdicts,
        before_us=pair.before.median_us if pair else step,
        after_us=pair.after.median_us if pair else step,
        speedup=pair.speedup if pair else Ratio(1.0, 1.0, 1.0),
        samples={
            "before": list(pair.before.us) if pair else [],
            "after": list(pair.after.us) if pair else [],
        },
        plan=plan,
        profile=work.profile,
        notes=tuple(dict.fromkeys((*(f"profile: {n}" for n in work.profile.notes), *work.notes))),
        _swaps=swaps,
        not_followed=tuple(_not_followed(work)),
    )
    if graph is not None and graph.rule == RULE:
        _compile(work, swaps)
    swaps.on()
    return result


def _not_followed(work: Work) -> Iterator[NotFollowed]:
    """The profile's, less what an outcome accounts for."""
    for one in work.profile.not_followed:
        names = (one.fqn, one.parent_fqn)
        ours = is_rewritten(work.model.get_submodule(one.parent_fqn))
        if not ours and not any(name in work.outcomes for name in names):
            yield one


def _part_of(work: Work, site: SiteOutcome) -> str | None:
    """The first linear of the call that this one is, or was tried as, a part of."""
    found = (c.chain for c in work.every if c.fqn == site.fqn and c.chain is not None)
    chain = next(found, None)
    if chain is None or chain.rule != site.rule or chain.key == site.fqn:
        return None
    return chain.key


def _compile(work: Work, swaps: SwapSet) -> None:
    """Run a step of the model as it will stay: the caller's first call finds it compiled."""
    swaps.release()
    swaps.on()
    try:
        with preserved(work.model, work.config.mode):
            work.step("where it ran as it is kept, compiled")
    except BaseException:
        swaps.off()
        raise


def _rewrite(work: Work, c: Candidate) -> Rewrite:
    return Rewrite(
        fqn=c.fqn,
        rule=work.outcomes[c.fqn].rule,
        activation=c.activation,
        route=c.route,
        activation_fqn=c.activation_fqn,
        parent_fqn=c.parent_fqn,
        backend=c.backend if c.chain is None else c.chain.dispatch.backend,
        problem=c.problem.to_json(),
        backends=work.outcomes[c.fqn].backends,
    )


def _tuned_choices(work: Work, kept: list[Candidate]) -> list[dict[str, Any]]:
    wanted = {p for q in asked(work, kept) for p in measure.deciding(q)}
    return [
        {
            "problem": p.to_json(),
            "best": t.best,
            "times_us": {name: s.median_us for name, s in t.samples.items()},
            "doubt": t.doubt,
            "rivals": list(t.rivals),
        }
        for p, t in work.tuned.items()
        if p in wanted
    ]
