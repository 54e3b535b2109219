"""A run of linears that a parent's forward calls one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fastlinear.ops.common.activations import activation as activation_of
from fastlinear.rewrite.match.candidate import Candidate
from fastlinear.rewrite.match.chain import Chain
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
        """The layers one by one, those in ``rewritten`` (by name) as it has them."""
        for member, name in zip(self.members, self.activations, strict=True):
            found = rewritten.get(member.fqn)
            if found is not None:
                x, done = found.after(x), found.activation
            elif member.activation == name:
                x, done = member.before(x), name
            else:
                x, done = type(member.module).forward(member.module, x), "none"
            if done != name:
                x = activation_of(name).value(x)
        return x
