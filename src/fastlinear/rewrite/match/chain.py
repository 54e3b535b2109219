"""A run of linears that may become one call, wherever a model holds it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastlinear.core.problem import Problem
from fastlinear.ops.mlp import reference
from fastlinear.ops.mlp.problem import NAME
from fastlinear.ops.mlp.selection import problem_of
from fastlinear.rewrite.exchange.forwards import call_mlp
from fastlinear.rewrite.match.candidate import Candidate, SiteCalls

Results = Tensor | tuple[Tensor, ...]


@dataclass(frozen=True, eq=False, kw_only=True)
class Chain(ABC):
    """A run of linears that may become one call.

    Attributes:
        fqn, module: the module whose forward is exchanged.
        members: the linears as the rule of linear_act sees them, first to last.
        activation, final_activation: between the layers, and after the last.
        backend: forced backend of mlp, or None.
        fast: whether fast matrix multiplication is allowed, as in ``mlp``.
    """

    fqn: str
    module: nn.Module
    members: tuple[Candidate, ...]
    activation: str
    final_activation: str
    backend: str | None = None
    fast: bool = False

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
        return NAME

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
        return problem_of(x, weights, biases, *names, self.fast, self.calls.grad)

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
        return call_mlp(x, *self._tensors(), *names, self.backend, self.fast)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> Results:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        weights = [parameters[f"{i}.dW"] for i in range(len(self.members))]
        turned = [
            w.t() if c.kind == "conv1d" else w for w, c in zip(weights, self.members, strict=True)
        ]
        biases = [parameters.get(f"{i}.db") for i in range(len(self.members))]
        return reference.mlp(x, turned, biases, self.activation, self.final_activation)


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
