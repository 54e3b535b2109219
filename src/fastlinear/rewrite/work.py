"""One optimization under way: what is known of it and what becomes of each site.

``choose``, ``keep_accurate`` and ``keep_fast`` take it from step to step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress
from fastlinear.core.settings import Config
from fastlinear.core.timing import Samples
from fastlinear.dispatch.confidence import doubt_of_pair, spread_of
from fastlinear.dispatch.tune import BASELINE, Tuned
from fastlinear.native import cpp_build
from fastlinear.profile.graph import Observed
from fastlinear.profile.observe import Observation
from fastlinear.profile.raised import told
from fastlinear.profile.report import ProfileReport
from fastlinear.profile.servable import without_collectives
from fastlinear.profile.step import private_copy
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.sites import FilterFn
from fastlinear.rewrite.rules.linear_act import find as rule
from fastlinear.rewrite.rules.linear_act import on_parameters
from fastlinear.rewrite.session import Session, Times
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.verify import model as verify
from fastlinear.rewrite.verify.finite import NOT_FINITE, why_unproven
from fastlinear.rewrite.verify.inputs import Call
from fastlinear.rewrite.verify.running import Ran, Runner, check_runs

UNDECIDED = "undecided"
"""Status and code of what a disturbed measurement leaves open."""
GROUP_DROPPED = "Faster alone, but the rewrite it belongs to was given up."


@dataclass
class Work:
    """One optimization under way.

    Attributes:
        model, call, runner, config: what is optimized, on which inputs, how.
        budget: seconds left for measuring.
        progress: told about every step.
        profile: what the profile saw.
        ran: the model's own results, until the judge has them.
        unproven: why nothing can be compared with them, or None.
        judge: compares the rewritten model with the model; made when first needed.
        outcomes: what becomes of each site, by name.
        notes: what a reader should know of how it was done.
        tuned: what tuning measured.
        every: all candidates, those given up included.
        rows: the buckets of rows that the plan put onto the model was tuned for.
        graphs: what becomes of the model as a whole (``""``), or of its parts, as CUDA graphs,
            where those were asked for.
        compiled: what becomes of the model (``""``) and of its blocks compiled, where that was
            asked for.
        arguments: module → what its first call was given, tensors left out.
        filter_fn: the caller's say on every module; False leaves it alone.
        traces: module → what the trace of its forward offers, or why there is none.
        session: what rules see of it, once they have looked.
        tried: fusions, by rule and linears → times that decided about them.
        timed: times of fusions measured for a finding, by kind.
        left_alone: why linears are part of no fusion, by the first of them.
        compiled_s: how long this process had compiled C++ before.
        disturbed: how far times spread in each measurement that leaves a site undecided.
    """

    model: nn.Module
    call: Call
    runner: Runner
    config: Config
    budget: measure.Budget
    progress: Progress
    profile: ProfileReport = field(init=False)
    ran: Ran = field(init=False)
    unproven: str | None = None
    judge: verify.Judge | None = None
    outcomes: dict[str, SiteOutcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tuned: dict[Any, Tuned] = field(default_factory=dict)
    every: list[Candidate] = field(default_factory=list)
    rows: tuple[int, ...] = ()
    graphs: dict[str, SiteOutcome] = field(default_factory=dict)
    compiled: dict[str, SiteOutcome] = field(default_factory=dict)
    arguments: dict[nn.Module, Observed] = field(default_factory=dict)
    filter_fn: FilterFn | None = None
    traces: dict[str, Fusable | Refusal] = field(default_factory=dict)
    session: Session | None = None
    tried: dict[Any, Times] = field(default_factory=dict)
    timed: dict[Any, Times] = field(default_factory=dict)
    left_alone: dict[str, str] = field(default_factory=dict)
    compiled_s: float = field(default_factory=cpp_build.compiled_s)
    disturbed: list[float] = field(default_factory=list)

    def own_call(self) -> Call:
        """The inputs copied: some models write to them."""
        return Call(*private_copy((self.call.args, self.call.kwargs)))

    def step(self, doing: str) -> None:
        """One step of the model on such a copy. Raises InputError, which says ``doing``, where the
        model raises."""
        self.runner.told_step(self.model, self.own_call(), doing)

    def forward(self, doing: str) -> None:
        """The same without a backward."""
        call = self.own_call()
        train = self.runner.mode == "train"
        with told(self.runner.function, self.model, doing), torch.set_grad_enabled(train):
            self.model(*call.args, **call.kwargs)

    def run_once(self) -> None:
        """Run the model as it is, to compare with, and see whether its results show anything.
        Raises InputError as ``check_runs``."""
        with without_collectives(self.runner.function):
            self.ran = check_runs(self.runner.function, self.model, self.call, self.runner)
        self.unproven = why_unproven(self.ran.results, self.model, self.call)
        if self.unproven is not None:
            self.notes.append(f"nothing is rewritten: {self.unproven}")

    def refuse_unproven(self, candidates: Iterable[Candidate]) -> None:
        """Refuse them all, because nothing can be compared."""
        assert self.unproven is not None
        for c in candidates:
            self.settle(c.fqn, "refused", NOT_FINITE, self.unproven, activation=c.activation)

    def settle(self, fqn: str, status: str, code: str, reason: str, **facts: Any) -> None:
        """Record (or change) what becomes of a site."""
        known = self.outcomes.get(fqn)
        if known is None:
            known = SiteOutcome(fqn, rule.RULE, None, None, status, code, reason)
        self.outcomes[fqn] = replace(known, status=status, code=code, reason=reason, **facts)

    def tuned_gain(
        self, unit: Candidate | Fusion, chosen: Sequence[dict[str, str]]
    ) -> float | None:
        """What tuning says the chosen backends save of PyTorch's time in one step, in
        microseconds; None where it did not measure them.

        ``chosen``: piece → backend, one for each of the unit's Problems.
        """
        gain, known = 0.0, False
        for problem, kind, backends in zip(unit.problems, unit.calls.kinds, chosen, strict=True):
            for piece, backend in backends.items():
                tuned = self.tuned.get(problem.with_piece(piece))
                if tuned is not None and {backend, BASELINE} <= set(tuned.samples):
                    known = True
                    saved = tuned.samples[BASELINE].median_us - tuned.samples[backend].median_us
                    gain += saved * kind.count
        return gain if known else None

    def doubt(self, problems: Iterable[Problem]) -> str:
        """What leaves the tuning of these Problems in doubt; ``""`` where nothing does."""
        found = [self.tuned[p] for p in problems if p in self.tuned and self.tuned[p].doubt]
        self.disturbed += [spread_of(t.samples) for t in found]
        return "; ".join(dict.fromkeys(t.doubt for t in found))

    def doubt_of_pair(self, before: Samples, after: Samples) -> str:
        """What leaves a comparison without a gain in doubt; ``""`` where nothing does."""
        doubt = doubt_of_pair(before, after)
        if doubt:
            self.disturbed.append(spread_of({"before": before, "after": after}))
        return doubt

    def found_gain(self, fqn: str) -> float | None:
        """The gain that the profile predicts of one call for a linear and its activation."""
        for finding in self.profile.findings:
            if finding.fqn == fqn and finding.code == "linear_activation":
                return finding.predicted_gain_us
        return None

    def allows(self, family: str) -> bool:
        """Whether the settings let this family rewrite."""
        return self.config.families is None or family in self.config.families

    def match(
        self, seen: Observation, filter_fn: FilterFn | None
    ) -> tuple[list[Candidate], dict[str, Refusal]]:
        """Match every linear against what the profile saw."""
        backend = self.config.backends.get(rule.RULE)
        how: dict[str, Any] = {"backend": backend, "filter_fn": filter_fn}
        layers, left = rule.match(self.model, self.profile.sites, seen, **how)
        given = self.model, self.profile.sites, seen, layers
        self.every, refused = on_parameters.match(*given, **how)
        self.arguments, self.filter_fn = seen.arguments, filter_fn
        return self.every, left | refused
