"""A run of linears that a parent's forward calls one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.rewrite.match.candidate import Candidate, Chain
from fastlinear.rewrite.match.links import Run
from fastlinear.rewrite.match.parent import Fusable


@dataclass(frozen=True, eq=False, kw_only=True)
class ParentChain(Chain):
    """A run of linears in the traced forward of a parent, the module whose forward is exchanged.

    Attributes:
        run: which of the linears it calls.
        fusable: the parent's trace; it builds one forward for all that is fused in it.
    """

    run: Run
    fusable: Fusable

    def before(self, x: Tensor) -> Tensor:
        """What the model did with the input of the first linear: (..., n_0) → (..., n_L)."""
        return self.layers(x, {})

    def layers(self, x: Tensor, rewritten: Mapping[str, Candidate]) -> Tensor:
        """The layers one by one, those in ``rewritten`` (by name) as it has them: shorter chains of
        them as one call."""
        done, names, i = "none", self.names, 0
        while i < len(names):
            member, name = self.members[i], self.activations[i]
            found = rewritten.get(member.fqn)
            shorter = None if found is None else found.chain
            if isinstance(shorter, Chain) and names[i : i + len(shorter.names)] == shorter.names:
                i += len(shorter.names) - 1
                y = shorter.after(x)
                assert isinstance(y, Tensor)
                x, done, name = y, shorter.final_activation, self.activations[i]
            elif found is not None:
                x, done = found.after(x), found.activation
            elif member.activation == name:
                x, done = member.before(x), name
            else:
                x, done = type(member.module).forward(member.module, x), "none"
            if done != name:
                x = activation_of(name).value(x)
            i += 1
        return x


@dataclass(frozen=True, eq=False, kw_only=True)
class BlockChain(ParentChain):
    """A run of linears that goes through modules which the parent calls.

    Attributes:
        blocks: these modules' names in the model; their code becomes part of the parent's forward.
    """

    blocks: tuple[str, ...]

    @property
    def what(self) -> str:
        """What it is, in a sentence."""
        return f"its chain of {len(self.members)} linears in {len(self.blocks)} blocks"
