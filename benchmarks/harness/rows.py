"""Rows: what is published of one contender in one case, and their JSONL files."""

from __future__ import annotations

import gzip
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, TextIO, cast

from benchmarks.harness.above import WRONG, why_above
from benchmarks.harness.case import TIMED, Case
from benchmarks.harness.peer import OURS, RECORDED
from benchmarks.harness.terms import FORMS, answers, held, terms
from fastlinear.core.compare import Verdict
from fastlinear.core.cost import Ceilings, Cost, roofline
from fastlinear.core.errors import InputError
from fastlinear.core.timing import Samples, paired_ratio

Row = dict[str, Any]

_MOST_CHARACTERS = 1 << 30
_FORMS = (
    OURS,
    RECORDED,
    *(f"{OURS}_{form}" for form in ("stacked", "groups", "channels", "sequences", "out")),
    *(f"{OURS}_{form}" for form in ("compile", "reduce_overhead", "reusing")),
)


def blank(case: Case, contender: str, metric: str, facts: Mapping[str, Any]) -> Row:
    """A row with every key present and nothing measured; ``facts`` are the run's and the work's."""
    return {
        "experiment": case.experiment,
        "family": case.family,
        "problem": case.problem,
        "case": case.to_json(),
        "contender": contender,
        "ours": contender.startswith(OURS),
        "terms": sorted(terms(contender, case.to_json())),
        "direction": case.direction,
        "metric": metric,
        "median_us": None,
        "ci95_us": None,
        "samples_us": [],
        "calls_per_sample": None,
        "how": None,
        "peak_bytes": None,
        "kernels": None,
        "ratio_to_best": None,
        "ratio_ci95": None,
        "best_peer": None,
        "valid": False,
        "skipped": None,
        "error": None,
        "torch_error": None,
        "verdicts": [],
        "roofline": None,
        "roofline_error": None,
        "chosen": None,
        "seed": case.seed,
        **facts,
    }


def judged(row: Row, verdicts: Iterable[Verdict]) -> Row:
    """Add the errors against the float64 oracle; the worst decides what is shown."""
    listed = list(verdicts)
    worst = max(listed, key=lambda v: v.error / v.limit)
    return row | {
        "valid": all(v.passed for v in listed),
        "error": _finite(worst.error),
        "torch_error": _finite(worst.torch_error),
        "verdicts": [
            {
                "name": v.name,
                "error": _finite(v.error),
                "torch_error": _finite(v.torch_error),
                "limit": _finite(v.limit),
                "passed": v.passed,
            }
            for v in listed
        ],
    }


def timed(row: Row, samples: Samples, cost: Cost, ceilings: Ceilings, highest: float = 1.0) -> Row:
    """Add timings and their place under the roofline; above ``highest`` of it is an error, with
    the reason as far as it is known."""
    place = roofline(cost, ceilings, samples.median_us)
    wrong = None
    if place.fraction > highest:
        known = row | {"median_us": samples.median_us, "roofline": place.to_json()}
        share = f"{100 * place.fraction:.0f}% of the measured ceiling ({place.bound})"
        wrong = f"{share}: {why_above(known) or WRONG}"
    return row | {
        "median_us": samples.median_us,
        "ci95_us": list(samples.ci95_us),
        "samples_us": list(samples.us),
        "calls_per_sample": samples.inner,
        "how": samples.how,
        "roofline": place.to_json(),
        "roofline_error": wrong,
    }


def compared(rows: list[Row], samples: Mapping[str, Samples]) -> list[Row]:
    """Add each row's paired ratio to the fastest valid peer: for ours to the fastest that computes
    on its terms, where there is one. Peers exclude ours."""
    peers = [r["contender"] for r in rows if r["valid"] and not r["ours"]]
    able = [p for p in peers if p in samples]
    found = []
    for row in rows:
        own = samples.get(row["contender"])
        if own is not None and row["valid"] and able:
            equals = able
            if row["ours"]:
                equals = [p for p in able if answers(row["contender"], p, row["case"])] or able
            best = min(equals, key=lambda p: samples[p].median_us)
            ratio = paired_ratio(own, samples[best])
            row = row | {
                "ratio_to_best": ratio.median,
                "ratio_ci95": [ratio.low, ratio.high],
                "best_peer": best,
            }
        found.append(row)
    return found


def behind(rows: Iterable[Row], by: float = 0.02) -> list[Row]:
    """Rows in which fastlinear's own choice, in any of its forms, is slower by more than ``by``
    than the fastest peer on the same terms, beyond noise (the low end of the paired interval, or
    of its own where that was formed with another peer).

    A peer on terms on which a form of fastlinear was measured beside it is for that form; one on
    terms that no form takes (see ``benchmarks.harness.terms``) is for none. Ratio and peer of a row
    that is returned are those that count.
    """
    return [row for row, beyond in _slower(rows, by) if beyond]


def behind_within_noise(rows: Iterable[Row], by: float = 0.02) -> list[Row]:
    """Rows that read slower by more than ``by`` like those of ``behind``, but within noise."""
    return [row for row, beyond in _slower(rows, by) if not beyond]


def _slower(rows: Iterable[Row], by: float) -> list[tuple[Row, bool]]:
    """Rows that read slower by more than ``by``, each with whether it is beyond noise."""
    cells: dict[tuple[str, str, str], dict[str, Row]] = {}
    for r in rows:
        if _is_timed(r):
            cell = cells.setdefault((r["problem"], r["direction"], r["metric"]), {})
            cell[r["contender"]] = r
    return [late for cell in cells.values() for late in _late(cell, by)]


def _late(cell: Mapping[str, Row], by: float) -> list[tuple[Row, bool]]:
    forms = [cell[name] for name in _FORMS if name in cell]
    peers = [r for r in cell.values() if not r["ours"]]
    found = []
    for own in forms:
        equals = _equals(own, forms, peers)
        if not equals:
            continue
        best = min(equals, key=lambda r: float(r["median_us"]))
        if best["contender"] != own["best_peer"]:
            us, low = best["median_us"], (own["ci95_us"] or [own["median_us"]])[0]
            own = own | {
                "best_peer": best["contender"],
                "ratio_to_best": own["median_us"] / us,
                "ratio_ci95": [low / us, None],
            }
        beyond = bool(own["ratio_ci95"]) and own["ratio_ci95"][0] > 1.0 + by
        if beyond or (own["ratio_to_best"] or 0.0) > 1.0 + by:
            found.append((own, beyond))
    return found


def _terms(row: Row) -> frozenset[str]:
    return terms(row["contender"], row["case"])


def _equals(own: Row, forms: list[Row], peers: list[Row]) -> list[Row]:
    """The peers a row is held against, beside fastlinear's own choice in its forms."""
    equals = [p for p in peers if held(_terms(own), _terms(p))]
    if own["contender"] == OURS:  # answers as well where no form of it does
        uncovered = FORMS.difference(*(_terms(form) for form in forms))
        equals += [p for p in peers if uncovered & _terms(p) and _terms(p) <= FORMS]
    return equals


def best_peer(own: Row, cell: Iterable[Row]) -> Row | None:
    """The fastest valid peer on ``own``'s terms among the rows of its problem, direction and
    metric; None where there is none, or where ``own`` itself was not timed or is wrong.

    A peer's best peer may be itself.
    """
    timed_rows = {r["contender"]: r for r in cell if _is_timed(r)}
    if not _is_timed(own):
        return None
    forms = [timed_rows[name] for name in _FORMS if name in timed_rows]
    equals = _equals(own, forms, [r for r in timed_rows.values() if not r["ours"]])
    return min(equals, key=lambda r: float(r["median_us"]), default=None)


def ratio(own: Row, other: Row | None) -> float | None:
    """Time over another row's: the median over rounds where both have the same rounds, else that of
    their medians. None where one of them was not timed or is wrong."""
    if other is None or not _is_timed(own) or not _is_timed(other):
        return None
    first, second = (
        Samples(r["contender"], tuple(r["samples_us"]), r["metric"], 1, "") for r in (own, other)
    )
    if not first.us or len(first.us) != len(second.us):
        return float(own["median_us"]) / float(other["median_us"])
    return paired_ratio(first, second).median


def _is_timed(row: Row) -> bool:
    return row["metric"] in TIMED and row["valid"] and row["median_us"] is not None


def to_line(row: Row) -> str:
    """One row as a line of strict JSON."""
    return json.dumps(row, allow_nan=False) + "\n"


def opened(path: str | Path, mode: Literal["r", "w", "a"]) -> TextIO:
    """A file of rows as text: compressed where its name ends in ``.gz``."""
    if Path(path).suffix != ".gz":
        return Path(path).open(mode)
    return cast(TextIO, gzip.open(path, f"{mode}t"))


def write_rows(rows: Iterable[Row], path: str | Path) -> Path:
    """Write rows as JSONL, replacing the file; compressed for a ``.gz`` name. Folders are made."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with opened(path, "w") as file:
        file.writelines(map(to_line, rows))
    return path


def read_rows(path: str | Path, *, cut: bool = False) -> list[Row]:
    """Read a JSONL file of rows, compressed or not.

    Args:
        path: the file; compressed where its name ends in ``.gz``.
        cut: leave out a last line without its end, which a run that was killed leaves.

    Raises:
        InputError: a line is no row; it is named. Or the file is damaged.
    """
    found = []
    lines = _lines(Path(path), cut)
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise InputError(
                "read_rows",
                f"JSON on line {number} of {path}",
                str(error),
                "Remove the line: a run that was killed leaves its last one cut.",
            ) from error
        if not isinstance(row, dict) or "contender" not in row or "metric" not in row:
            raise InputError(
                "read_rows",
                f"a benchmark row on line {number} of {path}",
                line[:60],
                "Give a file that `fastlinear bench --out` wrote.",
            )
        found.append(row)
    return found


def _lines(path: Path, cut: bool) -> list[str]:
    lines: list[str] = []
    try:
        with opened(path, "r") as file:
            length = 0
            for line in file:
                length += len(line)
                if length > _MOST_CHARACTERS:
                    raise InputError(
                        "read_rows",
                        f"rows of at most {_MOST_CHARACTERS >> 20} Mi characters in {path}",
                        "more",
                        "Split the file.",
                    )
                lines.append(line)
    except (EOFError, zlib.error, gzip.BadGzipFile, UnicodeDecodeError) as error:
        if not (cut and isinstance(error, EOFError)):
            raise InputError(
                "read_rows",
                f"a whole JSONL file at {path}",
                f"{type(error).__name__}: {error}",
                "Measure again; a run that was killed goes on with --resume.",
            ) from error
    if cut and lines and not lines[-1].endswith("\n"):
        lines.pop()
    return lines


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
