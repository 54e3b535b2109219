"""Which cases and contenders a run takes, and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from benchmarks.experiments import EXPERIMENTS
from benchmarks.harness.case import Case
from benchmarks.harness.kinds import KINDS
from fastlinear.core.errors import InputError
from fastlinear.core.precision import FLOAT_DTYPES

PROGRAM = "fastlinear bench"
"""What runs the experiments, for the command that a row names."""


def pick(
    experiment: str,
    device: str,
    quick: bool,
    dtypes: Sequence[str] | None,
    only: str | None,
    where: Sequence[str],
) -> list[Case]:
    if experiment not in EXPERIMENTS:
        raise InputError(
            "bench.run",
            f"an experiment in {sorted(EXPERIMENTS)}",
            experiment,
            "docs/benchmarks.md says what each measures.",
        )
    unknown = sorted(set(dtypes or ()) - set(FLOAT_DTYPES))
    if unknown:
        raise InputError(
            "bench.run",
            f"dtypes in {sorted(FLOAT_DTYPES)}",
            ", ".join(unknown),
            "Leave it out for all dtypes of the experiment.",
        )
    every = EXPERIMENTS[experiment](device, quick)
    wanted = [_wanted(text) for text in where]
    for name, values in wanted:
        _check_where(name, values, every)
    picked = [
        c
        for c in every
        if (dtypes is None or c.dtype in dtypes)
        and (only is None or only in c.name)
        and all(_facts(c).get(name) in values for name, values in wanted)
    ]
    if not picked:
        given = {"dtypes": dtypes, "only": only, "where": list(where) or None}
        raise InputError(
            "bench.run",
            f"filters that together leave at least one of the {len(every)} cases of {experiment}"
            + (" --quick" if quick else ""),
            ", ".join(f"{k}={v!r}" for k, v in given.items() if v is not None),
            f"Their dtypes are {', '.join(sorted({c.dtype for c in every}))}; their names look "
            f"like: {'; '.join(c.name for c in every[:3])}.",
        )
    return picked


def _wanted(text: str) -> tuple[str, frozenset[str]]:
    """``"L=8,4"`` → ``("L", {"8", "4"})``."""
    name, equals, values = text.partition("=")
    if not equals or not name or not values:
        raise InputError(
            "bench.run",
            "where as NAME=VALUE,VALUE",
            text,
            "For example M=8192 or L=8,4.",
        )
    return name, frozenset(values.split(","))


def _check_where(name: str, values: frozenset[str], every: Sequence[Case]) -> None:
    """Raise unless some case has the size or option, and some case each of the values."""
    facts = [_facts(c) for c in every]
    known = dict.fromkeys(n for f in facts for n in f)
    if name not in known:
        raise InputError(
            "bench.run",
            f"where to name one of {', '.join(known)}",
            repr(name),
            "Names are as in the cases: M is the number of rows.",
        )
    there = dict.fromkeys(f[name] for f in facts if name in f)
    absent = sorted(values - set(there))
    if absent:
        raise InputError(
            "bench.run",
            f"values of {name} that cases have: {', '.join(sorted(there, key=_numbers_first))}",
            ", ".join(map(repr, absent)),
            "Name some of these, or leave this filter out.",
        )


def _numbers_first(value: str) -> tuple[bool, int, str]:
    return not value.isdecimal(), int(value) if value.isdecimal() else 0, value


def _facts(case: Case) -> dict[str, str]:
    """Sizes, options and direction of a case, as text."""
    sizes = {name: str(size) for name, size in case.dims}
    return {**sizes, **dict(case.options), "direction": case.direction}


def check_known(cases: Sequence[Case], peers: Sequence[str], skip: Sequence[str]) -> None:
    """Raise unless each name is a contender of some case, and some contender is left."""
    if not peers and not skip:
        return
    names = {p.name for c in cases for p in KINDS[c.family].peers(c)}
    for option, given in (("peers", peers), ("skip", skip)):
        unknown = sorted(set(given) - names)
        if unknown:
            raise InputError(
                "bench.run",
                f"{option} in {', '.join(sorted(names))}",
                ", ".join(unknown),
                "A contender is named as its rows name it.",
            )
    if not (set(peers) or names) - set(skip):
        raise InputError(
            "bench.run",
            "peers and skip that leave a contender",
            f"peers={list(peers) or None}, skip={list(skip)}",
            "Leave one of them out.",
        )


def command(experiment: str, device: torch.device, told: Mapping[str, Any]) -> str:
    """The command that repeats this run; options left at their default are not named."""
    words = [PROGRAM, experiment, f"--device {device}"]
    for name, value in told.items():
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{name} {shlex.quote(str(v))}" for v in value]
        elif value:
            words.append(f"--{name} {shlex.quote(str(value))}")
    return " ".join(words)
