"""Choosing chains: a run of linears as one call, against the layers one by one."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NoReturn

from fastlinear.core.errors import NotYetError, UnsupportedError
from fastlinear.core.timing import Ratio, Samples, paired_ratio
from fastlinear.dispatch.tune import BASELINE
from fastlinear.fastpath import lookup
from fastlinear.rewrite.evaluate import measure, site
from fastlinear.rewrite.evaluate.findings import a_call, match
from fastlinear.rewrite.evaluate.not_measured import NO_TIME, NOT_COMPILED, budget_spent
from fastlinear.rewrite.evaluate.of_the_step import on_the_step
from fastlinear.rewrite.evaluate.out_of_memory import code_of
from fastlinear.rewrite.finding import in_words
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.candidate import OWN, Candidate
from fastlinear.rewrite.verify.finite import NOT_FINITE
from fastlinear.rewrite.work import GROUP_DROPPED, UNDECIDED, Work


def choose_chains(
    work: Work, candidates: list[Candidate], chosen: list[Candidate]
) -> list[Candidate]:
    """``chosen`` with every chain in place of its linears that is faster as one call than as the
    model's own layers and than these linears rewritten one by one.

    Raises UnsupportedError when a forced backend can serve none of them.
    """
    chains = match(work, candidates)
    for family, forced in work.config.backends.items():
        own = [c for c in chains if (c.rule, c.dispatch.backend) == (family, forced)]
        unable = [why for chain in own if (why := _cannot_serve(chain)) is not None]
        if own and len(unable) == len(own):
            fail_forced(family, forced, unable[0])
    alone = {c.fqn: c for c in chosen}
    single = dict(alone)
    modules = [c for chain in chains for c in members(chain) if c.kind == OWN]
    work.every = [*work.every, *modules]
    measured: dict[Any, tuple[dict[str, Samples], int] | None] = {}
    steps: dict[Any, Ratio | None] = {}
    for i, chain in enumerate(chains):
        work.progress("chains", i, len(chains))
        if (why := _in_the_way(chain, single)) is not None:
            _leave(work, chain, "in_the_way", why)
            continue
        key = _kind(chain, single)
        if key not in measured and work.budget.left_s == 0:
            _leave(work, chain, NO_TIME, f"not measured: {budget_spent(work)}")
            continue
        if key not in measured:
            measured[key] = _measure(work, chain, single, len(chains) - i)
        found = measured[key]
        if found is not None:
            work.tried[chain.tried] = a_call(chain, *found)
        if found is None or not _accurate(work, chain):
            continue
        if key not in steps and "layers" in found[0]:
            alike = [c for c in chains[i:] if _kind(c, single) == key]
            taking = _taking(alike, single, alone)
            steps[key] = on_the_step(work, single, taking, len(chains) - i)
        if _gains(work, chain, *found, steps.get(key)):
            single = _with(chain, single, alone)
    work.progress("chains", len(chains), len(chains))
    work.every = [single.get(c.fqn, c) for c in work.every]
    return [single[c.fqn] for c in (*candidates, *modules) if c.fqn in single]


def fail_forced(family: str, backend: str, why: str) -> NoReturn:
    """Raise UnsupportedError: a forced backend that serves nothing of the model."""
    raise UnsupportedError(
        "optimize_",
        f"a model that backend {backend!r} of {family} can serve somewhere",
        why,
        "Leave backends out to let fastlinear choose.",
    )


def members(chain: Fusion) -> list[Candidate]:
    """The chain's linears as candidates of its route."""
    how: dict[str, Any] = {}
    if chain.activation is not None:
        how = {"activation": chain.activation, "fallback": None}
    return [
        replace(
            c,
            **how,
            route=chain.route,
            chain=chain,
            parent_fqn=chain.fqn,
            parent=chain.module,
            pairs=c.pairs if c.parent_fqn == chain.fqn else None,
        )
        for c in chain.members
    ]


def facts(chain: Fusion) -> dict[str, Any]:
    """What the outcome of each of its linears says of a chain."""
    return {
        "rule": chain.rule,
        "route": chain.route,
        "problem": chain.problems[0].to_json(),
        "backends": backends_of(chain)[0],
        "calls": chain.calls.calls,
    }


def _with(
    chain: Fusion,
    single: dict[str, Candidate],
    alone: dict[str, Candidate],
) -> dict[str, Candidate]:
    """``single`` with this chain: what is left of a chain it takes linears of is as it is alone."""
    names = set(chain.names)
    found = {}
    for fqn, c in single.items():
        broken = c.chain is not None and not names.isdisjoint(c.chain.names)
        if not broken:
            found[fqn] = c
        elif fqn in alone:
            found[fqn] = alone[fqn]
    return found | {c.fqn: c for c in members(chain)}


def _taking(
    chains: Iterable[Fusion],
    single: dict[str, Candidate],
    alone: dict[str, Candidate],
) -> dict[str, Candidate]:
    """``single`` with all of these chains that nothing is in the way of."""
    for chain in chains:
        if _in_the_way(chain, single) is None:
            single = _with(chain, single, alone)
    return single


def _in_the_way(chain: Fusion, single: dict[str, Candidate]) -> str | None:
    """What is rewritten already in code that the chain makes part of another forward, or has been
    made part of one."""
    names = set(chain.names)
    for c in single.values():
        if c.chain is not None and c.chain.whole and names < set(c.chain.names):
            return f"its linears are part of a larger call, {c.chain.title}"
        if c.fqn in names and c.chain is not None and not chain.competes:
            return f"{c.fqn!r} is part of one call already, {c.chain.title}"
        if c.fqn in names or c.route not in ("parent", "chain"):
            continue
        if c.parent_fqn in chain.blocks and (c.chain is not None or c.pairs is not None):
            return f"{c.fqn!r} is rewritten in the forward of its block {c.parent_fqn!r}"
        if c.chain is None or chain.fqn not in c.chain.blocks:
            continue
        if names.isdisjoint(c.chain.names):
            return f"the forward of {chain.fqn!r} is part of another chain's"
    return None


def backends_of(chain: Fusion) -> list[dict[str, str]]:
    """Piece → backend for each of the chain's Problems.

    Raises UnsupportedError when the forced backend cannot serve one.
    """
    if chain.dispatch.served is not None:
        return [chain.dispatch.served] * len(chain.problems)
    return [measure.backends_of(p, chain.dispatch.backend) for p in chain.problems]


def _cannot_serve(chain: Fusion) -> str | None:
    try:
        for problem in chain.asked:
            measure.backends_of(problem, chain.dispatch.backend)
    except UnsupportedError as error:
        return error.received
    return None


def _kind(chain: Fusion, single: dict[str, Candidate]) -> Any:
    """Chains of one kind do the same work and are measured once."""
    kinds = tuple((k.count, k.input_grad) for k in chain.calls.kinds)
    rewritten = tuple(
        None if (known := single.get(name)) is None else known.route for name in chain.names
    )
    return (chain.problems, kinds, chain.calls.autocast, rewritten, chain.alike)


def _measure(
    work: Work, chain: Fusion, single: dict[str, Candidate], left: int
) -> tuple[dict[str, Samples], int] | None:
    """Tune the chain's Problems and time it; None where PyTorch's own way is the choice."""
    runs: dict[str, site.Run] = {"before": chain.before, "after": chain.after}
    if any(name in single for name in chain.names):
        runs["layers"] = lambda x: chain.layers(x, single)
    try:
        if work.config.tune:
            with work.budget:
                work.tuned |= measure.tune_all(
                    chain.asked,
                    work.runner.device,
                    budget=work.budget,
                    seed=work.config.seed,
                    progress=work.progress,
                    known=work.tuned,
                )
        chosen = backends_of(chain)
        own_path = all(set(b.values()) == {BASELINE} for b in chosen)
        if own_path and not chain.dispatch.eager_may_gain:
            code, why = "not_faster", "PyTorch's own path is the choice for it"
            if doubt := work.doubt(q for p in chain.asked for q in measure.deciding(p)):
                code, why = UNDECIDED, f"{why}; its measurement is in doubt: {doubt}"
            _leave(work, chain, code, why)
            return None
        with work.budget:
            share = work.budget.share(4 * left, 2.0)
            with lookup.patience(work.budget.left_s):
                return site.times(chain, runs, work.runner.device, share)
    except NotYetError:
        why = f"{NOT_COMPILED}, and {budget_spent(work)}"
        code, why = NO_TIME, f"not measured: {why}"
    except UnsupportedError as error:
        code, why = "cannot_serve", str(error)
    except Exception as error:  # noqa: BLE001  a backend's own error is an outcome too
        code, why = code_of(error), f"as one call it raises {type(error).__name__}: {error}"
    _leave(work, chain, code, why)
    return None


def _leave(work: Work, chain: Fusion, code: str, why: str, **told: Any) -> None:
    """Note that a chain is left alone; a module of its own has an outcome beside that."""
    work.notes.append(f"chain {chain.title} left alone: {why}")
    work.left_alone[chain.key] = why
    for c in chain.members:
        if c.kind == OWN:
            known = {"rule": chain.rule, "route": chain.route, "calls": chain.calls.calls, **told}
            known["problem"] = chain.problems[0].to_json()
            status = UNDECIDED if code in (UNDECIDED, NO_TIME) else "rejected"
            work.settle(c.fqn, status, code, why, activation=c.activation, **known)


def _accurate(work: Work, chain: Fusion) -> bool:
    with work.budget:
        failed = site.failure(chain)
    if failed is not None and failed.unproven:
        _leave(work, chain, NOT_FINITE, str(failed))
    elif failed is not None:
        _leave(work, chain, "less_accurate", f"less accurate as one call: {failed}")
    return failed is None


def _gains(
    work: Work, chain: Fusion, times: dict[str, Samples], passes: int, step: Ratio | None
) -> bool:
    """Whether it beats both rivals; what is beyond noise is decided on the whole model.

    ``step``: the whole step with its layers rewritten one by one / with it and all of its kind.
    Where that is beyond noise, it decides: by themselves both find their weights in the caches.
    """
    ratio = paired_ratio(times["before"], times["after"])
    rivals: dict[str, Ratio] = {"one call is {} of the speed of its layers as they are": ratio}
    if step is not None and not step.within_noise:
        rivals["the whole step is {} of its speed with the layers rewritten without it"] = step
    elif "layers" in times:
        found = paired_ratio(times["layers"], times["after"])
        rivals["one call is {} of the speed of its layers rewritten without it"] = found
    share = passes / len(chain.names)
    timed: dict[str, Any] = {
        "before_us": times["before"].median_us * share,
        "after_us": times["after"].median_us * share,
        "speedup": ratio.median,
        "ci95": (ratio.low, ratio.high),
    }
    for words, found in rivals.items():
        if not found.median > 1.0:
            text = words.format(in_words(found))
            _leave(work, chain, "slower" if found.high < 1.0 else "not_faster", text, **timed)
            return False
    told = facts(chain)
    gain = work.tuned_gain(chain, backends_of(chain))
    for c in members(chain):
        predicted = work.found_gain(c.fqn) if gain is None else gain / len(chain.names)
        work.settle(
            c.fqn,
            "rejected",
            "group_dropped",
            GROUP_DROPPED,
            **told,
            activation=c.activation,
            predicted_gain_us=predicted,
            **timed,
        )
    return True
