"""What a rewrite rule finds: a part of a model that one call computes.

The engine in ``trial/`` times every fusion, verifies it, puts it in place and reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fastlinear.core.problem import Problem
from fastlinear.rewrite.match.calls import Results, SiteCalls
from fastlinear.rewrite.match.links import Edit
from fastlinear.rewrite.match.parent import Fusable


@dataclass(frozen=True)
class Forward:
    """How the forward of a module makes the call.

    Attributes:
        fusable: the trace of that forward; all that is fused in it becomes one forward.
        edit: which of its steps the call replaces.
    """

    fusable: Fusable
    edit: Edit


@dataclass(frozen=True)
class Report:
    """What a finding says of a fusion.

    Attributes:
        title: a few words.
        message: microseconds of a call before and after → what is slow and what would help.
        advice: what the reader puts in its place; None where ``optimize_`` may.
        details: further facts, JSON-ready.
        note: what is said in brackets where it could not be measured; by default nothing.
    """

    title: str
    message: Callable[[float, float], str]
    advice: str | None
    details: dict[str, Any]
    note: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class Fusion:
    """A part of a model that one call computes.

    Attributes:
        rule: the rule that found it, or the family that computes it; also the finding's code.
        fqn, module: the module whose forward makes the call; the name is the finding's.
        names: the linears, by their names in the model, or the modules that the call computes.
        calls: the inputs that were seen.
        problems: the forward Problem of each kind of call, the most frequent first.
        tensors: what is differentiated, by the names of its gradients.
        layers: the model's own ops on x. Linears that are rewritten by themselves, by name, run as
            they are rewritten.
        after: the one call on x.
        exact: the same by differentiable ops, on x and on other values of ``tensors``; it draws
            the random numbers that ``layers`` draws. None where it is left to the reader.
        report: what a finding says of it, or None where there is none.
        forward: how it is put in place; None leaves it to the reader.
        activation: what is fused with a linear.
        backend: a forced backend, or None.
        alike: what fusions with equal Problems must share to be timed once.
        what: what it is, in a sentence.
    """

    rule: str
    fqn: str
    module: nn.Module
    names: tuple[str, ...]
    calls: SiteCalls
    problems: tuple[Problem, ...]
    tensors: Mapping[str, Tensor] = field(repr=False)
    layers: Callable[[Tensor, Mapping[str, Any]], Results] = field(repr=False)
    after: Callable[[Tensor], Results] = field(repr=False)
    exact: Callable[[Tensor, dict[str, Tensor]], Results] | None = field(default=None, repr=False)
    report: Report | None = field(default=None, repr=False)
    forward: Forward | None = field(default=None, repr=False)
    activation: str = "none"
    backend: str | None = None
    alike: tuple[Any, ...] = ()
    what: str = ""

    def before(self, x: Tensor) -> Results:
        """What the model does with x."""
        return self.layers(x, {})

    def parameters(self) -> dict[str, Tensor]:
        """What is differentiated, by the names of its gradients."""
        return dict(self.tensors)

    @property
    def key(self) -> str:
        """What tells it from every other fusion of the model: its first linear or module."""
        return self.names[0]

    @property
    def title(self) -> str:
        """What it is called in notes."""
        return f"{self.rule} of {', '.join(map(repr, self.names))}"

    @property
    def kind(self) -> tuple[Any, ...]:
        """Fusions of one kind do the same work and are timed once."""
        kinds = tuple((k.count, k.x.stride(), k.input_grad) for k in self.calls.kinds)
        return (self.rule, self.problems, kinds, self.calls.autocast, self.alike)

    # Chains that no rule folder finds yet say these otherwise.

    @property
    def route(self) -> str:
        """How it is rewritten, see ``plan.Rewrite``."""
        return "chain"

    @property
    def asked(self) -> tuple[Problem, ...]:
        """The forward Problems that dispatch decides about."""
        return self.problems

    @property
    def served(self) -> dict[str, str] | None:
        """Piece → backend, where dispatch has no say in it."""
        return None

    @property
    def eager_may_gain(self) -> bool:
        """Whether it may gain though dispatch takes PyTorch's own path for its products."""
        return True
