"""A linear that may be rewritten."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.activations.reference import activation as activation_of
from fastlinear.core.problem import Problem
from fastlinear.families.linear import reference
from fastlinear.families.linear.op import problem_of
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.calls import SiteCalls
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.swap import forwards

OWN = "grouped"
"""The kind of a candidate that is no linear."""


@dataclass(frozen=True, eq=False)
class Candidate:
    """A linear that may be rewritten.

    Attributes:
        fqn, module: the linear; one written on parameters has its weight's name, and a layer that
            shares them.
        kind: ``"linear"`` or ``"conv1d"`` (its weight is (K, N)); ``"grouped"`` for a grouped layer
            that is no linear.
        activation: fused activation; ``"none"`` changes the backend only.
        route: ``"plain"``, ``"parent"``, ``"chain"`` or ``"own"``; see ``plan.Rewrite``.
        activation_fqn, activation_module: the activation's module, where it is one.
        parent_fqn, parent, pairs: the parent, on the parent route, and what its trace offers; of
            an ``nn.Sequential`` there is none.
        calls: what was observed.
        problems: the forward Problem of each kind of call, the most frequent first.
        backend: forced forward backend, or None.
        fallback: why its activation is left alone although there is one, or None.
        chain: the chain it is part of, on the chain route.
    """

    fqn: str
    module: nn.Module
    kind: str
    activation: str
    route: str
    calls: SiteCalls
    problems: tuple[Problem, ...] = ()
    backend: str | None = None
    activation_fqn: str | None = None
    activation_module: nn.Module | None = None
    parent_fqn: str | None = None
    parent: nn.Module | None = None
    pairs: Fusable | None = field(default=None, repr=False)
    fallback: Refusal | None = None
    chain: Fusion | None = field(default=None, repr=False)

    @property
    def problem(self) -> Problem:
        """The Problem of its most frequent call."""
        return self.problems[0]

    @property
    def unit(self) -> str:
        """Candidates of one unit are kept or dropped together: those of one chain."""
        return self.fqn if self.chain is None else f"chain {self.chain.key}"

    @property
    def group(self) -> tuple[Any, ...]:
        """Candidates of one group do the same work and are measured once."""
        if self.chain is not None:
            return ("chain", self.chain.key)
        kinds = tuple((k.count, k.input_grad) for k in self.calls.kinds)
        activation = type(self.activation_module).__name__
        which = (self.route, self.kind, activation, self.calls.autocast, self.backend)
        return (self.problems, kinds, *which)

    def parameters(self) -> dict[str, Tensor]:
        """Weight and bias by the names of their gradients, whether they are parameters, buffers
        or plain attributes."""
        found = {t: getattr(self.module, n, None) for n, t in (("weight", "dW"), ("bias", "db"))}
        return {title: t for title, t in found.items() if isinstance(t, Tensor)}

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """The weight as (N, K), and the bias."""
        weight, bias = forwards.weight_as_is_and_bias(self.module)
        return (weight.t() if self.kind == "conv1d" else weight), bias

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        w = parameters["dW"].t() if self.kind == "conv1d" else parameters["dW"]
        return reference.linear_act(x, w, parameters.get("db"), self.activation)

    def before(self, x: Tensor) -> Tensor:
        """What the model did: the linear's own forward, then its activation. x (..., K)."""
        y = type(self.module).forward(self.module, x)
        if self.activation_module is not None:
            y = type(self.activation_module).forward(self.activation_module, y)
        elif self.activation != "none":
            y = activation_of(self.activation).value(y)
        return y  # type: ignore[no-any-return]

    def after(self, x: Tensor) -> Tensor:
        """What the rewritten model does. x (..., K) → (..., N)."""
        return forwards.call_linear_act(x, *self.weight_and_bias(), self.activation, self.backend)


def problems_of(
    module: nn.Module, kind: str, activation: str, calls: SiteCalls
) -> tuple[Problem, ...]:
    """The forward Problem of each kind of call, as ``linear_act`` will see it."""
    weight: Any = module.weight
    bias: Any = module.bias
    if kind == "conv1d":
        weight = weight.t()
    found = []
    with torch.no_grad():
        for seen in calls.kinds:
            x = seen.x if calls.autocast is None else seen.x.to(calls.autocast)
            found.append(problem_of(x, weight, bias, activation, calls.grad))
    return tuple(found)


def weights_and_biases(members: Sequence[Candidate]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Their weights, each (N, K), and their biases, as they are now."""
    found = [c.weight_and_bias() for c in members]
    return [w for w, _ in found], [b for _, b in found]


def named(fqn: str) -> str:
    """A module's name in a sentence."""
    return repr(fqn) if fqn else "of the root model"


def all_different(members: tuple[Candidate, ...]) -> bool:
    """Whether no layer, and no weight or bias, is there twice."""
    tensors = [t for c in members for t in c.parameters().values()]
    return len({id(t) for t in tensors}) == len(tensors)


def one_pass(members: tuple[Candidate, ...]) -> bool:
    """Whether all linears ran as often, on as many rows: nobody else calls one of them."""
    kinds = [[(k.count, k.x.shape[:-1]) for k in c.calls.kinds] for c in members]
    return all(k == kinds[0] for k in kinds)
