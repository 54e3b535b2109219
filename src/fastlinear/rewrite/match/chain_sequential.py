"""A run of linears inside an ``nn.Sequential`` that may become one call of ``mlp``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from fastlinear.rewrite.exchange.forwards import Forward
from fastlinear.rewrite.exchange.sequential_forward import Segment, sequential_forward
from fastlinear.rewrite.match.candidate import Candidate, Chain, named


@dataclass(frozen=True, eq=False, kw_only=True)
class SequentialChain(Chain):
    """A run of linears in a Sequential, the module whose forward is exchanged.

    Attributes:
        segment: which of its children.
    """

    segment: Segment

    @property
    def title(self) -> str:
        """The Sequential's name."""
        return named(self.fqn)

    def forward(self) -> Forward:
        """The Sequential's forward with this chain as one call."""
        return sequential_forward([(self.segment, self.backend)], self.module)

    def before(self, x: Tensor) -> Tensor:
        """What the model did with the input of the first linear."""
        for child in list(self.module._modules.values())[self.segment.start : self.segment.stop]:
            assert child is not None
            x = type(child).forward(child, x)
        return x

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        """The layers one by one, those in ``rewritten`` (by name) as it has them."""
        children = list(self.module._modules.values())
        by_index = dict(zip(self.segment.linears, self.members, strict=True))
        done = False  # whether the linear before has taken the activation with it
        for i in range(self.segment.start, self.segment.stop):
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
