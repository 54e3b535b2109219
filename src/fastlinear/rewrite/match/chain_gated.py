"""Linears that compute a gated MLP, as one call of ``gated_mlp``: those of a module, or of a part
of a parent's forward."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fastlinear.core.problem import Problem
from fastlinear.nn.recognised import Gated
from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.ops.gated_mlp import reference
from fastlinear.ops.gated_mlp.problem import NAME
from fastlinear.ops.gated_mlp.selection import problem_of
from fastlinear.ops.gated_mlp.stacking import Biases, Weights, split_pre
from fastlinear.profile.graph import Observed
from fastlinear.rewrite.exchange.gated_forward import call_gated, gated_forward
from fastlinear.rewrite.exchange.swap import Swap
from fastlinear.rewrite.match.candidate import Candidate, Chain, named
from fastlinear.rewrite.match.gates import Gate
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.match.written import Written


@dataclass(frozen=True, eq=False, kw_only=True)
class _Gates(Chain, ABC):
    """Gate, up and down projection, as ``gated`` names them: its members, in that order."""

    gated: Gated

    @property
    def opened(self) -> Written | None:
        """What the forward makes of gate and up, where it is written out."""
        return None

    @property
    def rule(self) -> str:
        """gated_mlp."""
        return NAME

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        how = "" if self.opened is None else f" ({self.activation} written out)"
        return f"its gated MLP of {len(self.members)} linears{how}"

    def _held(self) -> tuple[Weights, Biases]:
        tensors = iter(zip(*self._tensors(), strict=True))
        layers = self.gated.gate, self.gated.up, self.gated.down
        held = [(None, None) if name is None else next(tensors) for name in layers]
        weights, biases = zip(*held, strict=True)
        return Weights(*weights), Biases(*biases)

    def _problem(self, x: Tensor) -> Problem:
        dtype = self.calls.autocast

        def cast(t: Tensor | None) -> Any:
            return None if t is None else t.detach() if dtype is None else t.detach().to(dtype)

        weights, biases = self._held()
        rows = cast(x).reshape(-1, x.shape[-1])
        held = Weights(*map(cast, weights)), Biases(*map(cast, biases))
        names = self.gated.activation, self.gated.order
        return problem_of(rows, *held, *names, None, self.calls.grad)

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        """The layers one by one, those in ``rewritten`` (by name) as it has them."""

        def one(member: Candidate, x: Tensor) -> tuple[Tensor, str]:
            found = rewritten.get(member.fqn)
            if found is None:
                return type(member.module).forward(member.module, x), "none"
            return found.after(x), found.activation

        first, done = one(self.members[0], x)
        second = None if self.gated.up is None else one(self.members[1], x)[0]
        gate, up = split_pre((first, second), self.gated.order)
        if self.opened is not None:
            hidden = self.opened.run(gate, up)
        else:
            hidden = (gate if done != "none" else activation_of(self.activation).value(gate)) * up
        return hidden if self.gated.down is None else one(self.members[-1], hidden)[0]

    def after(self, x: Tensor) -> Tensor:
        """One call of ``gated_mlp``."""
        return call_gated(x, *self._held(), self.gated, self.backend)

    def exact(self, x: Tensor, parameters: dict[str, Tensor]) -> Tensor:
        """The same by differentiable torch ops on other values, for the oracle in float64."""
        names = self.gated.names

        def held(name: str | None, title: str) -> Any:
            return None if name is None else parameters.get(f"{names.index(name)}.{title}")

        def weight(name: str | None) -> Any:  # (N, K)
            found = held(name, "dW")
            turned = name is not None and self.members[names.index(name)].kind == "conv1d"
            return found.t() if turned else found

        layers = self.gated.gate, self.gated.up, self.gated.down
        weights = Weights(*map(weight, layers))
        biases = Biases(*(held(name, "db") for name in layers))
        return reference.gated_mlp(x, weights, biases, self.activation, self.gated.order)


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedChain(_Gates):
    """The linears of a module that is a gated MLP, and whose forward is exchanged.

    Attributes:
        gated: how the module computes it.
        observed: its arguments in one call: one tensor.
    """

    observed: Observed

    @property
    def title(self) -> str:
        """The module's name."""
        return named(self.fqn)

    def swap(self) -> Swap:
        """The forward to exchange."""
        made = gated_forward(self.module, self.gated, self.observed, self.backend)
        return Swap(self.fqn, self.module, made)

    def before(self, x: Tensor) -> Tensor:
        """What the model did with the module's input."""
        y: Tensor = type(self.module).forward(self.module, x)
        return y


@dataclass(frozen=True, eq=False, kw_only=True)
class GatedPart(_Gates):
    """A gated MLP in the traced forward of a parent, the module whose forward is exchanged.

    Attributes:
        gate: where it is in that forward.
        fusable: the parent's trace; it builds one forward for all that is fused in it.
    """

    gate: Gate
    fusable: Fusable

    @property
    def opened(self) -> Written | None:
        """As of ``gate``."""
        return self.gate.opened

    @property
    def eager_may_gain(self) -> bool:
        """Of what is written out PyTorch's own path is one operation."""
        return self.opened is not None

    @property
    def alike(self) -> tuple[Any, ...]:
        """How it is written out."""
        return () if self.opened is None else self.opened.alike

    def before(self, x: Tensor) -> Tensor:
        """What the model did with the value that both halves read."""
        return self.layers(x, {})
