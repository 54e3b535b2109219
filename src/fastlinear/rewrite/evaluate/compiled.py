"""torch.compile: offered where much pointwise work lies between the linears; tried where asked
for, of the model and of its blocks, with the rewrites inside or without them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from fastlinear.profile.between import CODE
from fastlinear.profile.launch_bound import LAUNCH_BOUND
from fastlinear.rewrite.evaluate.swaps import swaps_of
from fastlinear.rewrite.evaluate.try_compiled import ROUTE, RULE, Arm, compiled_arm, untouchable
from fastlinear.rewrite.evaluate.try_graph import (
    KeptGraph,
    Outcome,
    measured,
    pair_of,
    within_memory,
)
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.eligible import linear_modules
from fastlinear.rewrite.site_outcome import SiteOutcome
from fastlinear.rewrite.swap.compiled_forward import DEFAULT, REDUCE_OVERHEAD
from fastlinear.rewrite.swap.modules import Swap, SwapSet
from fastlinear.rewrite.verify.finite import NOT_FINITE
from fastlinear.rewrite.work import Work

_MODEL = ("",)


def choose_compiled(
    work: Work,
    kept: list[Candidate],
    best: KeptGraph | None,
    *,
    planned: tuple[str, ...] = (),
    mode: str | None = None,
) -> KeptGraph | None:
    """The model compiled, or its blocks one by one, if that is faster beyond noise than what is
    kept so far.

    The model is compiled with the rewrites and without them, and the faster of the two is what
    competes; then so do its blocks. Without ``Config.compile`` it is only offered, in a note.

    Args:
        work: the optimization under way; outcomes and notes are added to it.
        kept: the rewrites of linears kept so far.
        best: CUDA graphs kept so far.
        planned: the modules that a plan asks for, ``""`` the model, and ``mode``, in which; they
            stay unless they are slower.
    """
    if not work.config.compile:
        _note(work)
        return None
    names = planned or _MODEL
    refused = (untouchable(work.model.get_submodule(name)) for name in names)
    found: KeptGraph | Outcome | None = next((r for r in refused if r is not None), None)
    if found is None and work.unproven is not None:
        found = Outcome("refused", NOT_FINITE, work.unproven)
    inside = kept if best is None else best.kept
    if found is None:
        against = swaps_of(kept) if best is None else best.swaps
        rival = "with the other rewrites but not compiled" if kept else "as it was"
        rival = rival if best is None else "as CUDA graphs"
        for tried in _modes(work) if mode is None else (mode,):
            found = _tried(work, inside, tried, names, against, rival, bool(planned))
            if isinstance(found, KeptGraph):
                break
        if not planned:
            found = _or_blocks(work, found, inside, against, rival)
    assert found is not None
    if isinstance(found, Outcome):
        _settle(work, names, found)
        return None
    _settle(work, found.names, found.outcome)
    for name in () if best is None else best.names:
        known = work.graphs[name]
        text = "slower than the model compiled"
        work.graphs[name] = replace(known, status="rejected", code="compiled_instead", reason=text)
    for c in kept if not found.kept else []:
        text = "slower than the whole model compiled without it"
        work.settle(c.fqn, "rejected", "compiled_alone", text)
    work.notes.append(
        "every process compiles anew at its first call, and at the first of each new input shape, "
        f"less what torch caches on disk; it compiles for {_most()} shapes at most "
        "(torch._dynamo.config.recompile_limit), and others run uncompiled"
    )
    _note_graphs(work, found)
    return found


def blocks_of(model: nn.Module) -> tuple[str, ...]:
    """The model's repeated blocks: the members of its outermost ``nn.ModuleList`` or
    ``nn.Sequential`` that are of one class, two or more of them, with linears inside."""
    linears = list(linear_modules(model))
    waiting = [("", model)]
    while waiting:
        fqn, module = waiting.pop(0)
        members = [(f"{fqn}.{name}".lstrip("."), m) for name, m in module.named_children()]
        alike = len({type(m) for _, m in members}) == 1 and len(members) > 1
        lists = isinstance(module, nn.ModuleList | nn.Sequential)
        if lists and alike and all(_inside(name, linears) for name, _ in members):
            return tuple(name for name, _ in members)
        waiting += members
    return ()


def _most() -> int:
    """How often Dynamo compiles one function, each time for another shape."""
    from torch._dynamo import config  # Dynamo takes a second to import

    return int(config.recompile_limit)


def _inside(name: str, linears: Sequence[str]) -> bool:
    return any(fqn.startswith(f"{name}.") for fqn in linears)


def _modes(work: Work) -> tuple[str, ...]:
    """Replayed as CUDA graphs first, where those are asked for and nothing needs a gradient."""
    replayed = work.config.graphs and work.runner.device.type == "cuda"
    if replayed and work.config.mode == "inference":
        return REDUCE_OVERHEAD, DEFAULT
    return (DEFAULT,)


def _tried(
    work: Work,
    kept: list[Candidate],
    mode: str,
    names: tuple[str, ...],
    against: Sequence[Swap],
    rival: str,
    planned: bool,
) -> KeptGraph | Outcome:
    """These modules compiled, with the rewrites or, if that is faster, without them."""
    made: list[SwapSet] = []

    def run() -> KeptGraph | Outcome:
        return _faster(work, kept, mode, names, against, rival, planned, made)

    return within_memory(work, "compiled", made, run)


def _faster(
    work: Work,
    kept: list[Candidate],
    mode: str,
    names: tuple[str, ...],
    against: Sequence[Swap],
    rival: str,
    planned: bool,
    made: list[SwapSet],
) -> KeptGraph | Outcome:
    arm = compiled_arm(work, kept, mode, names, made)
    if kept and not planned:
        alone = compiled_arm(work, [], mode, names, made)
        if isinstance(arm, Arm) and isinstance(alone, Arm):
            with work.budget:
                slower = pair_of(work, arm.swaps, alone.swaps).speedup.high < 1.0
            (alone if not slower else arm).swaps.release()
            arm = alone if slower else arm
        elif isinstance(alone, Arm):
            arm = alone
    return arm if isinstance(arm, Outcome) else _measured(work, arm, against, rival, planned)


def _measured(
    work: Work, arm: Arm, against: Sequence[Swap], rival: str, planned: bool
) -> KeptGraph | Outcome:
    chosen = arm.way, arm.swaps, arm.names, arm.inside, arm.verdicts
    return measured(work, *chosen, against, rival, planned)


def _or_blocks(
    work: Work,
    whole: KeptGraph | Outcome | None,
    inside: list[Candidate],
    against: Sequence[Swap],
    rival: str,
) -> KeptGraph | Outcome | None:
    """The model compiled or, where that is faster, its blocks one by one, with the rewrites.

    What goes before the blocks then runs as it is: some models do other work while they are
    traced. Transformers' masks, say, are left out of a plain call where they hide nothing, but
    not of a traced one, and a slower attention follows.
    """
    blocks = blocks_of(work.model)
    if not blocks or work.budget.left_s == 0:
        return whole
    if isinstance(whole, KeptGraph):
        against, rival, inside = whole.swaps, "compiled as a whole", whole.kept
    refused = (untouchable(work.model.get_submodule(name)) for name in blocks)
    arm = next((r for r in refused if r is not None), None)
    if arm is None:
        made: list[SwapSet] = []

        def run() -> KeptGraph | Outcome:
            arm = compiled_arm(work, inside, DEFAULT, blocks, made)
            if isinstance(arm, Outcome):
                return arm
            return _measured(work, arm, against, rival, False)

        found = within_memory(work, "compiled", made, run)
    else:
        found = arm
    if isinstance(found, KeptGraph):
        told = whole.outcome if isinstance(whole, KeptGraph) else whole
        assert told is not None
        if told.status == "kept":
            text = "its blocks compiled one by one are faster"
            told = replace(told, status="rejected", code="blocks_faster", reason=text)
        _settle(work, _MODEL, told)
        return found
    _settle(work, blocks, found)
    return whole


def _settle(work: Work, names: Sequence[str], outcome: Outcome) -> None:
    finding = next((f for f in work.profile.findings if f.code == CODE), None)
    for name in names:
        work.compiled[name] = SiteOutcome(
            fqn=name,
            rule=RULE,
            activation=None,
            problem=None,
            status=outcome.status,
            code=outcome.code,
            reason=outcome.reason,
            predicted_gain_us=None if name or finding is None else finding.predicted_gain_us,
            route=ROUTE,
            calls=1,
            **outcome.facts,
        )


def _note_graphs(work: Work, found: KeptGraph) -> None:
    """Say that a compiled model whose launches set the pace can be replayed as well."""
    replayable = work.runner.device.type == "cuda" and work.config.mode == "inference"
    left = found.pair.after.median_us - work.profile.device_busy_us
    if replayable and not work.config.graphs and left > LAUNCH_BOUND * found.pair.after.median_us:
        work.notes.append(
            f"compiled, the host still leaves the device idle for about {left:.0f} us a step: "
            "Config(graphs=True, compile=True) replays what was compiled as CUDA graphs"
        )


def _note(work: Work) -> None:
    """Say what fusing the pointwise work could save, without compiling anything."""
    finding = next((f for f in work.profile.findings if f.code == CODE), None)
    if finding is None or untouchable(work.model) is not None:
        return
    work.notes.append(
        f"pointwise work between the linears takes {finding.details['share']:.0%} of the time; "
        f"torch.compile would save up to {finding.predicted_gain_us:.0f} us a step of it: ask for "
        "it with Config(compile=True) or --compile (compiling takes a while)"
    )
