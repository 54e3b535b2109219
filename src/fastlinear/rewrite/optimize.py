"""optimize_: profile, match, tune, verify, measure, and keep only what is measured faster."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from fastlinear.core.compare import Verdict
from fastlinear.core.environment import environment
from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.problem import Problem
from fastlinear.core.progress import Progress, silent
from fastlinear.core.settings import Config
from fastlinear.core.timing import Ratio
from fastlinear.dispatch.backend import families
from fastlinear.dispatch.tune import BASELINE, Tuned
from fastlinear.profile import ProfileReport, profile
from fastlinear.profile.state import preserved
from fastlinear.profile.step import check_model, device_of, normalize_inputs
from fastlinear.rewrite import measure, verify
from fastlinear.rewrite.eligible import Refusal, linear_modules
from fastlinear.rewrite.observe import observe
from fastlinear.rewrite.plan import Plan, Rewrite, model_facts
from fastlinear.rewrite.result import Result, SiteOutcome
from fastlinear.rewrite.rules import linear_act as rule
from fastlinear.rewrite.rules.linear_act import Candidate, FilterFn
from fastlinear.rewrite.running import Call, LossFn, Runner, check_runs, input_specs
from fastlinear.rewrite.swap import SwapSet

_NOTHING_CODES = ("already_fastlinear", "already_rewritten", "not_called", "empty_input")


def optimize_(
    model: nn.Module,
    inputs: Any,
    *,
    config: Config | None = None,
    filter_fn: FilterFn | None = None,
    loss_fn: LossFn | None = None,
    progress: Progress = silent,
) -> Result:
    """Make a model's linear layers as fast as this machine allows, in place and reversibly.

    Profiles the model, finds linears (with the activation that follows) that another backend
    computes faster, exchanges ``forward`` on those instances, verifies outputs (in train mode
    also every gradient and a few optimizer steps) against a float64 oracle, measures the whole
    model before and after, and keeps only what is faster beyond noise. Parameters, buffers,
    ``state_dict`` keys, classes and hooks stay as they are.

    Args:
        model: any eager module on one device, with real values.
        inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
        config: what may be done; see ``fl.Config``.
        filter_fn: ``filter_fn(module, fqn)`` for every linear; False leaves it alone.
        loss_fn: output → scalar loss for train mode; by default ``output.loss`` or a mean square.
        progress: called as ``progress(stage, done, total)``.

    Returns:
        A ``Result`` with an outcome for every linear of the model.

    Raises:
        InputError: the inputs do not fit the model (its exception is the cause), or an argument
            is of the wrong kind. Whatever is raised, the model is left as it was.

    Attach hooks or adapters before optimizing, or ``result.revert()`` first: a rewritten linear
    returns its activated output.

    >>> import torch, fastlinear as fl
    >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU())
    >>> result = fl.optimize_(model, torch.ones(2, 8))
    >>> sum(result.summary().values())
    1
    >>> result.revert()
    """
    config = config or Config()
    work = prepare("optimize_", model, inputs, config, loss_fn, progress)
    with preserved(model, config.mode):
        check_runs("optimize_", model, work.call, work.runner)
    work.profile = profile(model, inputs, mode=config.mode, loss_fn=loss_fn, progress=progress)
    with preserved(model, config.mode):
        candidates, left = work.match(filter_fn)
        for fqn, refusal in left.items():
            status = "nothing_to_do" if refusal.code in _NOTHING_CODES else "refused"
            work.settle(fqn, status, refusal.code, refusal.reason)
        kept = work.choose(candidates)
        kept, verdicts = work.keep_accurate(kept)
        kept, pair = work.keep_fast(kept)
        if pair is None:
            verdicts = ()
    return work.finish(kept, verdicts, pair)


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

    def match(self, filter_fn: FilterFn | None) -> tuple[list[Candidate], dict[str, Refusal]]:
        """Watch one run and match every linear."""
        self.progress("match", 0, 1)
        sites = self.profile.sites
        modules = dict(self.model.named_modules())
        activations = {fqn: modules[fqn] for fqn in rule.activations_of(sites)}
        seen = observe(
            self.model,
            linear_modules(self.model),
            activations,
            lambda: self.runner.results(self.model, self.call),
        )
        backend = self.config.backends.get(rule.RULE)
        found = rule.match(self.model, sites, seen, backend=backend, filter_fn=filter_fn)
        self.every = found[0]
        self.progress("match", 1, 1)
        return found

    def choose(self, candidates: list[Candidate]) -> list[Candidate]:
        """Tune the distinct Problems and drop the sites that have nothing to gain."""
        if self.config.families is not None and rule.RULE not in self.config.families:
            for c in candidates:
                self.settle(c.fqn, "refused", "family_off", "Config.families leaves it out.")
            return []
        problems = _heaviest_first(candidates)
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
            backends = measure.backends_of(c.problem, c.backend)
        except UnsupportedError as error:
            self.settle(c.fqn, "refused", "backend_cannot_serve", str(error), **facts)
            return False
        facts["backends"] = backends
        facts["predicted_gain_us"] = self._predicted(c, backends)
        # An activation module written in Python may gain even where eager is best.
        composed = c.activation_module is not None and not type(
            c.activation_module
        ).__module__.startswith("torch.nn")
        if set(backends.values()) == {BASELINE} and not composed:
            if c.fallback is not None:
                self.settle(c.fqn, "refused", c.fallback.code, c.fallback.reason, **facts)
            elif all(c.problem.with_piece(p) in self.tuned for p in measure.pieces(c.problem)):
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

    def _predicted(self, c: Candidate, backends: dict[str, str]) -> float | None:
        gain = 0.0
        known = False
        for piece, backend in backends.items():
            tuned = self.tuned.get(c.problem.with_piece(piece))
            if tuned is not None and {backend, BASELINE} <= set(tuned.samples):
                known = True
                gain += tuned.samples[BASELINE].median_us - tuned.samples[backend].median_us
        if known:
            return gain * c.calls.calls
        for finding in self.profile.findings:
            if finding.fqn == c.fqn and finding.code == "linear_activation":
                return finding.predicted_gain_us
        return None

    def _measure_sites(self, candidates: list[Candidate]) -> list[Candidate]:
        """Verify every site, then A/B one site of each group; drop what fails or does not gain."""
        accurate = []
        for c in candidates:
            failed = verify.site_failure(c)
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
                pair = measure.site_pair(members[0], self.runner.device, share)
            if self._gains(members, pair):
                faster.extend(members)
        self.progress("sites", len(groups), len(groups))
        names = {c.fqn for c in faster}
        return rule.complete([c for c in accurate if c.fqn in names], self.every)

    def _gains(self, members: list[Candidate], pair: measure.Pair) -> bool:
        ratio = pair.speedup
        better = ratio.median > 1.0  # whether it is beyond noise is decided on the whole model
        for c in members:
            facts = {
                "before_us": pair.before.median_us * c.calls.calls,
                "after_us": pair.after.median_us * c.calls.calls,
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
        oracle = verify.make_oracle(self.model, self.runner, self.call)
        judge = verify.Judge(
            self.model,
            self.runner,
            self.call,
            draws=self.config.draws,
            oracle=oracle,
            seconds=self.config.time_budget_s,
        )
        last: list[Verdict] = []

        def check(chosen: list[Candidate]) -> bool:
            swaps = SwapSet(rule.swaps(chosen))
            found = judge.verdicts(swaps)
            if self.runner.mode == "train" and all(v.passed for v in found):
                found += self._trajectory(swaps, oracle)
            last[:] = found
            return all(v.passed for v in found)

        kept = candidates
        if not check(candidates):
            failed = next(v for v in last if not v.passed)
            kept = self._bisect(candidates, check)
            names = {c.fqn for c in kept}
            for c in candidates:
                if c.fqn not in names:
                    text = f"less accurate in the whole model: {failed}"
                    self.settle(c.fqn, "rejected", "less_accurate", text)
            if kept and not check(kept):
                raise AssertionError("a verified set of rewrites failed when verified again")
        self.notes.append(f"accuracy judged against: {oracle.name}")
        self.notes += [f"verification skipped {text}" for text in dict.fromkeys(judge.skipped)]
        self.progress("verify", 1, 1)
        return kept, tuple(last) if kept else ()

    def _bisect(
        self, candidates: list[Candidate], check: Callable[[list[Candidate]], bool]
    ) -> list[Candidate]:
        units: dict[str, list[Candidate]] = {}
        for c in candidates:
            units.setdefault(c.unit, []).append(c)
        with measure.Budget(self.config.time_budget_s) as budget:
            names = verify.keep_passing(
                list(units),
                lambda chosen: check([c for u in chosen for c in units[u]]),
                lambda: budget.left_s == 0,
            )
        return [c for u in names for c in units[u]]

    def _trajectory(self, swaps: SwapSet, oracle: verify.Oracle) -> list[Verdict]:
        try:
            copy.deepcopy(self.model)
        except (RuntimeError, TypeError, NotImplementedError) as error:
            note = f"optimizer steps not compared: the model cannot be copied ({error})"
            if note not in self.notes:
                self.notes.append(note)
            return []
        steps = self.config.optimizer_steps
        return verify.trajectory_verdicts(self.model, swaps, self.runner, self.call, oracle, steps)

    # -- measuring ---------------------------------------------------------------------------

    def keep_fast(self, candidates: list[Candidate]) -> tuple[list[Candidate], measure.Pair | None]:
        """Measure the whole model; while it does not gain, drop the group with the least gain."""
        kept = candidates
        while kept:
            self.progress("measure", 0, 1)
            swaps = SwapSet(rule.swaps(kept))
            with self.budget:
                pair = measure.model_pair(
                    self.model,
                    swaps,
                    self.runner,
                    self.call,
                    budget_s=max(1.0, self.budget.left_s / 2),
                    min_speedup=self.config.min_speedup,
                )
            ratio = pair.speedup
            if ratio.low > self.config.min_speedup:
                self.progress("measure", 1, 1)
                for c in kept:
                    self.settle(c.fqn, "kept", "faster", self._kept_reason(c))
                return kept, pair
            least = min(kept, key=self._gain)
            dropped = [c for c in kept if c.group == least.group]
            if self.budget.left_s == 0:
                dropped = kept
            word = "slower" if ratio.high < 1.0 else "no gain beyond noise"
            text = f"{word} end to end: {_ratio(ratio)}"
            for c in dropped:
                self.settle(c.fqn, "rejected", "slower_model", text)
            names = {c.fqn for c in kept} - {c.fqn for c in dropped}
            kept = rule.complete([c for c in kept if c.fqn in names], self.every)
        self.progress("measure", 1, 1)
        return [], None

    def _gain(self, c: Candidate) -> float:
        site = self.outcomes[c.fqn]
        members = sum(1 for other in self.every if other.group == c.group)
        return ((site.before_us or 0.0) - (site.after_us or 0.0)) * members

    def _kept_reason(self, c: Candidate) -> str:
        site = self.outcomes[c.fqn]
        name = site.backends.get("forward", "")
        what = f"with {c.activation} in one call" if c.activation != "none" else "alone"
        left = f"; activation left alone: {c.fallback.reason}" if c.fallback else ""
        assert site.speedup is not None
        assert site.ci95 is not None
        return f"{name}, {what}, {_ratio(Ratio(site.speedup, *site.ci95))}{left}"

    # -- finishing ---------------------------------------------------------------------------

    def finish(
        self, kept: list[Candidate], verdicts: tuple[Verdict, ...], pair: measure.Pair | None
    ) -> Result:
        """Switch the kept rewrites on and write everything down."""
        facts = environment(self.runner.device)
        rewrites = tuple(self._rewrite(c) for c in kept)
        plan = Plan(
            model=model_facts(self.model),
            mode=self.config.mode,
            environment=facts,
            inputs=input_specs(self.call),
            rewrites=rewrites,
            fastlinear=sys.modules["fastlinear"].__version__,
            tuned=tuple(self._tuned_choices(kept)),
        )
        self._note_packed(kept)
        step = self.profile.step_us
        swaps = SwapSet(rule.swaps(kept))
        result = Result(
            model_class=type(self.model).__qualname__,
            mode=self.config.mode,
            device=str(self.runner.device),
            sites=tuple(
                self.outcomes[fqn] for fqn in linear_modules(self.model) if fqn in self.outcomes
            ),
            verdicts=verdicts,
            before_us=pair.before.median_us if pair else step,
            after_us=pair.after.median_us if pair else step,
            speedup=pair.speedup if pair else Ratio(1.0, 1.0, 1.0),
            samples={
                "before": list(pair.before.us) if pair else [],
                "after": list(pair.after.us) if pair else [],
            },
            plan=plan,
            profile=self.profile,
            notes=tuple(dict.fromkeys(self.notes)),
            _swaps=swaps,
        )
        swaps.on()
        return result

    def _note_packed(self, kept: list[Candidate]) -> None:
        packed = [c for c in kept if self.outcomes[c.fqn].backends["forward"] == "onednn_packed"]
        if packed:
            weights = {id(w): w for c in packed for w in c.module.parameters()}
            size = sum(w.nbytes for w in weights.values() if w.dim() == 2) / (1 << 20)
            self.notes.append(
                f"onednn_packed keeps a second copy of {len(packed)} weights ({size:.1f} MiB)"
            )

    def _rewrite(self, c: Candidate) -> Rewrite:
        return Rewrite(
            fqn=c.fqn,
            rule=rule.RULE,
            activation=c.activation,
            route=c.route,
            activation_fqn=c.activation_fqn,
            parent_fqn=c.parent_fqn,
            backend=c.backend,
            problem=c.problem.to_json(),
            backends=self.outcomes[c.fqn].backends,
        )

    def _tuned_choices(self, kept: list[Candidate]) -> list[dict[str, Any]]:
        wanted = {c.problem.with_piece(p) for c in kept for p in measure.pieces(c.problem)}
        return [
            {
                "problem": p.to_json(),
                "best": t.best,
                "times_us": {name: s.median_us for name, s in t.samples.items()},
            }
            for p, t in self.tuned.items()
            if p in wanted
        ]


_GROUP = "Faster alone, but the rewrite it belongs to was given up."


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
            function, expected="config to be a fl.Config", received=type(config).__name__
        )
    check_model(model)
    check_backends(function, config)
    call = Call(*normalize_inputs(inputs))
    device = device_of(model, (call.args, call.kwargs))
    homes = {str(p.device) for p in model.parameters()}
    if len(homes) > 1:
        raise InputError(
            function,
            expected="a model on one device",
            received=f"parameters on {', '.join(sorted(homes))}",
            remedy="Move the model to one device first.",
        )
    runner = Runner(config.mode, loss_fn, device, config.seed)
    return Work(model, call, runner, config, measure.Budget(config.time_budget_s), progress)


def check_backends(function: str, config: Config) -> None:
    """Raise InputError for a family or backend that does not exist."""
    known = families()
    named = (*config.backends, *(config.families or ()))
    for name in named:
        if name not in known:
            raise InputError(
                function, expected=f"families in {sorted(known)}", received=f"{name!r}"
            )
    for name, backend in config.backends.items():
        names = sorted({b.name for b in known[name].candidates("forward")})
        if backend not in names:
            raise InputError(
                function,
                expected=f"a backend of {name} in {names}",
                received=repr(backend),
                remedy="Leave it out to let fastlinear choose.",
            )


def _heaviest_first(candidates: list[Candidate]) -> list[Problem]:
    """Distinct Problems, those with the most arithmetic in one step first."""
    work: dict[Problem, float] = {}
    for c in candidates:
        flops = families()[rule.RULE].cost(c.problem).flops * c.calls.calls
        work[c.problem] = work.get(c.problem, 0.0) + flops
    return sorted(work, key=lambda p: -work[p])


def _ratio(ratio: Ratio) -> str:
    return f"{ratio.median:.2f}x [{ratio.low:.2f}, {ratio.high:.2f}]"
