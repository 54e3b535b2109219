"""Arguments of a call: its tensors apart from the structure that holds them."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import EllipsisType, NoneType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fastlinear.core.errors import InputError, UnsupportedError
from fastlinear.core.wrappers import PLAIN
from fastlinear.cuda_graphs.outputs import ReusedOutput

_TENSOR = "tensor"
_BY_REPR = (float, complex)  # 0.0 == -0.0 and nan != nan: their text tells them apart
_CONSTANTS = (
    NoneType,
    bool,
    int,
    str,
    bytes,
    EllipsisType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
)


def flatten(value: Any, tensors: list[Tensor]) -> Hashable:
    """Append the tensors of a value to ``tensors``; returns the rest of it, to use in a key.

    Raises UnsupportedError for an object that is neither a tensor, a constant, nor a tuple, list
    or dict of them: what it holds might change unnoticed.
    """
    kind = type(value)
    if kind in PLAIN:
        tensors.append(value)
        return _TENSOR
    if kind in (tuple, list):
        return kind, tuple(flatten(v, tensors) for v in value)
    if kind is dict:
        return kind, tuple((k, flatten(v, tensors)) for k, v in value.items())
    if kind in _CONSTANTS:
        return kind, value
    if kind in _BY_REPR:
        return kind, repr(value)
    if kind is ReusedOutput:
        tensors.append(value.current())
        return _TENSOR
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind, tuple(flatten(v, tensors) for v in value)
    raise UnsupportedError(
        "graphed",
        "arguments that are plain tensors, numbers, strings, None, or tuples, lists and "
        "dicts of these",
        f"an argument of type {kind.__module__}.{kind.__qualname__}",
        "Pass the tensors and numbers it holds, or keep the object inside the callable.",
    )


@cache
def _plain_call(tensors: int) -> Hashable:
    return (tuple, (_TENSOR,) * tensors), None


def flatten_call(args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Tensor]) -> Any:
    """``flatten`` of positional and keyword arguments, None for no keywords; quick for tensors."""
    if not kwargs:
        for value in args:
            if type(value) not in PLAIN:
                break
        else:
            tensors += args
            return _plain_call(len(args))
    return flatten(args, tensors), flatten(kwargs, tensors) if kwargs else None


def rebuild(spec: Any, tensors: Iterator[Tensor]) -> Any:
    """The inverse of ``flatten``, with other tensors in place."""
    if spec == _TENSOR:
        return next(tensors)
    kind, held = spec
    if kind in (tuple, list):
        return kind(rebuild(s, tensors) for s in held)
    if kind is dict:
        return {k: rebuild(s, tensors) for k, s in held}
    if kind in _BY_REPR:
        return kind(held)
    if kind in _CONSTANTS:
        return held
    return kind(*(rebuild(s, tensors) for s in held))


@dataclass(frozen=True, slots=True)
class Named:
    """One argument of a callable, however it is passed.

    Attributes:
        given: how the caller named it, by position or by name.
        place: its position, None where it has none.
        name: its name, None where it has none or is not known.
        optional: whether a call may leave it out.
    """

    given: int | str
    place: int | None
    name: str | None
    optional: bool


def named(target: Any, arguments: Sequence[int | str]) -> tuple[Named, ...]:
    """The arguments of a callable that positions or names stand for."""
    try:
        signature = inspect.signature(target.forward if isinstance(target, nn.Module) else target)
    except (TypeError, ValueError):  # written in C
        signature = inspect.Signature()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    placed = [p.name for p in signature.parameters.values() if p.kind in kinds]
    found = []
    for given in arguments:
        place, name = (given, None) if isinstance(given, int) else (None, given)
        if place is not None and place < len(placed):
            name = placed[place]
        elif name in placed:
            place = placed.index(name)
        known = signature.parameters.get(name or "")
        optional = known is not None and known.default is not inspect.Parameter.empty
        found.append(Named(given, place, name, optional))
    return tuple(found)


def positions(args: tuple[Any, ...], kwargs: dict[str, Any], wanted: tuple[Named, ...]) -> set[int]:
    """Where in the flat list of tensors the tensors of these arguments stand.

    Raises InputError for one that is not there and has no default.
    """
    found: set[int] = set()
    names: set[int | str | None] = set()
    for one in wanted:
        if one.name in kwargs:
            names.add(one.name)
        elif one.place is not None and one.place < len(args):
            names.add(one.place)
        elif not one.optional:
            raise InputError(
                "graphed",
                "by_address to name arguments of the call",
                f"{one.given!r} beside {len(args)} positional arguments and the keywords "
                f"{', '.join(kwargs) or '(none)'}",
                "Give the position, from 0, or the name that the argument is passed by.",
            )
    seen: list[Tensor] = []
    for name, value in [*enumerate(args), *kwargs.items()]:
        start = len(seen)
        flatten(value, seen)
        if name in names:
            found |= set(range(start, len(seen)))
    return found


class Outputs:
    """The structure of what a callable returned, and which of its leaves are tensors."""

    def __init__(self, returned: Any) -> None:
        leaves, self._tree = pytree.tree_flatten(returned)
        self._leaves = [None if isinstance(v, Tensor) else v for v in leaves]
        self._places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor)]
        self._single = isinstance(returned, Tensor)

    def rebuild(self, tensors: Any) -> Any:
        """The same structure around other tensors."""
        if self._single:
            return tensors[0]
        leaves = list(self._leaves)
        for i, t in zip(self._places, tensors, strict=True):
            leaves[i] = t
        return pytree.tree_unflatten(leaves, self._tree)


def tensors_of(returned: Any) -> list[Tensor]:
    """The tensors of what a callable returned, in order."""
    if isinstance(returned, Tensor):
        return [returned]
    return [v for v in pytree.tree_leaves(returned) if isinstance(v, Tensor)]
