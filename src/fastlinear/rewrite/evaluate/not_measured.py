"""Findings that nothing was measured of: told with the reason, rather than left out."""

from __future__ import annotations

from fastlinear.dispatch.confidence import load_in_words
from fastlinear.native import cpp_build
from fastlinear.rewrite.work import UNDECIDED, Work

NO_TIME = "no_time"
"""The code of what the budget did not reach."""
NOT_COMPILED = "the compiled lookup was not there yet"
_NAMED = 5  # layers that a note calls by name
_NOTED_S = 1.0  # of compilation


def budget_spent(work: Work) -> str:
    """The reason where there was no time left."""
    seconds = f"{work.config.time_budget_s:g} s"
    return f"the time budget of {seconds} was spent before it; a larger time_budget_s reaches it"


def note_time(work: Work) -> None:
    """Say what the time budget did not reach, and what of it went into the first compilation."""
    missed = []
    if work.budget.untuned:
        why = f" ({NOT_COMPILED})" if work.budget.compiling else ""
        missed.append(f"{work.budget.untuned} problems were not tuned{why}")
    if work.budget.no_memory:
        work.notes.append(
            f"{work.budget.no_memory} problems were not tuned: their tuning ran out of memory"
        )
    names = [s.fqn for s in work.outcomes.values() if s.code == NO_TIME]
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        missed.append(f"not measured: {', '.join(n or 'the model' for n in names[:_NAMED])}{more}")
    if missed:
        work.notes.append(
            f"the time budget of {work.config.time_budget_s:g} s did not reach everything: "
            f"{'; '.join(missed)}; a larger time_budget_s does"
        )
    seconds = cpp_build.compiled_s() - work.compiled_s
    if seconds > _NOTED_S:
        work.notes.append(
            f"compiling C++ for this processor took {seconds:.0f} s; later runs find it done"
        )


def note_disturbed(work: Work) -> None:
    """Say in one line what disturbed the measurements that leave sites undecided, and what to
    do."""
    count = sum(s.code == UNDECIDED for s in work.outcomes.values())
    if not count:
        return
    sites = f"{count} sites are" if count > 1 else "1 site is"
    spread = max(work.disturbed, default=0.0)
    work.notes.append(
        f"{sites} undecided, because the machine was disturbed ({load_in_words()}, times spread by "
        f"up to {spread:.0%}): run again when nothing else runs, or with fewer threads"
    )
