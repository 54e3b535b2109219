"""What a rewrite rule finds: a part of a model that one call computes.

The engine in ``evaluate/`` times every fusion, verifies it, puts it in place and reports it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from fastlinear.core.cost import Cost
from fastlinear.core.problem import Problem
from fastlinear.rewrite.match.calls import Results, SiteCalls
from fastlinear.rewrite.match.links import Edit, Run
from fastlinear.rewrite.match.parent import Fusable
from fastlinear.rewrite.swap import forwards
from fastlinear.rewrite.swap.sequential_forward import Segment
from fastlinear.rewrite.swap.shared_calls import Group


@dataclass(frozen=True)
class InForward:
    """How the forward of a module makes the call.

    Attributes:
        fusable: the trace of that forward; all that is fused in it becomes one forward.
        edit: which of its steps the call replaces.
        within: linears whose blocks become part of that forward.
        blocks: those blocks, by their names in the model.
    """

    fusable: Fusable
    edit: Edit
    within: tuple[str, ...] = ()
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class WholeForward:
    """How a module makes the call in place of all of its forward.

    Attributes:
        make: makes that forward.
    """

    make: Callable[[], forwards.Forward]


@dataclass(frozen=True)
class InCalls:
    """How linears that a module calls with one tensor make the call: the first of them for all,
    inside calls of the module's own forward.

    Attributes:
        group: the linears, and the call.
    """

    group: Group


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a finding says of a fusion.

    Attributes:
        title: a few words.
        message: microseconds of a call before and after → what is slow and what would help.
        advice: what the reader puts in its place; None where ``optimize_`` alone may.
        details: further facts, JSON-ready.
        words: what is seen, where it could not be measured; by default the title.
        replace: the advice as a sentence behind the message, where it is not in place.
        aside: what is to be said of ``optimize_`` where that leaves it alone.
        cost: of one call, by default that of its first Problem.
        covers: whether what other findings say to gain on its linears is part of its gain.
    """

    title: str
    message: Callable[[float, float], str]
    advice: str | None
    details: dict[str, Any]
    words: str = ""
    replace: str = ""
    aside: str = ""
    cost: Cost | None = None
    covers: bool = False


@dataclass(frozen=True)
class InSequential:
    """How a Sequential makes the call in place of some of its children.

    Attributes:
        segment: the children.
        run: their linears by names inside the Sequential.
    """

    segment: Segment
    run: Run


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """Which backends compute a fusion.

    Attributes:
        backend: a forced one, or None.
        served: piece → backend, where dispatch has no say in it.
        decided: the forward Problems that dispatch decides about, where those are not the fusion's.
        eager_may_gain: whether it may gain though dispatch takes PyTorch's own path for its
            products.
    """

    backend: str | None = None
    served: dict[str, str] | None = None
    decided: tuple[Problem, ...] = ()
    eager_may_gain: bool = True


@dataclass(frozen=True, eq=False, kw_only=True)
class Fusion:
    """A part of a model that one call computes.

    Attributes:
        rule: the rule that found it, or the family that computes it; also the finding's code.
        fqn, module: the module whose forward makes the call; the name is the finding's.
        members: the linears as candidates, or the module itself where it is none.
        names: theirs in the model; without members the modules that the call computes.
        calls: the inputs that were seen.
        problems: the forward Problem of each kind of call, the most frequent first.
        dispatch: which backends compute it.
        tensors: what is differentiated, by the names of its gradients; by default the parameters
            of the members, as ``"0.dW"``.
        layers: the model's own ops on x. Linears that are rewritten by themselves, by name, run as
            they are rewritten.
        original: the same where none is rewritten, if that is something else.
        after: the one call on x.
        exact: the same by differentiable ops, on x and on other values of ``tensors``; it draws
            the random numbers that ``layers`` draws. None where it is left to the reader.
        report: what a finding says of it, or None where there is none.
        forward: how it is put in place; None leaves it to the reader.
        activation: what is fused with each linear; None where each is as it is by itself.
        whole: whether no smaller call may take some of its linears.
        competes: whether it may take linears of another call, where it is faster than that.
        alike: what fusions with equal Problems must share to be timed once.
        reads: what several linears read, in words.
        what: what it is, in a sentence.
        title: what it is called in notes.
    """

    rule: str
    fqn: str
    module: nn.Module
    calls: SiteCalls
    problems: tuple[Problem, ...]
    layers: Callable[[Tensor, Mapping[str, Any]], Results] = field(repr=False)
    after: Callable[[Tensor], Results] = field(repr=False)
    members: tuple[Any, ...] = field(default=(), repr=False)
    names: tuple[str, ...] = ()
    dispatch: Dispatch = Dispatch()
    tensors: Mapping[str, Tensor] | None = field(default=None, repr=False)
    original: Callable[[Tensor], Results] | None = field(default=None, repr=False)
    exact: Callable[[Tensor, dict[str, Tensor]], Results] | None = field(default=None, repr=False)
    report: Report | None = field(default=None, repr=False)
    forward: InForward | WholeForward | InSequential | InCalls | None = field(
        default=None, repr=False
    )
    activation: str | None = None
    whole: bool = False
    competes: bool = True
    alike: tuple[Any, ...] = ()
    reads: str = ""
    what: str = ""
    title: str = ""

    def __post_init__(self) -> None:
        names = self.names or tuple(c.fqn for c in self.members)
        object.__setattr__(self, "names", names)
        if not self.title:
            object.__setattr__(self, "title", f"{names[0]!r} to {names[-1]!r}")

    def before(self, x: Tensor) -> Results:
        """What the model does with x."""
        return self.layers(x, {}) if self.original is None else self.original(x)

    def parameters(self) -> dict[str, Tensor]:
        """What is differentiated, by the names of its gradients."""
        if self.tensors is not None:
            return dict(self.tensors)
        each = ((i, c.parameters()) for i, c in enumerate(self.members))
        return {f"{i}.{name}": t for i, found in each for name, t in found.items()}

    @property
    def asked(self) -> tuple[Problem, ...]:
        """The forward Problems that dispatch decides about."""
        if self.dispatch.served is not None:
            return ()
        return self.dispatch.decided or self.problems

    @property
    def route(self) -> str:
        """How it is rewritten, see ``plan.Rewrite``."""
        return "own" if any(c.module is self.module for c in self.members) else "chain"

    @property
    def blocks(self) -> tuple[str, ...]:
        """Modules whose code becomes part of its forward, by name."""
        return self.forward.blocks if isinstance(self.forward, InForward) else ()

    @property
    def tried(self) -> tuple[str, tuple[str, ...]] | None:
        """What tells it from every other fusion that may be put in place; None where it may not."""
        return None if self.forward is None else (self.rule, self.names)

    @property
    def key(self) -> str:
        """What tells it from every other fusion of the model: its first linear or module."""
        return self.names[0]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Fusions of one kind do the same work and are timed once."""
        kinds = tuple((k.count, k.x.stride(), k.input_grad) for k in self.calls.kinds)
        return (self.rule, self.problems, kinds, self.calls.autocast, self.alike)
