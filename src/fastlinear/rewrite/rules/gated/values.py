"""What is known of the tensors of a run in which gated MLPs are looked for."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Flow:
    """A gated MLP, or a gated linear layer, in a run.

    Attributes:
        gate, up, down: names of the weights; up is None where gate holds both halves, down where no
            product with a weight follows.
        activation: of the gate.
        hidden: its features.
        sizes: K and N (of no down projection None).
        mixed: of each projection that is more than a product with one weight, the names of those
            that it is made of: of an adapter, or a parametrization.
    """

    gate: str
    up: str | None
    down: str | None
    activation: str
    hidden: int
    sizes: tuple[int, int | None]
    mixed: tuple[tuple[str, ...], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The weights there are."""
        return tuple(n for n in (self.gate, self.up, self.down) if n is not None)


@dataclass(frozen=True)
class Value:
    """What a tensor is: a product of a weight and an input, maybe a part of one, maybe activated;
    or what a gate lets through; or computed from parameters alone.

    Attributes:
        weights: the names of those it is made of, the main one first.
        given, call: the numbers of the input and of the product.
        sizes: the features of the input, and its own.
        behind: what the input is, where that is a product.
        after: of what a gate lets through times a weight, the number of the flow.
        part, activation, scaled: what was done to it.
        laid: what is laid behind it along the last dimension.
        through: of what a gate lets through, the number of its flow.
        made: whether it is computed from parameters alone.
    """

    weights: tuple[str, ...]
    given: int = 0
    call: int = 0
    sizes: tuple[int, int] = (0, 0)
    behind: Value | None = None
    after: int | None = None
    part: bool = False
    activation: str = "none"
    scaled: bool = False
    laid: Value | None = None
    through: int | None = None
    made: bool = False

    @property
    def is_product(self) -> bool:
        """Whether it is a whole product, with nothing done to it."""
        rest = self.part or self.made or self.through is not None or self.laid is not None
        return not rest and self.activation == "none"

    def since(self, given: int) -> tuple[str, ...] | None:
        """The weights that made it of that input by products alone, or None."""
        found: list[str] = []
        here: Value | None = self
        while here is not None:
            found += here.weights
            if here.given == given:
                return tuple(found)
            here = here.behind
        return None


@dataclass
class Known:
    """Tensors that are alive, and what is known of them."""

    values: dict[int, tuple[weakref.ref[Tensor], Value]] = field(default_factory=dict)

    def get(self, t: Any) -> Value | None:
        """What is known of a tensor."""
        found = self.values.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def put(self, t: Tensor, value: Value) -> None:
        """Keep what is known of a tensor."""
        self.values[id(t)] = weakref.ref(t), value
