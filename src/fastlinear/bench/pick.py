"""Which cases and contenders a run takes, and the command that repeats it."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fastlinear.bench.case import Case
from fastlinear.bench.cases import EXPERIMENTS
from fastlinear.bench.kinds import KINDS
from fastlinear.core.errors import InputError
from fastlinear.core.precision import FLOAT_DTYPES


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
    picked = [
        c
        for c in every
        if (dtypes is None or c.dtype in dtypes)
        and (only is None or only in c.name)
        and all(_facts(c).get(name) in values for name, values in wanted)
    ]
    if not picked:
        raise InputError(
            "bench.run",
            "a filter that leaves at least one case",
            f"dtypes={dtypes}, only={only!r}, where={list(where)}",
            "Names look like: " + "; ".join(c.name for c in every[:3]) + ".",
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


def _facts(case: Case) -> dict[str, str]:
    """Sizes, options and direction of a case, as text."""
    sizes = {name: str(size) for name, size in case.dims}
    return {**sizes, **dict(case.options), "direction": case.direction}


def check_known(picked: Sequence[Case], peers: Sequence[str]) -> None:
    """Raise unless each name is a contender of some case."""
    names = {p.name for c in picked for p in KINDS[c.family].peers(c)} if peers else set()
    unknown = sorted(set(peers) - names)
    if unknown:
        raise InputError(
            "bench.run",
            f"peers in {sorted(names)}",
            ", ".join(unknown),
            "A contender is named as its rows name it.",
        )


def command(experiment: str, device: torch.device, told: Mapping[str, Any]) -> str:
    """The command that repeats this run; options left at their default are not named."""
    words = ["python -m fastlinear.bench", experiment, f"--device {device}"]
    for name, value in told.items():
        if value is True:
            words.append(f"--{name}")
        elif isinstance(value, (list, tuple)):
            words += [f"--{name} {shlex.quote(str(v))}" for v in value]
        elif value:
            words.append(f"--{name} {shlex.quote(str(value))}")
    return " ".join(words)
