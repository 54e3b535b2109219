"""Gated MLPs as one run of the model shows them, whatever its forwards look like.

Torch's functions are watched while the model runs: which product of a weight each value is, what
was applied to it, which part of it was taken. That finds what no trace shows, so that it can at
least be told: forwards that cannot be traced, and projections that are more than one product.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fastlinear.core.function_mode import KnowingMode
from fastlinear.profile import equations
from fastlinear.profile.positional import positional
from fastlinear.profile.recognise import recognise
from fastlinear.rewrite.rules.gated.values import Flow, Known, Value

_T: Any = Tensor  # with what annotations hide
_PRODUCTS = {torch.mul, torch.multiply, Tensor.mul, Tensor.mul_, Tensor.multiply, Tensor.multiply_}
_PRODUCTS |= {_T.__mul__, _T.__rmul__, _T.__imul__}
_SUMS = {torch.add, Tensor.add, Tensor.add_, _T.__add__, _T.__radd__, _T.__iadd__}
_MATMULS = {torch.matmul, torch.mm, Tensor.matmul, Tensor.mm, Tensor.__matmul__}
_CATS = {torch.cat, torch.concat, torch.concatenate}
_DETACHED = {torch.detach, Tensor.detach, Tensor.detach_, _T.data.__get__}
_OF_GRADIENTS = {Tensor.register_hook, _T.requires_grad.__get__, _T.grad_fn.__get__, *_DETACHED}
_SHAPES = {_T.shape.__get__, _T.ndim.__get__, Tensor.size, Tensor.dim}
_MODE: Any = torch._C._set_grad_enabled


class Watch(KnowingMode):
    """While on, the gated MLPs that run are added to ``found``.

    Args:
        model: whose parameters are the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: list[Flow] = []
        self._held = {id(t): n for n, t in (*model.named_buffers(), *model.named_parameters())}
        self._weights = {id(p): n for n, p in model.named_parameters() if p.dim() == 2}
        self._biases = {id(p) for p in model.parameters() if p.dim() == 1}
        self._known = Known()
        self._grad: bool | None = None  # as the forward's code has set it
        self._read: set[int] = set()  # flows of which something else reads what is let through
        self._inputs: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        self._numbers = itertools.count(1)
        self._activations: dict[Any, str | None] = {}
        self._looks: dict[str, list[Callable[..., None]]] = {}

    def on_product(self, weight: str, look: Callable[..., None]) -> None:
        """Have ``look(None, (x,), {})`` called before each product of x with that weight."""
        self._looks.setdefault(weight, []).append(look)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, and looks at what it was given and gives."""
        kwargs = kwargs or {}
        given, named = positional(func, args, kwargs)
        before = [(a, self._known.get(a)) for a in _flat(given) if isinstance(a, Tensor)]
        product = self._multiplied(func, given, named)
        if product is not None:
            for look in self._looks.get(product[1][0], ()):
                look(None, product[:1], {})
        result = func(*args, **kwargs)
        if self._hides(func, args):
            for t, _ in before:
                self._known.values.pop(id(t), None)
            return result
        if func in _SHAPES:
            self._note_read(before)  # to decide by it, perhaps
        for i, out in enumerate(_tensors(result)):
            value = (
                self._value(func, given, named, before, out)
                if product is None
                else self._product(*product, out)
            )
            if value is None and product is None:
                self._note_read(before)
            if value is not None:
                self._known.put(out, value)
            elif i == 0 and any(out is t for t, _ in before):
                self._known.values.pop(id(out), None)  # written over
        return result

    def _hides(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether gradients stop there or take another way: a result says nothing of that."""
        if func is _MODE:
            self._grad = args[0]
            self._known.values.clear()
            return True
        alone = self._grad is not None and self._grad is not torch.is_grad_enabled()
        return alone or func in _OF_GRADIENTS  # alone: an autograd function's own forward

    def _note_read(self, before: list[tuple[Tensor, Value | None]]) -> None:
        """An operation reads what gates let through, and goes on with it otherwise."""
        for _, value in before:
            if value is not None and value.through is not None:
                self._read.add(value.through)
                flow = self.found[value.through]
                self.found[value.through] = replace(flow, down=None, sizes=(flow.sizes[0], None))

    def _product(self, x: Tensor, weights: tuple[str, ...], out: Tensor) -> Value:
        """A product of a weight, made of these, and x."""
        behind, after = self._known.get(x), None
        if behind is not None and behind.through is not None:
            after = behind.through
            if self.found[after].down is None and after not in self._read:
                self._go_down(after, weights, out)
        if behind is not None and not behind.is_product:
            behind = None
        sizes, call = (x.shape[-1], out.shape[-1]), next(self._numbers)
        return Value(weights, self._number(x), call, sizes, behind, after)

    def _go_down(self, number: int, weights: tuple[str, ...], out: Tensor) -> None:
        """What a flow's gate lets through is multiplied by a weight made of these."""
        flow = self.found[number]
        mixed = tuple(m for m in flow.mixed if not {*m} <= {*weights})
        mixed = (*mixed, weights) if len(weights) > 1 else mixed
        sizes = flow.sizes[0], out.shape[-1]
        self.found[number] = replace(flow, down=weights[0], sizes=sizes, mixed=mixed)

    def _value(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: list[tuple[Tensor, Value | None]],
        out: Tensor,
    ) -> Value | None:
        if before and (made := self._made(before, out)) is not None:
            return made
        known = [v for _, v in before if v is not None]
        product = func in _PRODUCTS
        if func is torch.einsum and args and equations.is_product(args[0]):
            product = True
        if product and len(before) == len(known) == 2:
            return self._gated(known[0], known[1], out)
        if func in _SUMS and len(before) == 2 and known:
            return self._sum(before, known, out)
        if func in _CATS and len(before) == len(known) == 2:
            return self._laid(known, args, kwargs)
        if len(before) != 1 or not known or known[0].made:
            return None
        (t, value) = before[0]
        assert value is not None
        if func is F.glu and value.activation == "none" and not value.part:
            return self._glu(value, out)
        if value.through is not None:
            return value if out.shape == t.shape and _same_memory(out, t) else None
        if out is not t and _same_memory(out, t):
            return replace(value, part=value.part or out.numel() < t.numel())
        if out.shape != t.shape or value.activation != "none" or value.laid is not None:
            return None
        if product and value.is_product:
            return replace(value, scaled=True)
        name = self._activation(func, args, kwargs)
        return None if name is None else replace(value, activation=name)

    def _made(self, before: list[tuple[Tensor, Value | None]], out: Tensor) -> Value | None:
        """What is computed from parameters and buffers alone."""
        weights: list[str] = []
        sized = []
        for t, value in before:
            if value is not None and value.made:
                weights += value.weights
            elif (name := self._held.get(id(t))) is not None:
                weights.append(name)
                sized += [name] if t.numel() == out.numel() else []
            else:
                return None
        return Value(tuple(dict.fromkeys((*sized, *weights))), made=True)

    def _sum(
        self, before: list[tuple[Tensor, Value | None]], known: list[Value], out: Tensor
    ) -> Value | None:
        """A product with its bias added, or with that of an adapter."""
        products = [(t, v) for t, v in before if v is not None and v.is_product]
        if len(products) == 1:
            ((t, value),) = products
            biased = any(id(o) in self._biases for o, _ in before if o is not t)
            return value if biased and not value.scaled else None
        for one, other in (known, known[::-1]) if len(products) == 2 else ():
            more = other.since(one.given)
            if one.scaled or more is None or one.sizes[1] != other.sizes[1]:
                continue
            weights = tuple(dict.fromkeys((*one.weights, *more)))
            if one.after is not None:
                self._go_down(one.after, weights, out)
            return replace(one, weights=weights)
        return None

    def _laid(
        self, known: list[Value], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Value | None:
        """Two products one behind the other."""
        along = args[1] if len(args) > 1 else kwargs.get("dim", 0)
        whole = along == -1 and all(v.is_product and not v.scaled for v in known)
        return replace(known[0], laid=known[1]) if whole else None

    def _glu(self, value: Value, out: Tensor) -> Value | None:
        gate = value.laid or value
        up, part = replace(value, laid=None), value.laid is None
        gate = replace(gate, activation="sigmoid", part=part)
        return self._gated(gate, replace(up, part=part), out)

    def _gated(self, one: Value, other: Value, out: Tensor) -> Value | None:
        """A product of two values, where these are the halves of a gate."""
        if any(v.made or v.scaled or v.laid or v.through is not None for v in (one, other)):
            return None
        if one.given != other.given or (one.activation != "none" != other.activation):
            return None
        gate, up = (other, one) if other.activation != "none" else (one, other)
        stacked = gate.call == up.call
        if stacked is not (gate.part and up.part) or (not stacked and (gate.part or up.part)):
            return None
        hidden = gate.sizes[1] // 2 if stacked else gate.sizes[1]
        if out.shape[-1] != hidden or gate.sizes != up.sizes:
            return None
        made = [gate] if stacked else [gate, up]
        mixed = tuple(v.weights for v in made if len(v.weights) > 1)
        up_weight = None if stacked else up.weights[0]
        sizes = gate.sizes[0], None
        flow = Flow(gate.weights[0], up_weight, None, gate.activation, hidden, sizes, mixed)
        self.found.append(flow)
        return Value((), through=len(self.found) - 1)

    def _multiplied(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Tensor, tuple[str, ...]] | None:
        """What ``func`` multiplies by a weight, and the names that one is made of, or None."""
        x: Any
        weight: Any
        if func is F.linear:
            given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
            x, weight = given.get("input"), given.get("weight")
        elif func is torch.addmm and len(args) == 3:
            _, x, weight = args
        elif func in _MATMULS and len(args) == 2:
            x, weight = args
        elif func is torch.einsum and len(args) == 3 and (how := equations.linear(args[0])):
            x, weight = args[1 + how.x], args[2 - how.x]
        else:
            return None
        if not isinstance(x, Tensor) or not isinstance(weight, Tensor) or weight.dim() != 2:
            return None
        own, known = self._known.get(x), self._known.get(weight)
        of_parameters = id(x) in self._held or (own is not None and own.made)
        if of_parameters and func is not F.linear:
            return None  # a weight of two, as an adapter's
        if id(weight) in self._weights:
            return x, (self._weights[id(weight)],)
        return (x, known.weights) if known is not None and known.made else None

    def _number(self, x: Tensor) -> int:
        """The same for the same tensor, as long as it is not written to."""
        known = self._inputs.get(id(x))
        if known is None or known[0]() is not x:
            known = self._inputs[id(x)] = weakref.ref(x), next(self._numbers)
        return hash((known[1], 0 if x.is_inference() else x._version))

    def _activation(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        rest = args[1:]
        key = func, repr(rest), repr(sorted(kwargs.items()))
        if key not in self._activations:
            call: Callable[[Tensor], Any] = lambda t: func(t, *rest, **kwargs)  # noqa: E731
            found = recognise(call)
            self._activations[key] = None if found is None else found.name
        return self._activations[key]


def could_hold(model: nn.Module) -> bool:
    """Whether the sizes of a model's weights, tied ones counted twice, allow a gated MLP."""
    named = model.named_parameters(remove_duplicate=False)
    shapes = [tuple(p.shape) for _, p in named if p.dim() == 2]
    if len(set(shapes)) < len(shapes):
        return True
    sizes = {size for shape in shapes for size in shape}
    return any(n % 2 == 0 and n // 2 in sizes for n in sizes)


def _flat(args: tuple[Any, ...]) -> Iterable[Any]:
    for a in args:
        if isinstance(a, list | tuple):
            yield from a
        else:
            yield a


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
