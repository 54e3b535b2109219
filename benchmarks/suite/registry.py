"""All families by name, and choosing among them."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.suite.families import (
    composites,
    diffusion,
    encoders,
    experts,
    fields,
    generative,
    graphs,
    language,
    recommenders,
    reinforcement,
    speech,
    tabular,
    torch_modules,
    vision,
)
from benchmarks.suite.family import Family
from fastlinear.core.errors import InputError

_FILES = (
    *(language, encoders, experts, vision, speech, torch_modules, reinforcement, recommenders),
    *(tabular, fields, graphs, diffusion, generative, composites),
)
KINDS: tuple[str, ...] = tuple(file.KIND for file in _FILES)
FAMILIES: dict[str, Family] = {f.name: f for file in _FILES for f in file.FAMILIES}
"""Name → family, kind by kind."""


def picked(only: Sequence[str] = (), kinds: Sequence[str] = ()) -> list[Family]:
    """The families whose name contains one of ``only`` and whose kind is one of ``kinds``.

    Raises InputError for a kind that there is none of, and where no family is left.
    """
    unknown = sorted(set(kinds) - set(KINDS))
    if unknown:
        raise InputError(
            "bench models --suite",
            f"--kind in {', '.join(KINDS)}",
            ", ".join(unknown),
            "Leave it out for all kinds.",
        )
    found = [
        family
        for family in FAMILIES.values()
        if (not kinds or family.kind in kinds)
        and (not only or any(text in family.name for text in only))
    ]
    if not found:
        raise InputError(
            "bench models --suite",
            f"filters that leave at least one of {len(FAMILIES)} families",
            f"--only {', '.join(only)}" + (f" --kind {', '.join(kinds)}" if kinds else ""),
            f"Their names are {', '.join(FAMILIES)}.",
        )
    return found
