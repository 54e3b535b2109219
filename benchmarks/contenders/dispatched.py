"""What dispatch makes of a case whose family has several pieces, and how these are tuned."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from fastlinear.core.problem import Problem
from fastlinear.dispatch.select import Choice
from fastlinear.dispatch.tune import tune


def chosen_pieces(
    choices_of: Callable[[Problem], Iterable[Choice]], forward: Problem, captured: bool
) -> dict[str, str]:
    """Piece → backend and source: what dispatch takes, in a CUDA graph or not."""
    made = choices_of(replace(forward, captured=captured and forward.device == "cuda"))
    return {c.problem.piece: f"{c.backend.name} ({c.source})" for c in made}


def tune_pieces(
    tuning_order: Callable[[Problem], Iterable[Problem]], forward: Problem, device: torch.device
) -> None:
    """Tune all pieces, on a GPU inside CUDA graphs as well."""
    for p in (forward, forward.other_regime()):
        for piece in () if p is None else tuning_order(p):
            tune(piece, device=device)
