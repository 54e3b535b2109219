"""A family as the work of the contenders of whole models: inference or a training step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from benchmarks.contenders import models
from benchmarks.harness.case import Case, timed_on
from benchmarks.harness.peer import OURS, Peer
from benchmarks.harness.work import Unit
from benchmarks.suite.family import Family
from fastlinear.core.inputs import normalize_inputs
from fastlinear.core.precision import FLOAT_DTYPES
from fastlinear.profile.step import loss_of

INFERENCE, TRAIN = "inference", "train"
ASKED = f"{OURS}_asked"
"""Ours with ``torch.compile``, and on a GPU CUDA graphs, tried as well."""
_FORMS = (f"{OURS}_graphs", f"{OURS}_compile", f"{OURS}_reduce_overhead")
_ON_CPU = ("compile_max_autotune",)  # minutes, for a model that takes milliseconds


@dataclass(frozen=True)
class SuiteWork(models.ModelWork):
    """The model of a family and its inputs; a unit of work is a forward, or a training step with
    the default loss.

    Attributes:
        args: positional arguments; ``inputs`` has those by name.
        built: the models of the contenders so far, in order.
    """

    args: tuple[Any, ...] = ()
    built: list[Callable[..., Any]] = field(default_factory=list)

    def given(self) -> Any:
        """The inputs, as ``optimize_`` takes them."""
        return self.args, dict(self.inputs)

    def unit(self, model: Callable[..., Any]) -> Unit:
        """One step of a model."""
        self.built.append(model)
        if not self.train:
            return lambda _: (model(*self.args, **self.inputs),)
        parameters = list(model.parameters())  # type: ignore[attr-defined]

        def step(_: int) -> tuple[Tensor, ...]:
            loss = loss_of(model(*self.args, **self.inputs))
            for parameter in parameters:
                parameter.grad = None
            loss.backward()
            return (loss,)

        return step


def case_of(family: Family, device: str, dtype: str, mode: str, seed: int) -> Case:
    """What is measured of a family, as plain data."""
    return Case(
        experiment="suite",
        family="model",
        dims=(),
        dtype=dtype,
        device=device,
        direction="forward+backward" if mode == TRAIN else "forward",
        metrics=timed_on(device)[-1:],
        options=(("model", family.name), ("kind", family.kind)),
        seed=seed,
        without=_FORMS + (_ON_CPU if device == "cpu" else ()),
    )


def make_work(family: Family, case: Case, device: torch.device, budget_s: float) -> SuiteWork:
    """Build the model of a family on a device, in the case's dtype and mode."""
    dtype = FLOAT_DTYPES[case.dtype]
    model, inputs = family.built(case.seed)

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return leaf.to(device, dtype if leaf.is_floating_point() else None)

    args, named = pytree.tree_map(moved, normalize_inputs(inputs, "bench models --suite"))
    model = model.to(device=device, dtype=dtype).train(case.needs_grad)
    return SuiteWork(case, model, named, budget_s=budget_s, args=args)


def contenders(case: Case, skip: frozenset[str] = frozenset()) -> tuple[Peer, ...]:
    """Those that take part: eager, ours, ``torch.compile`` in its modes, ours with all options."""
    first = ("eager", OURS)
    found = [p for p in models.peers(case) if p.name not in skip and p.why_not(case) is None]
    return tuple(sorted(found, key=lambda p: p.name not in first))
