"""Gated MLPs as one run of the model shows them, whatever its forwards look like.

Torch's functions are watched while the model runs: which product of a weight each value is, what
was applied to it, which part of it was taken. That finds what no trace shows, so that it can at
least be told: forwards that cannot be traced, and weights that are no layer's.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fastlinear.profile.recognise import recognise

_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.multiply_}
_PRODUCTS |= {Tensor.__mul__, Tensor.__rmul__, Tensor.__imul__}  # type: ignore[attr-defined]
_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_ATTRIBUTES: Any = Tensor  # as descriptors, which annotations hide
_TURNS = {torch.t, Tensor.t, torch.transpose, Tensor.transpose}
_TURNS |= {_ATTRIBUTES.mT.__get__, _ATTRIBUTES.T.__get__}


@dataclass(frozen=True)
class Flow:
    """A gated MLP, or a gated linear layer, in a run.

    Attributes:
        gate, up, down: names of the weights; up is None where gate holds both halves, down where no
            product with a weight follows.
        activation: of the gate.
        hidden: its features.
    """

    gate: str
    up: str | None
    down: str | None
    activation: str
    hidden: int

    @property
    def names(self) -> tuple[str, ...]:
        """The weights there are."""
        return tuple(n for n in (self.gate, self.up, self.down) if n is not None)


@dataclass(frozen=True)
class _Value:
    """What a tensor is: a product of a weight and an input, maybe a part of one, maybe activated;
    or what a gate lets through; or a weight turned."""

    weight: str
    given: int = 0
    width: int = 0
    part: bool = False
    activation: str = "none"
    through: int | None = None  # the number of a flow
    turned: bool = False


@dataclass
class _Known:
    """Tensors that are alive, and what is known of them."""

    values: dict[int, tuple[weakref.ref[Tensor], _Value]] = field(default_factory=dict)

    def get(self, t: Any) -> _Value | None:
        found = self.values.get(id(t))
        return found[1] if found is not None and found[0]() is t else None

    def put(self, t: Tensor, value: _Value) -> None:
        self.values[id(t)] = weakref.ref(t), value


class Watch(TorchFunctionMode):
    """While on, the gated MLPs that run are added to ``found``.

    Args:
        model: whose parameters are the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[Flow] = []
        self._weights = {id(p): n for n, p in model.named_parameters() if p.dim() == 2}
        self._known = _Known()
        self._inputs: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._numbers = itertools.count()
        self._activations: dict[Any, str | None] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, and looks at what it was given and gives."""
        kwargs = kwargs or {}
        before = [(a, self._known.get(a)) for a in args if isinstance(a, Tensor)]
        result = func(*args, **kwargs)
        for i, out in enumerate(_tensors(result)):
            value = self._value(func, args, kwargs, before, out)
            if value is not None:
                self._known.put(out, value)
            elif i == 0 and any(out is t for t, _ in before):
                self._known.values.pop(id(out), None)  # written over
        return result

    def _value(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        before: list[tuple[Tensor, _Value | None]],
        out: Tensor,
    ) -> _Value | None:
        weight = self._multiplied(func, args, kwargs)
        if weight is not None:
            x = args[0]
            through = self._known.get(x)
            if through is not None and through.through is not None:
                flow = self.found[through.through]
                if flow.down is None:
                    self.found[through.through] = replace(flow, down=weight)
            return _Value(weight, self._number(x), out.shape[-1])
        if func in _TURNS and len(before) == 1 and id(before[0][0]) in self._weights:
            return _Value(self._weights[id(before[0][0])], turned=True)
        known = [v for _, v in before if v is not None]
        if func in _PRODUCTS and len(before) == len(known) == 2:
            return self._gated(known[0], known[1], out)
        if len(before) != 1 or not known or known[0].turned:
            return None
        (t, value) = before[0]
        assert value is not None
        if func is F.glu and value.activation == "none" and not value.part:
            gate, up = replace(value, activation="sigmoid", part=True), replace(value, part=True)
            return self._gated(gate, up, out)
        if value.through is not None:
            return value if out.shape == t.shape and _same_memory(out, t) else None
        if out is not t and _same_memory(out, t):
            return replace(value, part=value.part or out.numel() < t.numel())
        if out.shape != t.shape or value.activation != "none":
            return None
        name = self._activation(func, args, kwargs)
        return None if name is None else replace(value, activation=name)

    def _gated(self, one: _Value, other: _Value, out: Tensor) -> _Value | None:
        """A product of two values, where these are the halves of a gate."""
        if one.turned or other.turned or one.through is not None or other.through is not None:
            return None
        if one.given != other.given or (one.activation != "none" != other.activation):
            return None
        gate, up = (other, one) if other.activation != "none" else (one, other)
        stacked = gate.weight == up.weight
        if stacked is not (gate.part and up.part) or (not stacked and (gate.part or up.part)):
            return None
        hidden = gate.width // 2 if stacked else gate.width
        if out.shape[-1] != hidden or gate.width != up.width:
            return None
        up_weight = None if stacked else up.weight
        self.found.append(Flow(gate.weight, up_weight, None, gate.activation, hidden))
        return _Value("", through=len(self.found) - 1)

    def _multiplied(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        """The weight that ``func`` multiplies its first argument by, or None."""
        if func is F.linear:
            weight = args[1] if len(args) > 1 else kwargs.get("weight")
            return self._weights.get(id(weight)) if args else None
        if func in _MATMULS and len(args) == 2:
            turned = self._known.get(args[1])
            return turned.weight if turned is not None and turned.turned else None
        return None

    def _number(self, x: Tensor) -> int:
        """The same for the same tensor, as long as it is not written to."""
        known = self._inputs.get(id(x))
        if known is None or known[0]() is not x:
            known = self._inputs[id(x)] = weakref.ref(x), next(self._numbers)
        return hash((known[1], 0 if x.is_inference() else x._version))

    def _activation(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> str | None:
        rest = args[1:]
        key = func, repr(rest), repr(sorted(kwargs.items()))
        if key not in self._activations:
            call: Callable[[Tensor], Any] = lambda t: func(t, *rest, **kwargs)  # noqa: E731
            found = recognise(call)
            self._activations[key] = None if found is None else found.name
        return self._activations[key]


def could_hold(model: nn.Module) -> bool:
    """Whether the sizes of a model's weights allow a gated MLP."""
    shapes = [tuple(p.shape) for p in model.parameters() if p.dim() == 2]
    if len(set(shapes)) < len(shapes):
        return True
    inputs = {k for _, k in shapes}
    return any(n % 2 == 0 and n // 2 in inputs for n, _ in shapes)


def _tensors(result: Any) -> Iterable[Tensor]:
    if isinstance(result, Tensor):
        return (result,)
    if isinstance(result, tuple | list):
        return [t for t in result if isinstance(t, Tensor)]
    return ()


def _same_memory(a: Tensor, b: Tensor) -> bool:
    try:
        return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    except RuntimeError:  # of no memory of its own: sparse, or inside a transform
        return False
