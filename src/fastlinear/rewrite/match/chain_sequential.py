"""A run of linears inside an ``nn.Sequential`` that may become one call of ``mlp``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from fastlinear.rewrite.exchange.forwards import Forward, call_mlp, hooked_globally, weight_and_bias
from fastlinear.rewrite.exchange.swap import Swap, mark
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.chain import Chain, named

_OWN_STATE = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Layout:
    """Which children of a Sequential the chain takes over, and what all of them must still be.

    Attributes:
        start, stop: the children from ``start`` up to ``stop`` become one call.
        linears: indices of the linears.
        activation, final_activation: between the layers, and after the last.
        kinds: class of every child.
        facts: plain attributes of every activation (a slope, an approximation).
    """

    start: int
    stop: int
    linears: tuple[int, ...]
    activation: str
    final_activation: str
    kinds: tuple[type, ...]
    facts: tuple[tuple[tuple[str, Any], ...], ...]

    @staticmethod
    def facts_of(child: nn.Module) -> tuple[tuple[str, Any], ...]:
        """The plain attributes of a module that has no parameters, its mode left out."""
        if next(child.parameters(), None) is not None:
            return ()
        state = vars(child).items()
        return tuple(
            (k, v)
            for k, v in state
            if k[0] != "_" and k != "training" and isinstance(v, _OWN_STATE)
        )

    def holds(self, children: tuple[Any, ...]) -> bool:
        """Whether the Sequential still is what was matched: same classes, no hooks, no patches."""
        if len(children) != len(self.kinds) or hooked_globally():
            return False
        for i in range(self.start, self.stop):
            child: Any = children[i]
            if type(child) is not self.kinds[i]:
                return False
            state = child.__dict__
            if (
                "forward" in state
                or state["_forward_hooks"]
                or state["_forward_pre_hooks"]
                or state["_backward_hooks"]
                or state["_backward_pre_hooks"]
                or (state["training"] and isinstance(child, nn.Dropout))
            ):
                return False
            for name, value in self.facts[i]:
                if state[name] != value:
                    return False
        return True


def chained(layout: Layout, backend: str | None, fast: bool = False) -> Forward:
    """Forward of a Sequential in which a run of linears is one call of ``mlp``."""
    start, stop, linears = layout.start, layout.stop, layout.linears
    activation, final = layout.activation, layout.final_activation
    plain = nn.Sequential.forward

    def forward(self: nn.Sequential, input: Any) -> Any:
        children = tuple(self._modules.values())
        if not layout.holds(children):
            return plain(self, input)
        for child in children[:start]:
            input = child(input)  # type: ignore[misc]
        found = [weight_and_bias(children[i]) for i in linears]  # type: ignore[arg-type]
        weights, biases = [w for w, _ in found], [b for _, b in found]
        input = call_mlp(input, weights, biases, activation, final, backend, fast)
        for child in children[stop:]:
            input = child(input)  # type: ignore[misc]
        return input

    return mark(forward)


@dataclass(frozen=True, eq=False, kw_only=True)
class SequentialChain(Chain):
    """A run of linears in a Sequential, the module whose forward is exchanged.

    Attributes:
        layout: which of its children.
    """

    layout: Layout

    @property
    def title(self) -> str:
        """The Sequential's name."""
        return named(self.fqn)

    def swap(self) -> Swap:
        """The forward to exchange."""
        return Swap(self.fqn, self.module, chained(self.layout, self.backend, self.fast))

    def before(self, x: Tensor) -> Tensor:
        """What the model did with the input of the first linear."""
        for child in list(self.module._modules.values())[self.layout.start : self.layout.stop]:
            assert child is not None
            x = type(child).forward(child, x)
        return x

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        """The layers one by one, those in ``rewritten`` (by name) as it has them."""
        children = list(self.module._modules.values())
        by_index = dict(zip(self.layout.linears, self.members, strict=True))
        done = False  # whether the linear before has taken the activation with it
        for i in range(self.layout.start, self.layout.stop):
            child, member = children[i], by_index.get(i)
            assert child is not None
            if member is not None and member.fqn in rewritten:
                x = rewritten[member.fqn].after(x)
                done = rewritten[member.fqn].activation != "none"
            elif member is not None or not done:
                x = type(child).forward(child, x)
                done = False
            elif not isinstance(child, (nn.Dropout, nn.Identity)):
                done = False
        return x
