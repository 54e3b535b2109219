"""What a sweep asks of a kernel that is launched in one of many configurations."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch

from fastlinear.calibration import drawn
from fastlinear.families.linear.cuda.few_rows_config import TURN_BYTES, TURNS

Problem = Mapping[str, Any]
"""Sizes, dtype and options of a call by name, as JSON has them."""


@dataclass(frozen=True)
class Kind:
    """A kernel whose configuration a model of time chooses.

    Attributes:
        draw: a problem at random, or None where it is too large: another is drawn then.
        chosen: the configuration that a call takes.
        candidates: all that it might take.
        microseconds: about what a call takes in a configuration.
        inputs: sets of a call's tensors, read in turn: (problem, device) → sets.
        run: (problem, configuration) → the call, of one set.
        terms: what a call takes time for, in numbers that are fitted.
        config: a configuration from its fields.
        group: name of the problems that share fitted numbers.
        serves: whether a configuration's rows take part in a fit.
        plans: launches that calls keep, the newest last.
    """

    draw: Callable[[Random], Problem | None]
    chosen: Callable[[Problem], Any]
    candidates: Callable[[Problem], Sequence[Any]]
    microseconds: Callable[[Problem, Any], float]
    inputs: Callable[[Problem, torch.device], list[tuple[Any, ...]]]
    run: Callable[[Problem, Any], Callable[..., Any]]
    terms: Callable[[Problem, Any], tuple[float, ...]]
    config: Callable[[Problem, dict[str, Any]], Any]
    group: Callable[[Problem], str]
    serves: Callable[[Problem, Any], bool] = lambda p, c: True
    plans: Mapping[Any, Any] | None = None


def dtype_of(problem: Problem) -> torch.dtype:
    """The dtype that a problem names."""
    found: torch.dtype = getattr(torch, problem["dtype"])
    return found


def name_of(dtype: torch.dtype) -> str:
    """A dtype as problems name it."""
    return str(dtype).removeprefix("torch.")


def turns(numbers: int, dtype: torch.dtype) -> int:
    """Sets of so many numbers to read in turn, so that L2 holds none from one turn to the next."""
    return max(1, min(TURNS, -(-TURN_BYTES // (numbers * dtype.itemsize))))


def log_uniform(draw: Random, most: int) -> int:
    """A number of rows from 1 to ``most``."""
    return round(most ** draw.random())


def width(draw: Random) -> int:
    """A number of features that users have."""
    return drawn.width(draw)


def normal(place: torch.device, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, device=place).to(dtype)
