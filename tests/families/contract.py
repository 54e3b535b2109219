"""The contract every backend of every family keeps, as one check used by several tests."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fastlinear.core.compare import judge
from fastlinear.core.problem import Problem
from fastlinear.dispatch.backend import Backend, family

DRAWS = 24


class Contract:
    """Problems to pose, and what a backend does wrong on one of them."""

    def problems(self, family_name: str, piece: str, dtype: str, device: str) -> Iterator[Problem]:
        """What every backend of a piece is asked."""
        space = family(family_name).space
        assert space is not None, f"{family_name} has no space to draw from"
        return space.draw(piece, dtype, device)

    def inaccuracies(self, backend: Backend, problem: Problem, seed: int = 0) -> list[str]:
        """Where the backend's error exceeds twice torch's.

        One number's error is luck, so outputs of a few numbers are judged over many draws.
        """
        fam, device = family(problem.family), torch.device(problem.device)
        inputs = fam.make_inputs(problem, device, seed)
        found = list(triples(backend, problem, inputs))
        verdicts = [
            judge(f"{backend.name}[{i}]", *(t for t in triple if t is not None))
            for i, triple in enumerate(found)
            if all(t is not None for t in triple)
        ]
        verdicts = [v for v in verdicts if not v.passed]
        if not verdicts or all(t[0] is None or t[0].numel() >= 256 for t in found):
            return [str(v) for v in verdicts]
        columns: list[list[Triple]] = []
        for draw in range(DRAWS):
            inputs = fam.make_inputs(problem, device, seed + draw)
            for i, triple in enumerate(triples(backend, problem, inputs)):
                if i == len(columns):
                    columns.append([])
                columns[i].append(triple)
        verdicts = []
        for i, column in enumerate(columns):
            ours, theirs, oracle = zip(*column, strict=True)
            if oracle[0] is None or ours[0] is None:
                continue  # a missing output is for ``failures`` to tell
            stacked = (torch.stack(t) for t in (ours, theirs, oracle))
            verdicts.append(judge(f"{backend.name}[{i}]", *stacked))
        return [str(v) for v in verdicts if not v.passed]

    def failures(self, backend: Backend, problem: Problem, seed: int = 0) -> list[str]:
        """What the backend does wrong on one Problem, as readable lines; empty when nothing."""
        fam = family(problem.family)
        device = torch.device(problem.device)
        inputs = fam.make_inputs(problem, device, seed)
        kept = [t if t is None else t.clone() for t in flat(inputs)]
        run = backend.load(problem)
        wrong = self.inaccuracies(backend, problem, seed)

        expected = flat(fam.reference(problem, inputs))
        with poisoned_memory():
            first, second = flat(run(*inputs)), flat(run(*inputs))
        for i, (e, a, b) in enumerate(zip(expected, first, second, strict=True)):
            if (e is None) != (a is None):
                wrong.append(f"output {i}: is None where torch's is not, or the reverse")
            if e is None or a is None or b is None:
                continue
            if (a.shape, a.dtype, a.device) != (e.shape, e.dtype, e.device):
                wrong.append(f"output {i}: {a.shape} {a.dtype} {a.device}")
            elif not torch.isfinite(a).all():
                wrong.append(f"output {i}: not fully written")
            if not torch.equal(a, b):
                wrong.append(f"output {i}: two runs differ")
        for i, (now, before) in enumerate(zip(flat(inputs), kept, strict=True)):
            if now is not None and before is not None and not torch.equal(now, before):
                wrong.append(f"input {i}: modified")
        return wrong


Triple = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def triples(backend: Backend, problem: Problem, inputs: tuple[Any, ...]) -> Iterator[Triple]:
    """(ours, torch's, the float64 oracle) for every output."""
    fam = family(problem.family)
    wide = in_float64(inputs)
    ours = flat(backend.load(problem)(*inputs))
    return zip(
        ours, flat(fam.reference(problem, inputs)), flat(fam.reference(problem, wide)), strict=True
    )


class poisoned_memory:
    """Inside it, torch fills every new tensor with NaN, so that unwritten entries show."""

    def __enter__(self) -> None:
        self.before = (
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            torch.utils.deterministic.fill_uninitialized_memory,
        )
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True

    def __exit__(self, *_: object) -> None:
        mode, warn_only, fill = self.before
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        torch.utils.deterministic.fill_uninitialized_memory = fill


def flat(result: Any) -> list[torch.Tensor | None]:
    """The tensors (and Nones) of a result or of arguments, tuples in tuples opened."""
    if isinstance(result, (tuple, list)):
        return [t for item in result for t in flat(item)]
    return [result] if result is None or isinstance(result, torch.Tensor) else []


def in_float64(arguments: Any) -> Any:
    """The same arguments with every tensor in float64."""
    if isinstance(arguments, tuple):
        return tuple(in_float64(a) for a in arguments)
    floating = isinstance(arguments, torch.Tensor) and arguments.is_floating_point()
    return arguments.double() if floating else arguments
