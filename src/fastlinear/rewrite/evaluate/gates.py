"""Gated MLPs as findings: what runs, what is fused, and what ``gated_mlp`` saves on a model's
inputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.cost import floor_us, measure_ceilings, roofline
from fastlinear.core.errors import UnsupportedError
from fastlinear.core.precision import DTYPE_NAMES
from fastlinear.core.problem import Problem
from fastlinear.core.timing import Ratio, Samples, interleave, paired_ratio
from fastlinear.core.wrappers import PLAIN
from fastlinear.dispatch.backend import family
from fastlinear.ops.gated_mlp.problem import NAME, STEP
from fastlinear.ops.gated_mlp.selection import problem_of
from fastlinear.ops.gated_mlp.stacking import Needs
from fastlinear.profile.raised import told
from fastlinear.profile.records import IN_PLACE, Finding
from fastlinear.profile.timeline import Timeline, timeline
from fastlinear.rewrite.evaluate.covered import covered
from fastlinear.rewrite.evaluate.gates_flow import Watch, could_hold
from fastlinear.rewrite.evaluate.gates_match import sites_of
from fastlinear.rewrite.evaluate.gates_saved_memory import needs_of, saved_by
from fastlinear.rewrite.evaluate.gates_saved_memory import told as kept_told
from fastlinear.rewrite.evaluate.gates_unseen import findings
from fastlinear.rewrite.evaluate.measure import backends_of
from fastlinear.rewrite.evaluate.not_measured import budget_spent
from fastlinear.rewrite.evaluate.of_the_step import of_the_step
from fastlinear.rewrite.outcome import SiteOutcome
from fastlinear.rewrite.rules.gated import passes
from fastlinear.rewrite.rules.gated.modules import GatedSite
from fastlinear.rewrite.work import OFFERED, Work, in_words

CODE = NAME
_MOST_S = 1.0  # of measuring a module
_AS_FAST = 1.02  # a smaller gain is none
_SHOWN_US = 1e5  # a longer call is shown only where it can be shorter


@dataclass
class _Seen:
    """Calls of one module in a run: how many, the first input, and whether its gradient is
    wanted."""

    calls: int = 0
    x: Tensor | None = None
    grad: bool = False


@dataclass(frozen=True)
class _Found:
    """What one kind of call takes as it is and by ``gated_mlp``, in microseconds, how much faster
    that is and whether beyond noise, what runs in each, and what is to be said of the times; in
    training also the bytes that it keeps for its backward as it is."""

    before_us: float
    after_us: float
    speedup: Ratio
    timelines: dict[str, Timeline]
    said: str = ""
    kept: int | None = None

    @property
    def faster(self) -> bool:
        return self.speedup.low > 1.0


def find(work: Work) -> None:
    """Add a finding for every gated MLP of the model, rewritten or not, faster or not; and for
    those that only a run shows.

    Nothing is rewritten here. The model runs once more, and is to be preserved by the caller.
    """
    if not (work.allows(NAME) and could_hold(work.model)):
        return
    sites, watch = sites_of(work), Watch(work.model)
    seen = _observed(work, sites, watch)
    known: dict[Any, _Found] = {}
    found, others = [], work.profile.findings
    for i, site in enumerate(sites):
        x, after, calls = seen[site].x, site.instead(), seen[site].calls
        if not calls:
            continue
        if x is None or not _plain(site, x):
            why = "its input and parameters are no plain tensors of one dtype with kernels for it"
            found.append(_unmeasured(work, site, calls, why))
            continue
        problem, kept = _problem(work, site, x), _kept(work, site)
        needs = needs_of(site, seen[site].grad)
        key = problem, site.part, site.glu, site.opened and site.opened.alike, needs
        if after is not None and key not in known and (work.budget.left_s > 0 or kept is not None):
            share = work.budget.share(4 * (len(sites) - i), _MOST_S)
            with work.budget:
                known[key] = _measured(work, site, seen[site], after, kept, share)
        elif key not in known and (tried := work.tried.get((NAME, site.names[0]))) is not None:
            known[key] = _Found(*tried, {})
        one = _in_step(work, known.get(key), calls)
        wanted = needs if after is not None else None
        found.append(_finding(work, site, problem, calls, one, wanted))
        if kept is not None or (found[-1].predicted_gain_us and not _one_by_one(work, site)):
            others = covered(others, site.names, found[-1])
    found += findings(work, watch.found, {name for s in sites for name in s.weights})
    ranked = sorted((*others, *found), key=lambda f: -f.predicted_gain_us)
    work.profile = replace(work.profile, findings=tuple(ranked))


def _in_step(work: Work, measured: _Found | None, calls: int) -> _Found | None:
    """The same with times that are a part of the step's."""
    if measured is None:
        return None
    before_us, after_us, said = of_the_step(work, measured.before_us, measured.after_us, calls)
    return replace(measured, before_us=before_us, after_us=after_us, said=said)


def _kept(work: Work, site: GatedSite) -> SiteOutcome | None:
    """The outcome of its first linear, where the module is rewritten as one call."""
    outcome = work.outcomes.get(site.names[0])
    if outcome is None or (outcome.rule, outcome.status) != (NAME, "kept"):
        return None
    return outcome


def _gain(work: Work, site: GatedSite, calls: int, measured: _Found | None) -> tuple[float, str]:
    """Microseconds a step that one call saves of the model as it is left, and what is to be said
    of those that are saved already."""
    if measured is None or not measured.faster:
        return 0.0, ""
    gain, already = (measured.before_us - measured.after_us) * calls, _one_by_one(work, site)
    if not already:
        return max(0.0, gain), ""
    text = f"; of {gain:.1f} us a step its linears, rewritten one by one, save {already:.1f}"
    return max(0.0, gain - already), text


def _one_by_one(work: Work, site: GatedSite) -> float:
    """Microseconds a step that rewrites of its linears save already, where it is no one call."""
    known = [work.outcomes.get(name) for name in site.names]
    if _kept(work, site) is not None:
        return 0.0
    saved = ((o.before_us or 0.0) - (o.after_us or 0.0) for o in known if o and o.status == "kept")
    return max(0.0, sum(saved))


def _observed(work: Work, sites: list[GatedSite], watch: Watch) -> dict[GatedSite, _Seen]:
    """One forward, watched, with hooks on the sites: of a part of a forward, on its first linear,
    or on products with that one's weight.

    No backward, in which a checkpoint would run its part again, and otherwise.
    """
    seen = {site: _Seen() for site in sites}

    def look(site: GatedSite, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        record, given = seen[site], (*args, *kwargs.values())
        record.calls += 1
        if record.x is None and len(given) == 1 and type(given[0]) is Tensor:
            record.x, record.grad = given[0].detach().clone(), given[0].requires_grad

    handles = []
    for site in sites:
        if site.gated.gate in site.written:
            watch.on_product(site.weights[0], partial(look, site))
            continue
        called = site.layers[0] if site.part else site.module
        handles.append(called.register_forward_pre_hook(partial(look, site), with_kwargs=True))
    try:
        call, train = work.own_call(), work.runner.mode == "train"
        doing = "in the run that shows what its layers are given"
        # parts that are compiled would have the watching compiled as well
        with (
            told(work.runner.function, work.model, doing),
            torch.compiler.set_stance("force_eager"),
            watch,
            torch.set_grad_enabled(train),
        ):
            work.model(*call.args, **call.kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _plain(site: GatedSite, x: Tensor) -> bool:
    """Whether ``gated_mlp`` takes the module's parameters with this input."""
    dtypes = {p.dtype for p in site.parameters}
    if any(type(p) not in PLAIN for p in site.parameters):
        return False
    return bool(x.numel()) and x.dtype in DTYPE_NAMES and dtypes == {x.dtype}


def _problem(work: Work, site: GatedSite, x: Tensor) -> Problem:
    weights, biases = site.held
    rows = x.reshape(-1, x.shape[-1])
    gated = site.gated
    train = work.runner.mode == "train"
    return problem_of(rows, weights, biases, gated.activation, gated.order, None, train)


def _measured(
    work: Work,
    site: GatedSite,
    seen: _Seen,
    after: Callable[[Tensor], Tensor],
    kept: SiteOutcome | None,
    budget_s: float,
) -> _Found:
    """The module as it is, and by ``gated_mlp``; with its backward in training, dx only where the
    model takes that. Times of a module that is rewritten are known."""
    train, device = work.runner.mode == "train", work.runner.device
    assert seen.x is not None
    given = seen.x.requires_grad_(train and seen.grad)
    units = {
        name: _unit(f, given, site, train)
        for name, f in {"before": site.before, "after": after}.items()
    }
    with torch.set_grad_enabled(train):
        for unit in units.values():
            unit()
        if kept is not None and kept.before_us is not None and kept.after_us is not None:
            calls = kept.calls / len(site.names)
            before_us, after_us = kept.before_us / calls, kept.after_us / calls
            low, high = kept.ci95 or (before_us / after_us,) * 2
            ratio = Ratio(kept.speedup or before_us / after_us, low, high)
        else:
            before, ours = _times(units, device, budget_s)
            before_us, after_us = before.median_us, ours.median_us
            ratio = paired_ratio(before, ours)
        shown = ratio.low > 1.0 or before_us < _SHOWN_US
        timelines = {n: timeline(unit, device) for n, unit in units.items() if shown}
        held = saved_by(lambda: site.before(given), site.parameters) if train else None
    return _Found(before_us, after_us, ratio, timelines, kept=held)


def _times(
    units: dict[str, Callable[[], Any]], device: torch.device, budget_s: float
) -> tuple[Samples, Samples]:
    times = interleave(units, device=device, metric="wall", rounds=9, budget_s=budget_s)
    return times["before"], times["after"]


def _unit(
    f: Callable[[Tensor], Tensor], x: Tensor, site: GatedSite, train: bool
) -> Callable[[], Any]:
    wanted = [t for t in (x, *site.parameters) if t.requires_grad]
    if not (train and wanted):
        return lambda: f(x)
    dy = torch.randn_like(f(x))
    return lambda: torch.autograd.grad(f(x), wanted, dy, allow_unused=True)


def _finding(
    work: Work,
    site: GatedSite,
    problem: Problem,
    calls: int,
    measured: _Found | None,
    needs: Needs | None,
) -> Finding:
    """``needs``: which gradients ``gated_mlp`` would be asked for; None where it is not offered."""
    asked = problem.with_piece(STEP) if problem.needs_grad else problem
    cost = family(NAME).cost(asked)
    limits = measure_ceilings(str(work.runner.device), problem.dtype, problem.precision)
    gated, (_, h, _) = site.gated, site.sizes
    backends = _backends(work, problem)
    per_number = problem.dim("M") * h * getattr(torch, problem.dtype).itemsize
    told, *numbers = _passes(site, backends)
    theirs, ours = (count * per_number for count in numbers)
    avoidable = max(0, theirs - ours)
    saved = f"{_size(avoidable)} or {avoidable / limits.bytes_per_s * 1e6:.1f} us are avoidable"
    before_us = 0.0 if measured is None else measured.before_us
    gain_us, already = _gain(work, site, calls, measured)
    worth = site.advised and (measured is None or gain_us > 0)
    held = None if measured is None else measured.kept
    memory, kept_bytes = ("", {}) if needs is None else kept_told(problem, needs, backends, held)
    message = (
        f"products {site.products}; {told.format(_size(theirs), _size(ours))}: "
        f"{saved if avoidable else 'no pass is avoidable'}. "
        f"{memory}{_in_words(work, site, measured)}{already}. {_remedy(work, site, worth)}"
    )
    return Finding(
        code=CODE,
        fqn=site.fqn,
        title=f"gated MLP of {h} hidden features, {gated.activation}",
        message=message,
        measured_us=before_us * calls,
        floor_us=floor_us(cost, limits) * calls,
        predicted_gain_us=gain_us,
        flops=cost.flops * calls,
        bytes=cost.bytes * calls,
        bound=roofline(cost, limits, before_us or 1.0).bound,
        details={
            **_facts(work, site, calls, site.advised and (not already or worth)),
            "backends": backends,
            "avoidable_bytes": avoidable * calls,
            **kept_bytes,
            "speedup": None if measured is None else measured.speedup.median,
            "timeline": {}
            if measured is None
            else {name: t.to_json() for name, t in measured.timelines.items()},
        },
    )


def _backends(work: Work, problem: Problem) -> dict[str, str]:
    """Piece → backend that is chosen; a forced one only where it can serve."""
    try:
        return backends_of(problem, work.config.backends.get(NAME))
    except UnsupportedError:
        return backends_of(problem, None)


def _unmeasured(work: Work, site: GatedSite, calls: int, why: str) -> Finding:
    """A finding without numbers."""
    _, h, _ = site.sizes
    return Finding.untimed(
        code=CODE,
        fqn=site.fqn,
        title=f"gated MLP of {h} hidden features, {site.gated.activation}",
        message=f"products {site.products}; not measured: {why}. "
        f"{_remedy(work, site, site.advised)}",
        details={**_facts(work, site, calls, site.advised), "avoidable_bytes": 0},
    )


def _facts(work: Work, site: GatedSite, calls: int, advised: bool = True) -> dict[str, Any]:
    return {
        "activation": site.gated.activation,
        "order": site.gated.order,
        "linears": list(site.gated.names),
        "calls": calls,
        "advice": IN_PLACE if _kept(work, site) else site.advice(work.model) if advised else None,
    }


def _passes(site: GatedSite, backends: dict[str, str]) -> tuple[Any, ...]:
    """What is fused as it is and by ``gated_mlp``, with room for two sizes; then both in numbers
    of hidden size a token. Where PyTorch's own path is chosen, the second is one fused pass's."""
    activation, train = site.gated.activation, "backward" in backends
    known: dict[str, Any] = {"train": train}
    own = dict.fromkeys(backends, passes.EAGER)
    down = site.gated.down is not None
    opened = None if site.opened is None else site.opened.moved
    laid = site.glu and site.gated.up is not None
    opened = passes.LAID_AND_GLU if laid else opened
    theirs = passes.moved(activation, own, **known, down=down, glu=site.glu, opened=opened)
    first = f"as PyTorch runs them {passes.words(activation, own, **known, glu=site.glu)}; "
    if site.opened is not None:
        first += f"{activation} and the product are written out as {len(site.opened.nodes)} ops; "
    first += "laying its halves together is another; " if laid else ""
    least = "at least " if opened is not None and train else ""
    first += least + "{} a call are written or read between them"
    chosen = backends
    if set(backends.values()) == {passes.EAGER}:
        chosen = dict.fromkeys(backends, "elementwise")
        second = "gated_mlp takes PyTorch's own path for it, one fused pass would leave {}"
    else:
        names = ", ".join(f"{piece} {name}" for piece, name in backends.items() if piece != STEP)
        fused = passes.words(activation, backends, **known)
        second = f"by gated_mlp ({names}) {fused}; {{}} are left"
    ours = passes.moved(activation, chosen, **known, down=down)
    return f"{first}; {second}", theirs, ours


def _in_words(work: Work, site: GatedSite, measured: _Found | None) -> str:
    """What was measured of a call."""
    if measured is None:
        spent = work.budget.left_s == 0
        return f"Not measured: {budget_spent(work)}" if spent else "Not measured here"
    ratio = measured.speedup
    text = (
        f"{measured.before_us:.1f} us a call, {measured.after_us:.1f} us by gated_mlp "
        f"({in_words(ratio)}{f'; {measured.said}' if measured.said else ''})"
    )
    if measured.faster:
        return text
    if _kept(work, site) is not None:
        return f"{text}: open by itself, decided on the whole step"
    if ratio.high < 1.0:
        return f"{text}: PyTorch's own path is faster"
    if ratio.median > _AS_FAST:
        return f"{text}: not beyond noise"
    return f"{text}: PyTorch's own path is as fast"


def _remedy(work: Work, site: GatedSite, worth: bool = True) -> str:
    """What to do about it where that is worth it, and why ``optimize_`` has not done it."""
    if _kept(work, site) is not None:
        return IN_PLACE
    outcomes = {name: work.outcomes.get(name) for name in site.names}
    first = outcomes[site.names[0]]
    why = work.gates_left.get(site.names[0]) or work.left_alone.get(site.names[0])
    if first is not None and (first.rule, first.status) == (NAME, "rejected"):
        why = first.reason.rstrip(".")
    for name, outcome in outcomes.items():
        if (
            outcome is not None
            and why is not None
            and why.endswith(f"{name!r} is left alone itself")
        ):
            why = f"{why}: {outcome.reason.rstrip('.')}"
    left = "" if why is None else f"optimize_ leaves it alone: {why}"
    left = OFFERED if site.names[0] in work.offered else left
    if not worth:
        return left or "optimize_ leaves it as it is"
    advice = site.advice(work.model)
    return f"{advice}; {left}" if left else advice


def _size(count: float) -> str:
    return f"{count / 1e6:.2f} MB" if count < 1e9 else f"{count / 1e9:.2f} GB"
