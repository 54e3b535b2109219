"""One optimization under way: which candidates are worth it, accurate, and faster."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fastlinear.core.compare import Verdict
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress
from fastlinear.core.settings import Config
from fastlinear.core.timing import Ratio
from fastlinear.dispatch.backend import families
from fastlinear.dispatch.tune import BASELINE, Tuned
from fastlinear.profile import ProfileReport
from fastlinear.profile.observe import Observation
from fastlinear.rewrite import measure, site, verify
from fastlinear.rewrite.candidate import Candidate
from fastlinear.rewrite.eligible import Refusal
from fastlinear.rewrite.oracle import make_oracle
from fastlinear.rewrite.result import SiteOutcome
from fastlinear.rewrite.rules import linear_act as rule
from fastlinear.rewrite.rules.linear_act import FilterFn
from fastlinear.rewrite.running import Call, Ran, Runner
from fastlinear.rewrite.swap import SwapSet

_GROUP = "Faster alone, but the rewrite it belongs to was given up."


@dataclass
class Work:
    """One optimization under way: what is known, what is decided, and the budget."""

    model: nn.Module
    call: Call
    runner: Runner
    config: Config
    budget: measure.Budget
    progress: Progress
    profile: ProfileReport = field(init=False)
    ran: Ran = field(init=False)
    judge: verify.Judge | None = None
    copies: bool | None = None
    outcomes: dict[str, SiteOutcome] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tuned: dict[Any, Tuned] = field(default_factory=dict)
    every: list[Candidate] = field(default_factory=list)

    # -- deciding ----------------------------------------------------------------------------

    def settle(self, fqn: str, status: str, code: str, reason: str, **facts: Any) -> None:
        """Record (or change) what becomes of a site."""
        known = self.outcomes.get(fqn)
        if known is None:
            known = SiteOutcome(fqn, rule.RULE, None, None, status, code, reason)
        self.outcomes[fqn] = replace(known, status=status, code=code, reason=reason, **facts)

    def match(
        self, seen: Observation, filter_fn: FilterFn | None
    ) -> tuple[list[Candidate], dict[str, Refusal]]:
        """Match every linear against what the profile saw."""
        backend = self.config.backends.get(rule.RULE)
        found = rule.match(
            self.model, self.profile.sites, seen, backend=backend, filter_fn=filter_fn
        )
        self.every = found[0]
        return found

    def choose(self, candidates: list[Candidate]) -> list[Candidate]:
        """Tune the distinct Problems and drop the sites that have nothing to gain."""
        if self.config.families is not None and rule.RULE not in self.config.families:
            for c in candidates:
                self.settle(c.fqn, "refused", "family_off", "Config.families leaves it out.")
            return []
        problems = heaviest_first(candidates)
        if self.config.tune:
            with self.budget:
                self.tuned = measure.tune_all(
                    problems,
                    self.runner.device,
                    budget=self.budget,
                    seed=self.config.seed,
                    progress=self.progress,
                )
        kept = [c for c in candidates if self._worth_measuring(c)]
        return self._measure_sites(rule.complete(kept, self.every))

    def _worth_measuring(self, c: Candidate) -> bool:
        facts: dict[str, Any] = {
            "activation": c.activation,
            "problem": c.problem.to_json(),
            "route": c.route,
            "calls": c.calls.calls,
        }
        try:
            chosen = [measure.backends_of(p, c.backend) for p in c.problems]
        except UnsupportedError as error:
            self.settle(c.fqn, "refused", "backend_cannot_serve", str(error), **facts)
            return False
        facts["backends"] = chosen[0]
        facts["predicted_gain_us"] = self._predicted(c, chosen)
        # An activation module written in Python may gain even where eager is best.
        composed = c.activation_module is not None and not type(
            c.activation_module
        ).__module__.startswith("torch.nn")
        if all(set(b.values()) == {BASELINE} for b in chosen) and not composed:
            asked = [p.with_piece(piece) for p in c.problems for piece in measure.pieces(p)]
            if c.fallback is not None:
                self.settle(c.fqn, "refused", c.fallback.code, c.fallback.reason, **facts)
            elif all(p in self.tuned for p in asked):
                text = "PyTorch's own path is the fastest backend for it."
                self.settle(c.fqn, "nothing_to_do", "eager_is_best", text, **facts)
            else:
                why = "the time budget ran out" if self.config.tune else "tuning is off"
                text = f"Dispatch takes PyTorch's own path; not measured here ({why})."
                self.settle(c.fqn, "nothing_to_do", "eager_by_default", text, **facts)
            return False
        reason = "Not measured: the rewrite of its group was given up."
        self.settle(c.fqn, "rejected", "group_dropped", reason, **facts)
        return True

    def _predicted(self, c: Candidate, chosen: list[dict[str, str]]) -> float | None:
        gain = 0.0
        known = False
        for problem, kind, backends in zip(c.problems, c.calls.kinds, chosen, strict=True):
            for piece, backend in backends.items():
                tuned = self.tuned.get(problem.with_piece(piece))
                if tuned is not None and {backend, BASELINE} <= set(tuned.samples):
                    known = True
                    saved = tuned.samples[BASELINE].median_us - tuned.samples[backend].median_us
                    gain += saved * kind.count
        if known:
            return gain
        for finding in self.profile.findings:
            if finding.fqn == c.fqn and finding.code == "linear_activation":
                return finding.predicted_gain_us
        return None

    def _measure_sites(self, candidates: list[Candidate]) -> list[Candidate]:
        """Verify every site, then A/B one site of each group; drop what fails or does not gain."""
        accurate = []
        for c in candidates:
            try:
                failed = site.failure(c)
            except Exception as error:  # noqa: BLE001  a backend's own error is an outcome too
                text = f"the rewrite raises {type(error).__name__}: {error}"
                self.settle(c.fqn, "rejected", "raises", text)
                continue
            if failed is None:
                accurate.append(c)
            else:
                self.settle(c.fqn, "rejected", "less_accurate", f"less accurate: {failed}")
        accurate = rule.complete(accurate, self.every)
        groups: dict[tuple[Any, ...], list[Candidate]] = {}
        for c in accurate:
            groups.setdefault(c.group, []).append(c)
        faster: list[Candidate] = []
        for i, members in enumerate(groups.values()):
            self.progress("sites", i, len(groups))
            share = self.budget.share(2 * (len(groups) - i), 2.0)
            with self.budget:
                pair, passes = site.pair(members[0], self.runner.device, share)
            if self._gains(members, pair, passes):
                faster.extend(members)
        self.progress("sites", len(groups), len(groups))
        names = {c.fqn for c in faster}
        return rule.complete([c for c in accurate if c.fqn in names], self.every)

    def _gains(self, members: list[Candidate], pair: measure.Pair, passes: int) -> bool:
        ratio = pair.speedup
        better = ratio.median > 1.0  # whether it is beyond noise is decided on the whole model
        for c in members:
            facts = {
                "before_us": pair.before.median_us * passes,
                "after_us": pair.after.median_us * passes,
                "speedup": ratio.median,
                "ci95": (ratio.low, ratio.high),
            }
            code = "slower" if ratio.high < 1.0 else "not_faster"
            word = "slower" if ratio.high < 1.0 else "not faster"
            text = f"{word}: {_ratio(ratio)}"
            if better:
                self.settle(c.fqn, "rejected", "group_dropped", _GROUP, **facts)
            else:
                self.settle(c.fqn, "rejected", code, text, **facts)
        return better

    # -- verifying ---------------------------------------------------------------------------

    def keep_accurate(
        self, candidates: list[Candidate]
    ) -> tuple[list[Candidate], tuple[Verdict, ...]]:
        """Verify the whole model; on a failure search for the sites that pass together."""
        if not candidates:
            return [], ()
        self.progress("verify", 0, 1)
        if self.judge is None:
            oracle, exact = make_oracle(self.model, self.runner, self.call, self.ran)
            self.notes.append(f"accuracy judged against: {oracle.name}")
            self.judge = verify.Judge(
                self.model,
                self.runner,
                self.call,
                draws=self.config.draws,
                oracle=oracle,
                seconds=self.config.time_budget_s,
                ran=self.ran,
                exact=exact,
            )
            del self.ran  # the judge keeps it while it is small
        verdicts = self._verdicts(candidates)
        kept = candidates
        failed = next((v for v in verdicts if not v.passed), None)
        if failed is not None:
            kept = self._bisect(candidates)
            names = {c.fqn for c in kept}
            for c in candidates:
                if c.fqn not in names:
                    text = f"less accurate in the whole model: {failed}"
                    self.settle(c.fqn, "rejected", "less_accurate", text)
            verdicts = self._verdicts(kept) if kept else []
            if not all(v.passed for v in verdicts):
                raise AssertionError("a verified set of rewrites failed when verified again")
        skipped = dict.fromkeys(self.judge.skipped)
        self.notes += [f"verification skipped {text}" for text in skipped]
        self.progress("verify", 1, 1)
        return kept, tuple(verdicts)

    def _verdicts(self, candidates: list[Candidate]) -> list[Verdict]:
        assert self.judge is not None
        swaps = SwapSet(rule.swaps(candidates))
        found = self.judge.verdicts(swaps)
        if self.runner.mode == "train" and all(v.passed for v in found):
            found += self._trajectory(swaps)
        return found

    def _bisect(self, candidates: list[Candidate]) -> list[Candidate]:
        units: dict[str, list[Candidate]] = {}
        for c in candidates:
            units.setdefault(c.unit, []).append(c)

        def passes(names: Any) -> bool:
            chosen = [c for name in names for c in units[name]]
            return all(v.passed for v in self._verdicts(chosen))

        with measure.Budget(self.config.time_budget_s) as budget:
            names = verify.keep_passing(list(units), passes, lambda: budget.left_s == 0)
        return [c for u in names for c in units[u]]

    def _trajectory(self, swaps: SwapSet) -> list[Verdict]:
        assert self.judge is not None
        if self.copies is None:
            try:
                copy.deepcopy(self.model)
            except (RuntimeError, TypeError, NotImplementedError) as error:
                self.notes.append(
                    f"optimizer steps not compared: the model cannot be copied ({error})"
                )
            self.copies = not any(n.startswith("optimizer steps not") for n in self.notes)
        return self.judge.trajectory(swaps, self.config.optimizer_steps) if self.copies else []

    # -- measuring ---------------------------------------------------------------------------

    def keep_fast(self, candidates: list[Candidate]) -> tuple[list[Candidate], measure.Pair | None]:
        """Measure the whole model; while it does not gain, drop the group with the least gain.

        Sites whose own A/B leaves them open stay only if the whole step with them is faster,
        beyond noise, than the step with the other rewrites alone.
        """
        kept, pair, proven = candidates, None, Ratio(0.0, 0.0, 0.0)
        while kept:
            self.progress("measure", 0, 1)
            pair = self._measure(kept)
            if not pair.speedup.low > self.config.min_speedup:
                kept = self._without_least(kept, pair.speedup)
                continue
            sure = [c for c in kept if not self._open(c)]
            if not sure or len(sure) == len(kept) or proven.low > 1.0:
                break
            proven = self._measure(kept, against=rule.complete(sure, self.every)).speedup
            if proven.low > 1.0:
                break
            text = f"no gain beyond noise: adds {_ratio(proven)} to the whole step"
            kept = self._drop(kept, [c for c in kept if self._open(c)], text)
        self.progress("measure", 1, 1)
        if pair is None or not kept:
            return [], None
        for c in kept:
            self.settle(c.fqn, "kept", "faster", self._kept_reason(c, pair.speedup, proven))
        return kept, pair

    def _measure(
        self, candidates: list[Candidate], against: list[Candidate] | None = None
    ) -> measure.Pair:
        with self.budget:
            return measure.model_pair(
                self.model,
                SwapSet(rule.swaps(candidates)),
                self.runner,
                self.call,
                budget_s=max(1.0, self.budget.left_s / 2),
                min_speedup=self.config.min_speedup if against is None else 1.0,
                against=SwapSet(rule.swaps(against or [])),
            )

    def _without_least(self, kept: list[Candidate], ratio: Ratio) -> list[Candidate]:
        least = min(kept, key=self._gain)
        dropped = [c for c in kept if c.group == least.group]
        if self.budget.left_s == 0:
            dropped = kept
        word = "slower" if ratio.high < 1.0 else "no gain beyond noise"
        return self._drop(kept, dropped, f"{word} end to end: {_ratio(ratio)}")

    def _drop(self, kept: list[Candidate], dropped: list[Candidate], why: str) -> list[Candidate]:
        for c in dropped:
            self.settle(c.fqn, "rejected", "slower_model", why)
        names = {c.fqn for c in kept} - {c.fqn for c in dropped}
        left = rule.complete([c for c in kept if c.fqn in names], self.every)
        for c in kept:
            if c.fqn in names - {other.fqn for other in left}:
                self.settle(c.fqn, "rejected", "group_dropped", _GROUP)
        return left

    def _open(self, c: Candidate) -> bool:
        """Whether the site's own A/B is not decided beyond noise."""
        interval = self.outcomes[c.fqn].ci95
        return interval is None or interval[0] <= 1.0

    def _gain(self, c: Candidate) -> float:
        known = self.outcomes[c.fqn]
        members = sum(1 for other in self.every if other.group == c.group)
        return ((known.before_us or 0.0) - (known.after_us or 0.0)) * members

    def _kept_reason(self, c: Candidate, step: Ratio, proven: Ratio) -> str:
        known = self.outcomes[c.fqn]
        name = known.backends.get("forward", "")
        what = f"with {c.activation} in one call" if c.activation != "none" else "alone"
        assert known.speedup is not None
        assert known.ci95 is not None
        text = f"{name}, {what}, {_ratio(Ratio(known.speedup, *known.ci95))}"
        if self._open(c):
            evidence = f"with it and the other open sites {_ratio(proven)} of the step without"
            if not proven.low > 1.0:
                evidence = f"all kept rewrites together {_ratio(step)}"
            text += f"; open by itself, decided on the whole step: {evidence}"
        if len(c.problems) > 1:
            text += f"; all {len(c.problems)} kinds of input seen are verified and measured"
        return text + (f"; activation left alone: {c.fallback.reason}" if c.fallback else "")


def heaviest_first(candidates: list[Candidate]) -> list[Problem]:
    """Distinct Problems of every kind of call, those with the most arithmetic in a step first."""
    work: dict[Problem, float] = {}
    for c in candidates:
        for problem, kind in zip(c.problems, c.calls.kinds, strict=True):
            flops = families()[rule.RULE].cost(problem).flops * kind.count
            work[problem] = work.get(problem, 0.0) + flops
    return sorted(work, key=lambda p: -work[p])


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
