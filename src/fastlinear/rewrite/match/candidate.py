"""A linear that may be rewritten, and a run of linears that may become one call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fastlinear.core.problem import Problem
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.linear_act import reference
from fastlinear.ops.linear_act.op import problem_of
from fastlinear.ops.mlp import reference as mlp_reference
from fastlinear.ops.mlp.problem import NAME as MLP
from fastlinear.ops.mlp.selection import problem_of as mlp_problem_of
from fastlinear.rewrite.exchange import forwards
from fastlinear.rewrite.fusion import Fusion
from fastlinear.rewrite.match.calls import Results, SiteCalls
from fastlinear.rewrite.match.eligible import Refusal
from fastlinear.rewrite.match.parent import Fusable


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
    chain: Chain | Fusion | None = field(default=None, repr=False)

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


@dataclass(frozen=True, eq=False, kw_only=True)
class Chain(ABC):
    """A run of linears that may become one call.

    Attributes:
        fqn, module: the module whose forward is exchanged.
        members: the linears as the rule of linear_act sees them, first to last.
        activation, final_activation: between the layers, and after the last.
        backend: forced backend of mlp, or None.
    """

    fqn: str
    module: nn.Module
    members: tuple[Candidate, ...]
    activation: str
    final_activation: str
    backend: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The linears' fully qualified names."""
        return tuple(c.fqn for c in self.members)

    @property
    def key(self) -> str:
        """What tells it from every other chain of the model: its first linear."""
        return self.names[0]

    @property
    def rule(self) -> str:
        """The family that computes it."""
        return MLP

    @property
    def route(self) -> str:
        """How it is rewritten, see ``plan.Rewrite``."""
        return "chain"

    @property
    def eager_may_gain(self) -> bool:
        """Whether one call may gain though PyTorch's own path computes it."""
        return False

    @property
    def alike(self) -> tuple[Any, ...]:
        """What, beside its Problems, chains that are measured once must share."""
        return ()

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        return f"its chain of {len(self.members)} linears"

    @property
    def title(self) -> str:
        """What it is called in notes."""
        return f"{self.names[0]!r} to {self.names[-1]!r}"

    @property
    def activations(self) -> tuple[str, ...]:
        """The activation after each linear."""
        return (*(self.activation for _ in self.members[1:]), self.final_activation)

    @property
    def calls(self) -> SiteCalls:
        """How it was called: as its first linear was."""
        return self.members[0].calls

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The forward Problem of each kind of call, the most frequent first."""
        return tuple(self._problem(k.x) for k in self.calls.kinds)

    @property
    def asked(self) -> tuple[Problem, ...]:
        """The forward Problems that dispatch decides about, as its call asks them."""
        return self.problems

    @property
    def served(self) -> dict[str, str] | None:
        """Piece → backend, where dispatch has no say in it; None where it decides."""
        return None

    def _problem(self, x: Tensor) -> Problem:
        dtype = self.calls.autocast
        weights, biases = self._tensors()
        weights = [w.detach() for w in weights]
        biases = [None if b is None else b.detach() for b in biases]
        if dtype is not None:
            x, weights = x.to(dtype), [w.to(dtype) for w in weights]
            biases = [None if b is None else b.to(dtype) for b in biases]
        names = self.activation, self.final_activation
        return mlp_problem_of(x, weights, biases, *names, self.calls.grad)

    def _tensors(self) -> tuple[list[Tensor], list[Tensor | None]]:
        found = [c.weight_and_bias() for c in self.members]
        return [w for w, _ in found], [b for _, b in found]

    def parameters(self) -> dict[str, Tensor]:
        """Weights and biases by layer and the names of their gradients, ``"0.dW"``."""
        return {
            f"{i}.{title}": t
            for i, c in enumerate(self.members)
            for title, t in c.parameters().items()
        }

    @abstractmethod
    def before(self, x: Tensor) -> Results:
        """What the model did with the input of the first linear."""

    @abstractmethod
    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> Results:
        """The layers one by one, those in ``rewritten`` (by name) as it has them."""

    def after(self, x: Tensor) -> Results:
        """One call of ``mlp``."""
        names = self.activation, self.final_activation
        return forwards.call_mlp(x, *self._tensors(), *names, self.backend)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> Results:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        weights = [parameters[f"{i}.dW"] for i in range(len(self.members))]
        turned = [
            w.t() if c.kind == "conv1d" else w for w, c in zip(weights, self.members, strict=True)
        ]
        biases = [parameters.get(f"{i}.db") for i in range(len(self.members))]
        return mlp_reference.mlp(x, turned, biases, self.activation, self.final_activation)


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
