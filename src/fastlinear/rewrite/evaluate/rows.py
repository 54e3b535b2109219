"""Numbers of rows: for which of them what is kept was tuned."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fastlinear.core.problem import Problem, bucket_size
from fastlinear.rewrite.evaluate import measure
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.work import Work


def asked(work: Work, kept: Sequence[Candidate]) -> list[Problem]:
    """The forward Problems of what is kept: those of its inputs, then those of the further rows,
    one for each bucket."""
    own = [q for c in kept for q in (c.problems if c.chain is None else c.chain.asked)]
    found = {p.key(): p for p in own}
    for rows in work.config.rows:
        for p in own:
            more = p.with_rows(bucket_size(rows))
            found.setdefault(more.key(), more)
    return list(dict.fromkeys((*own, *found.values())))


def tune_rows(work: Work, kept: Sequence[Candidate]) -> None:
    """Tune what is kept for the further numbers of rows, as far as the budget goes."""
    if not work.config.rows or not kept:
        return
    known = {p.key(): t for p, t in work.tuned.items()}
    deciding = [q for p in asked(work, kept) for q in measure.deciding(p)]
    with work.budget:
        work.tuned |= measure.tune_all(
            asked(work, kept),
            work.runner.device,
            budget=work.budget,
            seed=work.config.seed,
            progress=work.progress,
            known={q: known[q.key()] for q in deciding if q.key() in known},
            last=True,
        )
    tuned = {p.key() for p in work.tuned}
    left = sorted({q.rows for q in deciding if q.key() not in tuned} - {0})
    if left:
        work.notes.append(f"the time budget ran out before all was tuned for {words(left)}")


def note_rows(work: Work, buckets: Sequence[int]) -> None:
    """Say for which numbers of rows what is kept was tuned."""
    if buckets:
        work.notes.append(
            f"tuned for {words(buckets)} a call (numbers go to the nearest power of two); others "
            "take what the cache or a prediction says, Config(rows=...) tunes "
            "for them"
        )


def words(buckets: Iterable[int]) -> str:
    """Numbers of rows in a sentence."""
    *most, last = map(str, buckets)
    return f"{', '.join(most)} and {last} rows" if most else f"{last} rows"
