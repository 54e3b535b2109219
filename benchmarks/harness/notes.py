"""What is said of a run's rows below its tables."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.harness.own import default_behind_own, notes_own
from benchmarks.harness.peer import OURS
from benchmarks.harness.rows import Row, behind, behind_within_noise


def notes_behind(rows: Iterable[Row]) -> list[str]:
    """What is said below a table of rows of those behind: how many are so beyond noise and how many
    read so within it, a line for each of the former, and our default against our own backends."""
    known = list(rows)
    late, open_ = behind(known), behind_within_noise(known)
    lines = [
        "fastlinear more than 2% behind the best peer on its terms, beyond noise, in "
        f"{len(late)} measurements"
    ]
    if open_:
        most = max(float(r["ratio_to_best"]) for r in open_)
        reach = f"up to {most:.3f}, by intervals that reach below 1.02"
        lines.append(f"  {len(open_)} more read so within noise ({reach})")
    for row in late:
        own = "" if row["contender"] == OURS else f" {row['contender']}"
        of = f"{row['ratio_to_best']:.3f} of {row['best_peer']}"
        lines.append(f"  {row['problem']} {row['direction']} {row['metric']}{own}: {of}")
    return [*lines, *notes_own(default_behind_own(known))]
