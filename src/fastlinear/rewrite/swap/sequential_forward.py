"""The forward put in place of an ``nn.Sequential``, some of whose children become one call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastlinear.profile.effects import class_forward
from fastlinear.rewrite.swap.forwards import (
    Forward,
    call_linear_act,
    call_mlp,
    is_hooked,
    iterates_plainly,
    overridden,
    weight_and_bias,
)

_OWN_STATE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Segment:
    """Children of a Sequential that become one call, and what they must still be at each call.

    Attributes:
        start, stop: the children from ``start`` up to ``stop`` become one call.
        linears: indices of the linears; of one alone the call is ``linear_act``, else ``mlp``.
        activation, final_activation: between the layers, and after the last.
        kinds: class of each of these children.
        facts: their plain attributes (a slope, an approximation), of those without parameters.
        forwards: each class of children without parameters, and its forward.
    """

    start: int
    stop: int
    linears: tuple[int, ...]
    activation: str
    final_activation: str
    kinds: tuple[type, ...]
    facts: tuple[tuple[tuple[str, Any], ...], ...]
    forwards: tuple[tuple[type, Any], ...]

    @staticmethod
    def of(
        sequential: nn.Module,
        start: int,
        stop: int,
        linears: tuple[int, ...],
        activation: str,
        final_activation: str,
    ) -> Segment:
        """The segment of a Sequential as it is now; arguments as the attributes."""
        children: Any = list(sequential._modules.values())[start:stop]
        others = {type(c) for c in children if next(c.parameters(), None) is None}
        return Segment(
            *(start, stop, linears, activation, final_activation),
            kinds=tuple(map(type, children)),
            facts=tuple(map(_facts_of, children)),
            forwards=tuple((kind, kind.forward) for kind in others),
        )

    @staticmethod
    def pairs(
        sequential: nn.Module, linear: nn.Module, activation: nn.Module, name: str
    ) -> list[Segment]:
        """A linear with the activation behind it, wherever the Sequential holds the two; none
        where it also holds the linear with something else behind it."""
        children = list(sequential._modules.values())
        found = [i for i, child in enumerate(children) if child is linear]
        if any(i + 1 == len(children) or children[i + 1] is not activation for i in found):
            return []
        return [Segment.of(sequential, i, i + 2, (i,), "none", name) for i in found]

    def holds(self, children: tuple[Any, ...]) -> bool:
        """Whether all of it is as it was: same classes and settings, no hooks, no patches."""
        for kind, forward in self.forwards:
            if kind.forward is not forward:  # type: ignore[attr-defined]
                return False
        here = children[self.start : self.stop]
        for child, kind, facts in zip(here, self.kinds, self.facts, strict=True):
            if type(child) is not kind:
                return False
            state = child.__dict__
            if is_hooked(state) or (state["training"] and isinstance(child, nn.Dropout)):
                return False
            for name, value in facts:
                if name not in state or state[name] != value:
                    return False
        return True


def sequential_forward(
    segments: Iterable[tuple[Segment, str | None]], sequential: nn.Module
) -> Forward:
    """Forward of a Sequential in which segments are one call each, while they are as they were.

    Args:
        segments: none overlaps another; of each a forced backend or None.
        sequential: the result holds no reference to it.
    """
    fused = sorted(segments, key=lambda s: s[0].start)
    plain, count = class_forward(sequential), len(sequential._modules)

    def forward(self: Any, input: Any) -> Any:
        children = tuple(self._modules.values())
        if (
            type(self).forward is not plain
            or len(children) != count
            or not iterates_plainly(self)
            or overridden()
        ):
            return type(self).forward(self, input)
        done = 0
        for segment, backend in fused:
            for child in children[done : segment.start]:
                input = child(input)
            if segment.holds(children):
                input = _one_call(segment, children, input, backend)
            else:
                for child in children[segment.start : segment.stop]:
                    input = child(input)
            done = segment.stop
        for child in children[done:]:
            input = child(input)
        return input

    return forward


def _one_call(
    segment: Segment, children: tuple[Any, ...], x: Tensor, backend: str | None
) -> Tensor:
    activation, final = segment.activation, segment.final_activation
    if len(segment.linears) == 1:
        return call_linear_act(x, *weight_and_bias(children[segment.start]), final, backend)
    found = [weight_and_bias(children[i]) for i in segment.linears]
    weights, biases = [w for w, _ in found], [b for _, b in found]
    return call_mlp(x, weights, biases, activation, final, backend)


def _facts_of(child: nn.Module) -> tuple[tuple[str, Any], ...]:
    """The plain attributes of a module that has no parameters, its mode left out."""
    if next(child.parameters(), None) is not None:
        return ()
    state: Mapping[str, Any] = vars(child)
    return tuple(
        (k, v)
        for k, v in state.items()
        if k[0] != "_" and k != "training" and isinstance(v, _OWN_STATE)
    )
